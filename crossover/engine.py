"""What happens to gradients between ``backward()`` and ``step()``: the step contract, driven by autograd's hooks.

The engine knows parameters, buckets and one schedule. It never touches the user's optimizer but to read its groups.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from crossover.buckets import Bucket
from crossover.comm.communicator import Communicator
from crossover.errors import CommunicationError
from crossover.layout import BucketOptions, arrange
from crossover.parameters import (
    NamedParameter,
    ParameterBook,
    agree,
    checksum,
    held_by_ddp,
    refuse_ddp,
    require_equal_weights,
)
from crossover.reduction import Reduction
from crossover.schedulers.schedule import Schedule
from crossover.sparse import reduce_sparse

NO_TASK = -1
current_task = torch._C._current_graph_task_id


class Engine:
    """Brings the gradients of one optimizer together over the ranks of ``reduction.communicator``.

    A *window* is what one ``step()`` consumes: one or more backward passes, the last of which is shared with the other
    ranks. In the first shared pass the order in which gradients arrive is learned, agreed with all ranks, and buckets
    are made; from then on each bucket goes to the schedule as soon as it is full.

    Across ranks: all start the same collectives in the same order, whatever order hooks fire in.
    """

    def __init__(
        self,
        book: ParameterBook,
        reduction: Reduction,
        schedule: Schedule,
        options: BucketOptions,
        backward_passes_per_step: int = 1,
    ) -> None:
        self.book = book
        self.reduction = reduction
        self.schedule = schedule
        self.options = options
        self.backward_passes_per_step = backward_passes_per_step
        self.passes = 0
        self.shares = 0
        self.shares_at_join = 0
        self.stepped = False
        self.joined = False
        self.before_share: Callable[[], None] | None = None
        self.after_first_share: Callable[[], None] | None = None
        self.buckets: list[Bucket] = []
        self.sparse: list[NamedParameter] = []
        self._tracked: dict[int, NamedParameter] = {}
        self._arrivals: dict[int, None] = {}
        self._handles: list[RemovableHandle] = []
        self._next = 0
        self._next_sparse = 0
        self._placed = 0
        self._active = False
        self._shared = False
        self._early = False
        self._announced = False
        self._local_depth = 0
        self._task = NO_TASK
        self._in_place = True
        self._witness: tuple[Tensor, Tensor, int] | None = None
        # Parameters on several devices have several autograd threads, and launch order is one for all of them.
        self._sending = threading.RLock()
        self._track(book.trainable())

    @property
    def communicator(self) -> Communicator:
        """The ranks that take part."""
        return self.reduction.communicator

    @property
    def held(self) -> frozenset[int]:
        """Ids of the parameters whose gradients are averaged here."""
        return frozenset(self._tracked)

    @property
    def unshared(self) -> bool:
        """Whether gradients were accumulated that other ranks have not seen."""
        return self.passes > 0

    # -- hooks -------------------------------------------------------------------------------------------------------

    def track(self) -> list[NamedParameter]:
        """Hook parameters that have come to require a gradient; they get a bucket in the next shared pass.

        Returns:
            The parameters hooked by this call.
        """
        return self._track(self.book.trainable()) if self.book.changed() else []

    def _track(self, parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
        fresh = [parameter for parameter in parameters if id(parameter.tensor) not in self._tracked]
        for parameter in fresh:
            self._tracked[id(parameter.tensor)] = parameter
            self._hook(parameter.tensor, self._learning_hook(id(parameter.tensor)))
        return fresh

    def detach(self) -> None:
        """Let go of parameters, schedule and communicator. Not a collective."""
        self._unhook()
        self.schedule.detach()
        self.communicator.close()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
        frozen = not parameter.requires_grad
        if frozen:  # since it was wrapped; torch refuses hooks then, but keeps those there are for when it is trained
            parameter.requires_grad_(True)
        self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        if frozen:
            parameter.requires_grad_(False)

    def _learning_hook(self, key: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if (task := current_task()) != self._task:
                self._enter(task, parameter)
            self._arrivals.setdefault(key)

        return arrived

    def _bucket_hook(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        large, scale = not bucket.slots[place].small, self.reduction.scaling.before

        def arrived(parameter: Tensor) -> None:
            if (task := current_task()) != self._task:
                self._enter(task, parameter)
            if bucket.arrived[place]:
                self._arrived_again(bucket, place)
                return
            bucket.arrived[place] = 1
            if large and self._early:
                if not bucket.taken:
                    self.schedule.prepare(bucket)
                bucket.take(place, scale)
            bucket.pending -= 1
            if not bucket.pending and self._shared:
                self._send_full()

        return arrived

    def _arrived_again(self, bucket: Bucket, place: int) -> None:
        """A gradient that had arrived was added to once more before its backward pass ended."""
        if self._next > bucket.index or place in bucket.taken:
            raise ValueError(
                f"parameter {bucket.slots[place].name!r}: received another gradient in the same backward() after its "
                "bucket was sent, as happens with shared weights under reentrant checkpointing; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )

    # -- a backward pass ---------------------------------------------------------------------------------------------

    def _enter(self, task: int, parameter: Tensor) -> None:
        """The first gradient of a backward pass, or of one within it (reentrant checkpointing), or after such a one."""
        nested = _inside_function_backward()
        if self._active and self._task != NO_TASK and not nested:
            self._recover()
        if not self._active:
            self._active = True
            self._in_place = not torch.is_grad_enabled()
            self._notice_cleared_window(parameter)
            self._shared = not self._local_depth and self.passes + 1 >= self.backward_passes_per_step
            self._early = self._shared
        # Reentrant checkpointing may add to a gradient again, which by then must not have been scaled.
        self._early = self._early and not nested
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self._shared:
            self._announce()

    def _notice_cleared_window(self, parameter: Tensor) -> None:
        """``model.zero_grad()`` tells nobody, but leaves other gradient tensors than the window had, or zeros."""
        if self.passes and self._witness is not None:
            witness, gradient, version = self._witness
            changed = witness is not parameter and gradient._version != version
            if witness.grad is not gradient or (changed and not gradient.any()):
                self.passes = 0

    def _last_arrival(self) -> tuple[Tensor, Tensor, int] | None:
        """A parameter that is not likely to be the first of the next pass, its gradient, and the gradient's version."""
        last = None
        for bucket in reversed(self.buckets):
            if (place := bucket.arrived.rfind(1)) >= 0:
                last = bucket.slots[place].parameter
                break
        if last is None and self._arrivals:
            last = self._tracked[next(reversed(self._arrivals))].tensor
        # with create_graph=True each pass leaves another tensor, cleared or not
        if last is None or last.grad is None or last.grad.layout is not torch.strided or not self._in_place:
            return None
        return last, last.grad, last.grad._version

    def _recover(self) -> None:
        """The backward pass before this one ended in an exception."""
        if self._next:
            raise CommunicationError(
                f"rank {self.communicator.rank}: an earlier backward() ended in an exception after {self._next} of "
                f"{len(self.buckets)} buckets had been sent, so ranks are out of step; restart from a checkpoint"
            )
        self._reset_pass()

    def _announce(self) -> None:
        if self._announced:
            return
        self._announced = True
        if not self.joined and self.before_share is not None:
            self.before_share()
        self.track()
        if self.reduction.others_grew:
            self._adopt([])

    def _end(self) -> None:
        if not self._active:
            return
        if self._waits_for_outer_backward():
            self._task = NO_TASK
        elif self._shared:
            self._share()
        else:
            self.passes += 1
            self._witness = self._last_arrival()
            self._reset_pass()

    def _waits_for_outer_backward(self) -> bool:
        """Whether this is the end of a backward pass run by reentrant checkpointing within another that goes on."""
        incomplete = not self.buckets or any(bucket.pending for bucket in self.buckets)
        return incomplete and _inside_function_backward()

    def _reset_pass(self) -> None:
        self._active = False
        self._announced = False
        self._next = 0
        self._next_sparse = 0
        self._arrivals.clear()
        for bucket in self.buckets:
            bucket.reset()

    def _send_full(self) -> None:
        with self._sending:
            while self._next < len(self.buckets) and not self.buckets[self._next].pending:
                self._send(self.buckets[self._next])

    def _send(self, bucket: Bucket) -> None:
        if not bucket.taken:
            self.schedule.prepare(bucket)
        bucket.announces = self._grown
        bucket.stepped = None if self.joined else self.stepped
        if self.joined:
            bucket.join()
        else:
            bucket.gather(self.reduction.scaling.before)
        self._next += 1
        self.schedule.ready(bucket)

    def share(self) -> None:
        """Share what was accumulated, now. Collective."""
        self._announce()
        self._share()

    def _share(self) -> None:
        try:
            if self.buckets or self.sparse:
                self._exchange()
            if self._grown or self.reduction.others_grew:
                self._adopt(self._newcomers())
                self._exchange()
        finally:
            self._reset_pass()
            self._witness = None
            self.passes = 0
        self.shares += 1
        self.stepped = False
        if self.shares == 1 and self.after_first_share is not None:
            self.after_first_share()

    def _exchange(self) -> None:
        """Send what has not been sent, in launch order, and leave in ``p.grad`` what is due."""
        with self._sending:
            for bucket in self.buckets[self._next :]:
                self._send(bucket)
        for parameter in self.sparse[self._next_sparse :]:
            reduce_sparse(
                self.communicator,
                parameter.tensor,
                self.reduction.scaling,
                joined=self.joined,
                name=f"{self.reduction.name}.sparse.{parameter.name}",
            )
        self._next_sparse = len(self.sparse)
        self.schedule.finish()

    # -- buckets -----------------------------------------------------------------------------------------------------

    @property
    def _grown(self) -> bool:
        """Whether parameters of this rank have no bucket yet."""
        return len(self._tracked) > self._placed

    def _newcomers(self) -> list[NamedParameter]:
        known = {id(slot.parameter) for bucket in self.buckets for slot in bucket.slots}
        known.update(id(parameter.tensor) for parameter in self.sparse)
        return [parameter for key, parameter in self._tracked.items() if key not in known]

    def _adopt(self, newcomers: Sequence[NamedParameter]) -> None:
        """Agree with all ranks on parameters that have no bucket yet, and on the order in which they are sent.

        Without ``newcomers`` other ranks have some: this names them, on every rank.
        """
        self.reduction.others_grew = False
        label = f"{self.reduction.name}.adopt"
        try:
            agree(self.communicator, newcomers, {}, name=label)
        except CommunicationError as error:
            names = ", ".join(repr(parameter.name) for parameter in newcomers[:3])
            raise CommunicationError(
                f"{error} (this rank was to agree with the others on {len(newcomers)} parameters that are new to it: "
                f"{names}{', ...' if len(newcomers) > 3 else ''})"
            ) from error
        place = {id(parameter.tensor): number for number, parameter in enumerate(newcomers)}
        facts = self.communicator.all_gather_object(
            {
                "order": [place[key] for key in self._arrivals if key in place],
                "sparse": [number for number, p in enumerate(newcomers) if _is_sparse(p.tensor.grad)],
                "sums": [checksum(parameter.tensor) for parameter in newcomers],
                "ddp": held_by_ddp(newcomers),
            },
            name=f"{label}.order",
        )
        refuse_ddp([rank_facts["ddp"] for rank_facts in facts])
        require_equal_weights(self.communicator, newcomers, [rank_facts["sums"] for rank_facts in facts])
        self._build(newcomers, facts)

    def _build(self, newcomers: Sequence[NamedParameter], facts: Sequence[dict[str, Any]]) -> None:
        sparse, members = arrange(newcomers, facts, self.options, self.schedule.bucket_cap_bytes)
        self.sparse += sparse
        first = len(self.buckets)
        self.buckets += [Bucket(first + number, named) for number, named in enumerate(members)]
        self._placed = len(self._tracked)
        self._unhook()
        for bucket in self.buckets:
            for place, slot in enumerate(bucket.slots):
                self._hook(slot.parameter, self._bucket_hook(bucket, place))
        for parameter in self.sparse:
            self._hook(parameter.tensor, self._learning_hook(id(parameter.tensor)))
        self._next = first
        self.schedule.layout(self.buckets)

    # -- windows -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to ``p.grad`` on this rank only."""
        self._local_depth += 1
        try:
            yield
        finally:
            self._local_depth -= 1

    def drop_window(self) -> None:
        """Forget what was accumulated: the user is clearing the gradients."""
        self.passes = 0
        self.schedule.before_step()

    def unseen_gradients(self) -> list[str]:
        """Names of parameters with a gradient that is no average: no hook saw it, or nothing was shared since.

        No hook sees a parameter that was unfrozen where all others stay frozen, a gradient that was set by hand, and a
        parameter that ``torch.utils.swap_tensors`` has swapped.
        """
        self.track()
        averages = {id(slot.parameter): slot.pointer for bucket in self.buckets for slot in bucket.slots}
        averages.update((id(parameter.tensor), 0) for parameter in self.sparse)
        return [
            parameter.name
            for key, parameter in self._tracked.items()
            if (gradient := parameter.tensor.grad) is not None
            and not (key in averages and (gradient.layout is not torch.strided or gradient.data_ptr() == averages[key]))
        ]

    def stand_in(self) -> int:
        """Take part in one shared pass without gradients, for a rank that has no data left. Collective.

        Returns:
            How many ranks stood in, this one included.
        """
        self.joined = True
        try:
            self.share()
            self.schedule.settle()
        finally:
            self.joined = False
            for parameter in self._tracked.values():
                parameter.tensor.grad = None
        return int(self.buckets[-1].absent.item()) if self.buckets else self.communicator.size


def _is_sparse(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _inside_function_backward() -> bool:
    """Whether the calling thread is within the backward of a Python autograd function."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith("torch/autograd/function.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
