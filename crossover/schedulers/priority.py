"""ByteScheduler's scheduling, the baseline: small pieces, the input side first, waits layer by layer in forward.

Source: Peng et al., ByteScheduler (SOSP 2019). Theirs re-implements SGD and Adam and lets rank 0 order the pieces at
run time; here the user's own optimizer steps one bucket at a time, and the order is worked out once from times that
all ranks agreed on, so that every rank starts the same collectives in the same order.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from crossover.buckets import Bucket
from crossover.reduction import PendingReduction, Reduction
from crossover.schedulers.deferred import DeferredGradient, step_subset
from crossover.schedulers.piece_order import Piece, priority_order
from crossover.schedulers.schedule import Schedule

PROFILED_PASSES = 3


class Priority(Schedule):
    """Synchronous training whose last transfers hide under the next forward pass.

    Gradients are cut into pieces of at most ``partition_bytes``; pieces nearer the input overtake others, except for
    those already within the ``credit_bytes`` in flight. ``step()`` only marks the update as due: each bucket's
    parameters are updated just before the first module that owns one of them runs forward, with the learning rate
    that ``step()`` saw.

    Across ranks: same pieces, same order. Parameters equal those of :class:`Overlapped`, but only at the next forward
    or after ``optimizer.flush()``: evaluate and save within ``optimizer.flushed()``, and flush before parameters are
    taken out of the optimizer's groups.

    Not possible with it, and refused with an error: whatever reads averaged gradients before ``step()``, such as
    clipping by the global norm or ``GradScaler``; parameters that are used without calling the module that owns them.

    Args:
        partition_bytes: largest piece. ByteScheduler's default is 1,000,000 parameters.
        credit_bytes: how much may be in flight before what comes later can no longer overtake. Default there: 4,000,000
            parameters.
        fuse_bytes: smaller tensors that become ready together travel together up to this size.

    Raises:
        ValueError: a size is not a positive number of bytes.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = xo.DistributedOptimizer(optimizer, schedule=xo.schedulers.Priority(partition_bytes=1_000_000))
    """

    def __init__(
        self, partition_bytes: int = 4_000_000, credit_bytes: int = 16_000_000, fuse_bytes: int = 262_144
    ) -> None:
        sizes = {"partition_bytes": partition_bytes, "credit_bytes": credit_bytes, "fuse_bytes": fuse_bytes}
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: is {value!r}; it has to be a positive whole number of bytes")
        self.partition_bytes = partition_bytes
        self.credit_bytes = credit_bytes
        self.bucket_cap_bytes = fuse_bytes
        self._pending: dict[int, PendingReduction] = {}
        self._due: dict[int, list[dict[str, Any]]] = {}
        self._order: list[tuple[int, int, int]] = []
        self._next = 0
        self._ready: set[int] = set()
        self._unserved: set[int] = set()
        self._readied_ns: list[list[int]] = []
        self._planned = False

    def attach(self, reduction: Reduction, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Schedule.attach`."""
        super().attach(reduction, optimizer)
        self._optimizer = weakref.ref(optimizer)
        # Discovering owners by a hook on all modules needs no model argument.
        self._handle: RemovableHandle = register_module_forward_pre_hook(_owner_hook(weakref.ref(self)))

    def detach(self) -> None:
        """See :meth:`Schedule.detach`."""
        super().detach()
        self._handle.remove()
        self._pending.clear()
        self._ready.clear()
        self._unserved.clear()
        self._due.clear()
        self._readied_ns.clear()
        self._next = 0

    def layout(self, buckets: Sequence[Bucket]) -> None:
        """Send in order of arrival until times are known."""
        known = len(self._readied_ns)  # these have been sent earlier in this pass
        super().layout(buckets)
        self._bucket_of = {id(slot.parameter): bucket.index for bucket in buckets for slot in bucket.slots}
        self._order = [piece for bucket in buckets for piece in self._pieces(bucket)]
        self._next = sum(len(self._pieces(bucket)) for bucket in buckets[:known])
        self._readied_ns = [[] for _ in buckets]
        self._planned = False

    def _pieces(self, bucket: Bucket) -> list[tuple[int, int, int]]:
        step = max(self.partition_bytes // bucket.buffer.element_size(), 1)
        size = bucket.buffer.numel()
        return [(bucket.index, start, min(start + step, size)) for start in range(0, size, step)]

    # -- backward ----------------------------------------------------------------------------------------------------

    def prepare(self, bucket: Bucket) -> None:
        """Apply an update of parameters that this pass did not use; wait for an average that no step asked for."""
        if bucket.index in self._due:
            used = next((slot for slot in bucket.slots if slot.parameter.grad is not None), None)
            if used is not None:
                raise _used_elsewhere(used.name)
            self._apply(bucket.index)
        elif bucket.index in self._pending:
            self._pending.pop(bucket.index).wait()

    def ready(self, bucket: Bucket) -> None:
        """Send what the order now allows."""
        for slot, arrived in zip(bucket.slots, bucket.arrived, strict=True):
            # its bucket was updated for another module, perhaps after this parameter had been used
            if arrived and id(slot.parameter) in self._unserved:
                raise _used_elsewhere(slot.name)
        self._pending[bucket.index] = PendingReduction(self.reduction, bucket)
        self._ready.add(bucket.index)
        if not self._planned:
            self._readied_ns[bucket.index].append(time.perf_counter_ns())
        self._send_in_order()

    def _send_in_order(self) -> None:
        while self._next < len(self._order) and self._order[self._next][0] in self._ready:
            index, start, stop = self._order[self._next]
            self._pending[index].send(start, stop)
            self._next += 1

    def finish(self) -> None:
        """Leave a mark in each ``p.grad`` that its average is on its way."""
        assert self._next == len(self._order), "every bucket is ready once backward has ended"
        self._next = 0
        self._ready.clear()
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.grad = DeferredGradient(slot.parameter, slot.name)
        if len({len(times) for times in self._readied_ns}) > 1:  # buckets were added in the middle of this pass
            self._readied_ns = [[] for _ in self.buckets]
        if not self._planned and len(self._readied_ns[0]) > PROFILED_PASSES:
            self._plan()

    def _plan(self) -> None:
        """Work out the order from times that all ranks agree on. Collective."""
        origins = [min(times) for times in zip(*self._readied_ns, strict=True)]
        mine = [
            int(statistics.median(t - origin for t, origin in zip(times, origins, strict=True)))
            for times in self._readied_ns
        ]
        name = f"{self.reduction.name}.priority"
        everyone = self.reduction.communicator.all_gather_object((mine, *self._measure_link()), name=f"{name}.profile")
        readied = [max(times) for times in zip(*(ranks[0] for ranks in everyone), strict=True)]
        latency, per_megabyte = max(ranks[1] for ranks in everyone), max(ranks[2] for ranks in everyone)
        slots = [piece for bucket in self.buckets for piece in self._pieces(bucket)]
        pieces = []
        for index, start, stop in slots:
            nbytes = (stop - start) * self.buckets[index].buffer.element_size()
            # the last bucket to fill belongs to the layers nearest the input, whose forward comes first
            urgency = len(self.buckets) - 1 - index
            pieces.append(Piece(urgency, readied[index], latency + nbytes * per_megabyte // 1_000_000, nbytes))
        self._order = [slots[number] for number in priority_order(pieces, self.credit_bytes)]
        self._planned = True

    def _measure_link(self) -> tuple[int, int]:
        """Nanoseconds for an all-reduce of nearly nothing, and for each million bytes more. Collective."""
        device = self.buckets[0].device
        seconds = []
        for elements in (256, 262_144):
            probe = torch.zeros(elements, device=device)
            times = []
            for number in range(4):
                float(probe[0])  # the device is idle, and below the result is there
                before = time.perf_counter_ns()
                name = f"{self.reduction.name}.priority.probe{elements}.{number}"
                self.reduction.communicator.all_reduce(probe, name=name).wait()
                float(probe[0])
                times.append(time.perf_counter_ns() - before)
            seconds.append(int(statistics.median(times)))
        return seconds[0], max((seconds[1] - seconds[0]) * 1_000_000 // (4 * (262_144 - 256)), 1)

    # -- step and the forward after it -------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Take the marks away: the user's own ``step()`` has nothing to apply."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if isinstance(slot.parameter.grad, DeferredGradient):
                    slot.parameter.grad = None

    def stepped(self) -> None:
        """The update is due, with the options that the parameter groups have now."""
        optimizer = self._optimizer()
        assert optimizer is not None
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        self._due = dict.fromkeys(self._pending, options)
        self._unserved = {id(slot.parameter) for index in self._due for slot in self.buckets[index].slots}

    def before_module(self, module: torch.nn.Module) -> None:
        """Update the parameters that ``module`` owns if that is due."""
        if not self._unserved:
            return
        for parameter in module._parameters.values():
            self._unserved.discard(id(parameter))
            index = self._bucket_of.get(id(parameter))
            if index in self._due:
                self._apply(index)

    def _apply(self, index: int) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        options = self._due.pop(index)
        pending = self._pending.pop(index)
        pending.wait()
        held = [slot.parameter.grad for slot in pending.bucket.slots]
        for slot in pending.bucket.slots:
            slot.parameter.grad = None
        pending.bucket.scatter()
        step_subset(optimizer, [slot.parameter for slot in pending.bucket.slots], options)
        for slot, gradient in zip(pending.bucket.slots, held, strict=True):
            slot.parameter.grad = gradient

    def flush(self) -> None:
        """Apply every update that is due; drop averages that no ``step()`` asked for."""
        for index in sorted(self._due, reverse=True):
            self._apply(index)
        self._unserved.clear()
        self.settle()

    def settle(self) -> None:
        """Wait for averages that will not be applied."""
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()
        self._due.clear()


def _used_elsewhere(name: str) -> ValueError:
    return ValueError(
        f"parameter {name!r}: was used in forward without calling the module that owns it, so its update may have come "
        "too late; the Priority schedule cannot serve this model, use Overlapped"
    )


def _owner_hook(schedule_ref: weakref.ref[Priority]) -> Any:
    def before_forward(module: torch.nn.Module, args: Any) -> None:
        schedule = schedule_ref()
        if schedule is not None:
            schedule.before_module(module)

    return before_forward
