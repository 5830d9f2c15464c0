"""What is attached to the user's optimizer: hooks around ``step()``, and the methods that Horovod's users call."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from crossover import runtime
from crossover.advice import Advice
from crossover.engine import Engine
from crossover.errors import CommunicationError, RankMismatchError
from crossover.hidden_step import HiddenSteps, is_plain
from crossover.step_record import StepRecords

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import JoinHook

ATTRIBUTE = "_crossover"
STATE_KEY = "crossover"  # in the optimizer's state_dict(); a bare optimizer leaves it aside
METHODS = (
    "reattach",
    "synchronize",
    "skip_synchronize",
    "no_sync",
    "flush",
    "flushed",
    "set_backward_passes_per_step",
    "zero_grad",
    "join_hook",
)


class Connect(Protocol):
    """Makes the engine for the job as it is; see :func:`crossover.options.connect`."""

    def __call__(self, optimizer: torch.optim.Optimizer, *, number: int) -> Engine | None:
        """The engine, or ``None`` without peers."""


class Attachment:
    """One wrapped optimizer. Its public methods are made available on the optimizer itself.

    Attributes:
        engine: brings gradients together; ``None`` for a lone rank and for ranks outside the process set.
        number: how many optimizers were wrapped before this one.
        steps: steps in which shared gradients were applied.
    """

    attached: ClassVar[weakref.WeakSet[Attachment]] = weakref.WeakSet()
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, optimizer: torch.optim.Optimizer, connect: Connect) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._connect = connect
        self.number = next(self._numbers)
        self.engine: Engine | None = None
        self.steps = 0
        self._shares_at_step = 0
        self._advice = Advice()
        self._records = StepRecords()
        self._hidden_steps = HiddenSteps()
        self._successor: weakref.ref[Attachment] | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Attachment | None:
        """The attachment of a wrapped optimizer, ``None`` if it is not wrapped."""
        return getattr(optimizer, ATTRIBUTE, None)

    @classmethod
    def attach(cls, optimizer: torch.optim.Optimizer, connect: Connect) -> torch.optim.Optimizer:
        """Attach to ``optimizer`` and return it. What is attached goes when the optimizer goes; copies are bare.

        Args:
            optimizer: the user's.
            connect: called with the optimizer and a number that tells the optimizers of a process apart.
        """
        attachment = cls(optimizer, connect)
        attachment.reattach()
        setattr(optimizer, ATTRIBUTE, attachment)
        for method in METHODS:
            setattr(optimizer, method, getattr(attachment, method))
        optimizer.register_step_post_hook(attachment._after_step)
        optimizer.register_step_pre_hook(attachment._before_step)
        optimizer.register_state_dict_post_hook(attachment._add_state)
        optimizer.register_load_state_dict_pre_hook(attachment._take_state)
        # Not at exit, when ranks leave at different times and the job as a whole is being ended.
        weakref.finalize(optimizer, attachment._detach).atexit = False
        cls.attached.add(attachment)
        return optimizer

    @classmethod
    def in_use(cls) -> dict[Attachment, torch.optim.Optimizer]:
        """Those with an engine and their optimizers, in the order in which they were wrapped."""
        # Whoever holds the result holds the optimizers: else the garbage collector could detach one that the script
        # has dropped in the middle of a collective that counts on it.
        found = [(a, optimizer) for a in cls.attached if (optimizer := a._optimizer()) is not None]
        return dict(sorted(((a, o) for a, o in found if a.engine is not None), key=lambda pair: pair[0].number))

    def _detach(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.detach()
        if (optimizer := self._optimizer()) is not None:
            # torch's own mark of a group that this rank is not in: Join then waits for nobody
            optimizer.join_process_group = dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[attr-defined]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -- methods on the optimizer ------------------------------------------------------------------------------------

    def reattach(self) -> None:
        """Take part in the job as it is after ``shutdown()`` and ``init()``, perhaps with other ranks. Collective.

        What was in flight, and gradients that were not shared, are dropped. Elastic training calls it by itself.
        """
        self._detach()
        optimizer = self.optimizer
        self.engine = engine = self._connect(optimizer, number=self.number)
        self._shares_at_step = 0
        self._successor = None
        optimizer.join_device = optimizer.param_groups[0]["params"][0].device  # type: ignore[attr-defined]
        if engine is not None:
            self._take_over(engine)
            self._advice.silent = engine.communicator.rank != 0
            engine.before_share = self._notify_join
            engine.after_first_share = self._expect_skipped_step
            optimizer.join_process_group = getattr(engine.communicator, "group", None)  # type: ignore[attr-defined]

    def _take_over(self, engine: Engine) -> None:
        """Detach optimizers wrapped before that hold a parameter of this one: two averages at once would mix.

        A script that builds an optimizer each epoch no longer uses the old one, but it may live on, and for how long
        differs between ranks where only the garbage collector ends it.
        """
        for other in self.in_use():
            if other is not self and other.engine is not None and other.engine.held & engine.held:
                # not what is collective of a flush: an old optimizer may live on some ranks only
                other.engine.schedule.flush()
                other._detach()
                other._successor = weakref.ref(self)

    def _check_successor(self, successor: Attachment | None) -> None:
        held = frozenset() if successor is None or successor.engine is None else successor.engine.held
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in held:
                    raise ValueError(
                        f"optimizer: this {type(self.optimizer).__name__} is used although another one with some of "
                        "its parameters was wrapped later, so its gradients are no longer averaged; put a parameter "
                        "into one wrapped optimizer only, or call reattach() on the one to go on with"
                    )

    def synchronize(self) -> None:
        """Share gradients that were accumulated on this rank only. Collective if there are any, else does nothing.

        Never needed before clipping: gradients are averaged when ``backward()`` returns. For Horovod scripts.
        """
        if self.engine is not None and self.engine.unshared:
            self.engine.share()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Does nothing, as ``step()`` never averages a second time. For Horovod scripts."""
        yield

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to ``p.grad`` on this rank only; the next one outside shares the sum.

        May be nested, may surround backward alone or forward and backward. Gradients that are still unshared when
        ``step()`` is called are shared then.
        """
        with contextlib.nullcontext() if self.engine is None else self.engine.no_sync():
            yield

    def flush(self) -> None:
        """Bring all that is in flight to its end: equal parameters on every rank afterwards. Collective."""
        if self.engine is not None:
            self.engine.exchange.flush()

    @contextlib.contextmanager
    def flushed(self) -> Iterator[None]:
        """:meth:`flush`, then evaluate or save inside. Collective on entering."""
        self.flush()
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes in a window; all ranks at the same step."""
        if not isinstance(passes, int) or passes < 1:
            raise ValueError(f"passes: is {passes!r}; it has to be a whole number of 1 or more")
        if self.engine is not None:
            self.engine.window.length = passes

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own ``zero_grad``; gradients of an unfinished window are dropped."""
        if self.engine is not None:
            self.engine.drop_window()
        type(self.optimizer).zero_grad(self.optimizer, *args, **kwargs)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join([optimizer])``: uneven inputs, averages over the ranks with data."""
        from crossover.joining import OptimizerJoinHook

        return OptimizerJoinHook(self)

    # -- around the user's step --------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        engine = self.engine
        hidden = self._hidden_steps.begin(optimizer, engine is not None and engine.shares > self._shares_at_step)
        if self._successor is not None:
            self._check_successor(self._successor())
        if engine is None or hidden:
            return
        self._hidden_steps.make_way(optimizer)
        if engine.unshared:
            self._advice.window_ended(engine.passes, engine.window.length)
            engine.share()
        elif engine.shares > self._shares_at_step:
            self._advice.window_ended(0, engine.window.length)
        elif unseen := engine.unseen_gradients():
            if engine.exchange.shares_all:
                self._advice.unseen_gradients(unseen)
            engine.share()
        engine.exchange.before_step()
        if engine.shares > self._shares_at_step:
            engine.schedule.before_update()
        engine.sharing.computing()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        engine, shares = self.engine, 0
        if self._hidden_steps.running:
            if engine is not None:
                self._hidden_steps.take_back(optimizer, untrained=not self.steps)
            return
        if engine is not None:
            shares, self._shares_at_step = engine.shares - self._shares_at_step, engine.shares
            if not shares:  # nothing arrived since the step before this one
                self._advice.step_idle()
                engine.exchange.after_idle_step()
                engine.sharing.between_steps()
                return
            if not engine.exchange.shares_all:
                engine.sharing.communicating()  # the vote is waited for, and no turn may be held then
            engine.exchange.after_step()
            engine.sharing.between_steps()
            self._advice.step_shared(self.steps, shares)
        self.steps += 1
        self._records.emit(engine, self.steps - 1, shares)

    # -- the optimizer's state ---------------------------------------------------------------------------------------

    def _add_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if self.engine is not None and (state := self.engine.exchange.state_dict()):
            state_dict[STATE_KEY] = state
            if self.engine.exchange.apart:
                self._advice.state_of_one_replica()

    def _take_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if self.engine is None:
            return
        if STATE_KEY in state_dict:
            self.engine.exchange.load_state_dict(state_dict[STATE_KEY])
        elif not self.engine.exchange.shares_all:
            self._advice.state_without_ours()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _expect_skipped_step(self) -> None:
        """``GradScaler`` skips a first step that overflowed; torch would warn that the scheduler stepped before it."""
        gradients = [parameter.grad for group in self.optimizer.param_groups for parameter in group["params"]]
        if not all(bool(g.isfinite().all()) for g in gradients if is_plain(g)):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _notify_join(self) -> None:
        from torch.distributed.algorithms.join import Join

        if hasattr(self.optimizer, "_join_config"):
            work = Join.notify_join_context(self.optimizer)  # type: ignore[arg-type]
            if work is not None:
                work.wait()

    @classmethod
    def flush_all(cls) -> None:
        """Flush every optimizer, in the order in which they were wrapped. Collective.

        Raises:
            CommunicationError: other ranks are elsewhere, so what is in flight is lost.
        """
        for attachment in cls.in_use():
            if attachment.engine is not None:
                try:
                    attachment.engine.exchange.flush_at_shutdown()
                except RankMismatchError as error:
                    raise CommunicationError(str(error)) from error


runtime.at_shutdown(Attachment.flush_all)
