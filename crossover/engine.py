"""What happens to gradients between ``backward()`` and ``step()``: the step contract, driven by autograd's hooks.

The engine knows parameters, buckets and one schedule. It never touches the user's optimizer but to read its groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from crossover.autograd import NO_TASK, at_end_of_backward, current_task, hook_gradient, inside_function_backward
from crossover.buckets import Bucket
from crossover.comm.communicator import Communicator
from crossover.errors import CommunicationError
from crossover.exchange import Exchange
from crossover.parameters import NamedParameter, ParameterBook
from crossover.sync.sharing import Sharing
from crossover.window import Window, Witness


class Engine:
    """Brings the gradients of one optimizer together over the ranks of ``reduction.communicator``.

    A *window* is what one ``step()`` consumes: one or more backward passes, the last of which is shared with the other
    ranks. In the first shared pass the order in which gradients arrive is learned, agreed with all ranks, and buckets
    are made; from then on each bucket goes to the schedule as soon as it is full.

    Across ranks: all start the same collectives in the same order, whatever order hooks fire in.

    Attributes:
        book: the optimizer's parameters as they are now.
        reduction: how gradients are combined.
        schedule: when they travel.
        exchange: the buckets, and what of them has been sent.
        window: the backward passes since the last one that was shared.
        sharing: with whom the device is shared; told when it is about to be used and when this rank waits for others.
        shares: shared passes so far.
        shares_at_join: how many there were when ``crossover.join()`` last returned.
        before_share: called when a shared pass begins, on ranks that have data.
        after_first_share: called once.
    """

    def __init__(
        self,
        book: ParameterBook,
        exchange: Exchange,
        backward_passes_per_step: int = 1,
        sharing: Sharing | None = None,
    ) -> None:
        self.book = book
        self.sharing = sharing or Sharing()
        self.reduction = exchange.reduction
        self.schedule = exchange.schedule
        self.exchange = exchange
        self.window = Window(backward_passes_per_step)
        self.shares = 0
        self.shares_at_join = 0
        self.before_share: Callable[[], None] | None = None
        self.after_first_share: Callable[[], None] | None = None
        self._arrivals: dict[int, None] = {}
        self._handles: list[RemovableHandle] = []
        self._active = False
        self._shared = False
        self._early = False
        self._announced = False
        self._task = NO_TASK
        self._in_place = True
        self._track(book.trainable())

    @property
    def communicator(self) -> Communicator:
        """The ranks that take part."""
        return self.reduction.communicator

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In launch order."""
        return self.exchange.buckets

    @property
    def held(self) -> frozenset[int]:
        """Ids of the parameters whose gradients are averaged here."""
        return frozenset(self.exchange.parameters)

    @property
    def passes(self) -> int:
        """Backward passes that other ranks have not seen."""
        return self.window.passes

    @property
    def unshared(self) -> bool:
        """Whether gradients were accumulated that other ranks have not seen."""
        return self.window.passes > 0

    # -- hooks -------------------------------------------------------------------------------------------------------

    def track(self) -> list[NamedParameter]:
        """Hook parameters that have come to require a gradient; they get a bucket in the next shared pass.

        Returns:
            The parameters hooked by this call.
        """
        return self._track(self.book.trainable()) if self.book.changed() else []

    def _track(self, parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
        fresh = self.exchange.add(parameters)
        for parameter in fresh:
            observe = self.exchange.observer(parameter.tensor)
            hook = self._learning_hook(id(parameter.tensor), observe)
            self._handles.append(hook_gradient(parameter.tensor, hook))
        return fresh

    def detach(self) -> None:
        """Let go of parameters, schedule and communicator. Not a collective."""
        self._unhook()
        self.sharing.detach()
        self.schedule.detach()
        self.exchange.close()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _learning_hook(self, key: int, observe: Callable[[Tensor], None] | None = None) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if (task := current_task()) != self._task:
                self._enter(task, parameter)
            self._arrivals.setdefault(key)
            if observe is not None and self._shared:
                observe(parameter)

        return arrived

    def _bucket_hook(self, bucket: Bucket, place: int) -> Callable[[Tensor], None]:
        large, scale = not bucket.slots[place].small, self.reduction.scaling.before
        at_once = not self.sharing.deferred

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
            if not bucket.pending and self._shared and at_once:
                self.exchange.send_full()

        return arrived

    def _arrived_again(self, bucket: Bucket, place: int) -> None:
        """A gradient that had arrived was added to once more before its backward pass ended."""
        if self.exchange.sent > bucket.index or place in bucket.taken:
            raise ValueError(
                f"parameter {bucket.slots[place].name!r}: received another gradient in the same backward() after its "
                "bucket was sent, as happens with shared weights under reentrant checkpointing; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )

    # -- a backward pass ---------------------------------------------------------------------------------------------

    def _enter(self, task: int, parameter: Tensor) -> None:
        """The first gradient of a backward pass, or of one within it (reentrant checkpointing), or after such a one."""
        self.sharing.computing()
        nested = inside_function_backward()
        if self._active and self._task != NO_TASK and not nested:
            self._recover()
        if not self._active:
            self._active = True
            self._in_place = not torch.is_grad_enabled()
            self.window.notice_cleared(parameter)
            self._shared = self._early = self.window.closing
        # Reentrant checkpointing may add to a gradient again, which by then must not have been scaled.
        self._early = self._early and not nested
        self._task = task
        at_end_of_backward(self._end)
        if self._shared:
            self._announce()

    def _recover(self) -> None:
        """The backward pass before this one ended in an exception."""
        if self.exchange.sent:
            raise CommunicationError(
                f"rank {self.communicator.rank}: an earlier backward() ended in an exception after "
                f"{self.exchange.sent} of {len(self.buckets)} buckets had been sent, so ranks are out of step; restart "
                "from a checkpoint"
            )
        self._reset_pass()

    def _announce(self) -> None:
        if self._announced:
            return
        self._announced = True
        if not self.exchange.joined and self.before_share is not None:
            self.before_share()
        self.track()
        if self.reduction.others_grew:  # and this rank has not: all ranks are told what the others have
            self.exchange.adopt([], self._arrivals)

    def _end(self) -> None:
        if not self._active:
            return
        if self._waits_for_outer_backward():
            self._task = NO_TASK
        elif self._shared:
            self.sharing.communicating()  # before anything waits for another rank
            self._share()
        else:
            self.window.add(self._witness())
            self._reset_pass()
            self.sharing.micro_batch()

    def _waits_for_outer_backward(self) -> bool:
        """Whether this is the end of a backward pass run by reentrant checkpointing within another that goes on."""
        incomplete = not self.buckets or any(bucket.pending for bucket in self.buckets)
        return incomplete and inside_function_backward()

    def _witness(self) -> Witness | None:
        last = self.exchange.last_arrival()
        if last is None and self._arrivals:
            last = self.exchange.parameters[next(reversed(self._arrivals))].tensor
        # with create_graph=True each pass leaves another tensor, cleared or not
        return Witness.of(last) if last is not None and self._in_place else None

    def _reset_pass(self) -> None:
        self._active = False
        self._announced = False
        self._arrivals.clear()
        self.exchange.reset()

    # -- sharing -----------------------------------------------------------------------------------------------------

    def share(self) -> None:
        """Share what was accumulated, now. Collective."""
        self.sharing.communicating()
        self._announce()
        self._share()

    def _share(self) -> None:
        try:
            if self.exchange.share(self._arrivals):
                self._hook_buckets()
        finally:
            self._reset_pass()
            self.window.clear()
        self.shares += 1
        self.exchange.stepped = False
        if self.shares == 1 and self.after_first_share is not None:
            self.after_first_share()

    def _hook_buckets(self) -> None:
        self._unhook()
        in_buckets: set[int] = set()
        for bucket in self.exchange.buckets:
            for place, slot in enumerate(bucket.slots):
                self._handles.append(hook_gradient(slot.parameter, self._bucket_hook(bucket, place)))
                in_buckets.add(id(slot.parameter))
        for key, parameter in self.exchange.parameters.items():
            if key not in in_buckets:
                hook = self._learning_hook(key, self.exchange.observer(parameter.tensor))
                self._handles.append(hook_gradient(parameter.tensor, hook))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to ``p.grad`` on this rank only."""
        return self.window.kept_open()

    def drop_window(self) -> None:
        """Forget what was accumulated: the user is clearing the gradients."""
        self.window.clear()
        self.exchange.before_step()

    def unseen_gradients(self) -> list[str]:
        """Names of parameters with a gradient that is no average: no hook saw it, or nothing was shared since.

        No hook sees a parameter that was unfrozen where all others stay frozen, a gradient that was set by hand, and a
        parameter that ``torch.utils.swap_tensors`` has swapped.
        """
        self.track()
        return self.exchange.unseen_gradients()

    def stand_in(self) -> int:
        """Take part in one shared pass without gradients, for a rank that has no data left. Collective.

        Returns:
            How many ranks stood in, this one included.
        """
        self.exchange.joined = True
        try:
            self.share()
            self.exchange.after_stand_in()
        finally:
            self.exchange.joined = False
            for parameter in self.exchange.parameters.values():
                parameter.tensor.grad = None
        return self.exchange.absent
