"""What schedules with late updates have in common: what ``step()`` applies of the generations that travel."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.buckets import Bucket
from crossover.reduction import Reduction
from crossover.schedulers import in_flight
from crossover.schedulers.compensation import Compensation
from crossover.schedulers.deferred import step_subset
from crossover.schedulers.generations import Generation, Generations, Remark
from crossover.schedulers.learning_rate import LearningRateGain
from crossover.schedulers.loss_scale import LossScale
from crossover.schedulers.schedule import Schedule
from crossover.schedulers.spike import SpikeCompensation
from crossover.schedulers.travel import Travel

MERGES = ("gain", "mean", "sum")


class DelayedSchedule(Schedule):
    """Applies generations one update late at most; subclasses say what is sent, closed and applied when.

    Args:
        merge: what a generation of several steps becomes. ``"mean"``: the mean gradient. ``"gain"``: the mean, and the
            learning rate of that one step is multiplied by :meth:`gain`. ``"sum"``: the sum.
        compensation: strength of the correction for weights that have moved on, 0 for none.
        grad_scaler: the ``GradScaler`` of the training loop, if there is one.
        before_flushed_step: called with the parameters before each update that ``flush()`` applies, when gradients are
            unscaled: the place to clip them as the training loop does.
        spike_compensation: momentum is made stable for late gradients, see :mod:`crossover.schedulers.spike`.

    Attributes:
        generations: what travels.
        updates: updates applied.
        dropped: generations that were never applied: of steps that a scaler skipped, of checkpoints that fit nothing.
        unstepped: averages for which no ``step()`` came.
    """

    def __init__(
        self,
        merge: str = "gain",
        compensation: float = 0.0,
        grad_scaler: Any = None,
        before_flushed_step: Callable[[list[Tensor]], object] | None = None,
        spike_compensation: bool = False,
    ) -> None:
        if merge not in MERGES:
            raise ValueError(f"merge: is {merge!r}; use one of {', '.join(MERGES)}")
        if not compensation >= 0:
            raise ValueError(f"compensation: is {compensation!r}; give 0 for none, or a small number such as 0.04")
        self.merge = merge
        self.compensation = Compensation(compensation)
        self.spike = SpikeCompensation(spike_compensation)
        self.loss_scale = LossScale(grad_scaler)
        self.before_flushed_step = before_flushed_step
        self.updates = self.dropped = self.unstepped = 0
        self._due: Generation | None = None
        self._in_pass = False
        self._awaits_step = False
        self._adopted_from: int | None = None
        self._stood_in: tuple[Tensor, int] = (torch.zeros(()), 1)  # summed over a generation's steps, and their number
        self._loaded: dict[str, Any] | None = None
        self._rate = LearningRateGain()

    def attach(self, reduction: Reduction, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Schedule.attach`."""
        super().attach(reduction, optimizer)
        self._optimizer = weakref.ref(optimizer)
        self.loss_scale.attach(optimizer)
        self.generations = Generations(reduction)

    def detach(self) -> None:
        """See :meth:`Schedule.detach`. What is on its way is lost."""
        self._rate.restore()
        self.loss_scale.detach()
        self.generations.add(accumulates=False)
        self.generations = Generations(self.reduction)
        self._due = None
        self._in_pass = self._awaits_step = False
        super().detach()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def suits(self) -> bool:
        """Whether nearly every average so far was followed by a step, as late ones have to be.

        Where one optimizer's backward pass reaches the parameters of another, as in a GAN, averages are made and thrown
        away; a late one would come in the place of the next, and be applied.
        """
        return self.unstepped * 10 <= self.updates

    @abstractmethod
    def travel(self) -> Travel:
        """With a gate, averages of parameters travel and gradients do not: under how many steps. Once attached."""

    def gain(self, steps: int) -> float:
        """Factor on the learning rate for a generation of ``steps`` steps: the square root."""
        return float(steps**0.5)

    # -- a backward pass ---------------------------------------------------------------------------------------------

    def layout(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets. If some are new, what is on its way is brought to its end in this step."""
        self._adopted_from = len(self.buckets) or None
        if self.buckets:
            self.flush()
        super().layout(tuple(buckets))  # the engine's own list grows before layout() is called
        self.generations = Generations(self.reduction, self.buckets)
        if self._adopted_from is None:
            state, self._loaded = self._loaded, None
            in_flight.resume(self, state)

    def prepare(self, bucket: Bucket) -> None:
        """A pass begins with its first bucket."""
        if not self._in_pass:
            self._in_pass = True
            if self._adopted_from is None:
                self._begin_pass()

    def _begin_pass(self) -> None:
        self._rate.restore()
        if self._awaits_step and not self.loss_scale.used:
            self.unstepped += 1
        self._awaits_step = False
        if self._due is not None:  # no step() came for it
            self.dropped += 1
            self._due = None
        self.generations.rescale_to(self.loss_scale.current())

    @abstractmethod
    def finish(self) -> None:
        """See :meth:`Schedule.finish`."""

    def end_step(self, close: bool, apply: int) -> Generation | None:
        """Bring the pass to its end; ``p.grad`` holds what is due, or ``None``.

        Args:
            close: the generation that accumulates is closed.
            apply: generations that are complete now, 0 to 2. Two are applied as one of all their steps.

        Returns:
            What is due.
        """
        self._in_pass = False
        if self._adopted_from is not None:
            return self._end_adoption(self._adopted_from)
        generations = self.generations
        generations.accumulating.steps += 1
        self._awaits_step = any(bucket.stepped is not None for bucket in self.buckets[:1])
        self._clear()
        if not close:
            generations.add(accumulates=True)
            return None
        due = generations.close(apply)
        self._due = None if due is None else self._bring(due)
        if generations.current is not None:
            self.compensation.remember(generations.parameters)
        return self._due

    def _end_adoption(self, first: int) -> Generation | None:
        """Buckets from ``first`` on came in the middle of this pass: their average joins what is due of the others."""
        self._adopted_from = None
        new = self.generations.begin()
        new.wait()
        for bucket in self.buckets[first:]:
            self.reduction.rescale(bucket)
            bucket.scatter()
        self._due = self._due or Generation(new.number, 1, new.scale)
        return self._due

    @torch.no_grad()
    def _bring(self, due: Generation, flushes: bool = False) -> Generation | None:
        """Scale the generation in the buckets and put it into ``p.grad``; ``None`` if it is not to be applied."""
        self._stood_in = self.generations.absent(), due.steps
        # To ask a device makes the host wait. In a step it is not asked: where all ranks stand in, nobody steps.
        asks = flushes or self.generations.on_host
        if due.void or (asks and self.stood_in() == self.reduction.communicator.size):
            return None
        factor = self.loss_scale.current() / due.scale * (due.steps if self.merge == "sum" else 1)
        for bucket in self.buckets:
            self.reduction.rescale(bucket, due.steps, factor)
            bucket.scatter()
        self.compensation.apply(self.buckets)
        return due

    def stood_in(self) -> int:
        """See :meth:`Schedule.stood_in`; of the generation that was complete last."""
        absent, steps = self._stood_in
        return int(absent.item()) // steps

    def _clear(self) -> None:
        for parameter in self.generations.parameters:
            parameter.grad = None

    # -- around the user's step --------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Set the learning rate of this one step."""
        if self.loss_scale.look_for():
            self.unstepped = 0  # it was the scaler that skipped steps
        if self._due is not None:
            self._rate.apply(self.optimizer, self._factor(self._due))

    def _factor(self, due: Generation) -> float:
        return self.gain(due.steps) if self.merge == "gain" and due.steps > 1 else 1.0

    def stepped(self) -> None:
        """The user's optimizer has stepped."""
        if self._due is not None and self._due.late:
            self.spike.complete(self.optimizer)  # with the learning rate of this one step
        self._rate.restore()
        self._awaits_step = False
        if self._due is not None:
            self.updates += 1
            self._due = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send, wait for and apply what is on its way, then what has accumulated, each with today's learning rate.

        What is due in ``p.grad`` stays there for the next ``step()``. Step hooks are not called: nobody calls step().
        """
        self._rate.restore()
        generations = self.generations
        held = [(parameter, parameter.grad) for parameter in generations.parameters]
        try:
            if generations.current is not None:
                generations.send_rest(fresh=False)
                generations.swap()
                self._apply(generations.current)
                generations.swap()  # back: what accumulates, or is due, lies in the buckets
                generations.current = None
            if generations.accumulating.steps:
                generations.send_rest(fresh=True)
                self._apply(generations.begin())
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
        generations.add(accumulates=False)
        self.compensation.forget()

    def _apply(self, generation: Generation) -> None:
        """Take the optimizer's own step with a generation whose transfers go to the buckets' memory."""
        generation.wait()
        self._clear()
        scale, generation.scale = generation.scale, self.loss_scale.current()
        if self._bring(generation, flushes=True) is None:
            return
        if scale != 1.0:
            for bucket in self.buckets:
                bucket.gradients.mul_(1.0 / scale)
        if self.loss_scale.used and not all(bool(bucket.gradients.isfinite().all()) for bucket in self.buckets):
            self.dropped += 1
            return
        parameters = self.generations.parameters
        if self.before_flushed_step is not None:
            self.before_flushed_step(parameters)
        self.compensation.remember(parameters)
        self._rate.apply(self.optimizer, self._factor(generation))
        step_subset(self.optimizer, parameters, [])
        if generation.late:
            self.spike.complete(self.optimizer)
        self._rate.restore()
        self.updates += 1

    def settle(self) -> None:
        """See :meth:`Schedule.settle`."""
        self.generations.settle()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """What goes on after a restart even where gradients are dropped."""
        return {"updates": self.updates, "dropped": self.dropped, "unstepped": self.unstepped}

    def load_counters(self, counters: dict[str, Any], kept: bool) -> None:
        """Take back what :meth:`counters` gave; ``kept``: gradients on their way were taken back as well."""
        self.updates, self.dropped = counters["updates"], counters["dropped"]
        self.unstepped = counters["unstepped"]

    def saved_remarks(self, generation: Generation) -> list[Any]:
        """What is saved of a generation's remarks."""
        return []

    def restored_remarks(self, saved: list[Any]) -> list[Remark]:
        """Remarks out of what was saved."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Schedule.state_dict` and :mod:`crossover.schedulers.in_flight`.

        A gradient that is due in ``p.grad`` and for which no ``step()`` has come yet is not in it.
        """
        return in_flight.save(self) if self.buckets else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave: at the first shared pass, or at once in a job that is training.

        In the latter every rank has to load its own state, in the same step; with another's, what is on its way is
        dropped.
        """
        if not self.buckets:
            self._loaded = state
        elif in_flight.own(self, state):
            self.settle()
            in_flight.restore(self, state)
            in_flight.take_counters(self, state, kept=True)
        else:
            self.dropped += self.generations.discard()
