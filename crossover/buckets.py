"""Flat buffers that hold the gradients of several parameters: the unit of communication.

:func:`crossover.bucket_plan.plan_buckets` decides which parameters travel together; :class:`Bucket` is one such buffer,
with the views into it that serve as ``p.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
SMALL_TENSOR_BYTES = 32 * 1024  # below this, copying many tensors in one call beats scaling each one while it is copied

# What goes with a bucket's memory: see Bucket.swap.
_HELD = (
    *("buffer", "gradients", "counts", "flags", "absent", "tail", "slots", "_pointers"),
    *("missing", "announces", "stepped"),
)


@dataclass(slots=True)
class Slot:
    """One parameter's place in a bucket.

    Attributes:
        index: position of the parameter among all parameters of the optimizer.
        name: for messages.
        parameter: the parameter itself.
        view: its part of the buffer, with the parameter's shape and, where that is dense, its strides.
        pointer: address of ``view``, by which a gradient that already lives in the bucket is recognised.
        spare: an alias of ``view`` that no user gets hold of.
        small: whether it is cheaper to copy it together with others.
        sparse_dimensions: set while a sparse gradient travels as a dense one.
    """

    index: int
    name: str
    parameter: Tensor
    view: Tensor
    pointer: int
    spare: Tensor
    small: bool
    sparse_dimensions: int | None = None


class Bucket:
    """The gradients of some parameters of one dtype on one device, in one flat buffer.

    Behind the gradients the buffer carries one flag per parameter, the number of ranks that have a gradient for it,
    the number of ranks that take part only to keep others from waiting (see :meth:`join`), of those that have
    parameters without a bucket, of those that stepped since the last pass, and of those that did not. They travel in
    the same all-reduce, so that a parameter that no rank used stays ``None`` everywhere, and a parameter or a step that
    not all ranks have is noticed, without a collective of its own.

    Attributes:
        index: position in launch order.
        name: readable name of its collectives.
        buffer: flat, real-valued; gradients first, then the flags.
        slots: the parameters, in the order in which their gradients arrive.
        pending: gradients that have not arrived in this backward pass.
        arrived: one byte per slot, set once its gradient arrived in this backward pass.
        missing: slots without a gradient on this rank when it was last gathered.
        announces: whether this rank has parameters without a bucket; set before :meth:`gather`.
        stepped: whether the optimizer has stepped since the last shared pass, ``None`` where this rank only stands in;
            set before :meth:`gather`.
        adds: :meth:`gather` adds to what the buffer holds of earlier passes, instead of overwriting it.
    """

    def __init__(self, index: int, members: Sequence[tuple[int, str, Tensor]]) -> None:
        first = members[0][2]
        self.index = index
        self.name = f"bucket{index}"
        self.dtype = first.dtype
        self.device = first.device
        self._ordinal = first.get_device()
        real = torch.empty(0, dtype=first.dtype).real.dtype
        # Where tensors are many and small they lie without gaps, so that one call can join them.
        small = sum(m[2].numel() for m in members) * first.element_size() < len(members) * SMALL_TENSOR_BYTES
        step = 1 if small else max(ALIGNMENT_BYTES // first.element_size(), 1)
        offsets, end = [], 0
        for _, _, parameter in members:
            offsets.append(end)
            end += -(-parameter.numel() // step) * step
        scale = 2 if first.is_complex() else 1
        self.buffer = torch.zeros(end * scale + len(members) + 4, dtype=real, device=first.device)
        self.gradients = self.buffer[: end * scale]
        self.counts = self.buffer[end * scale :]
        self.flags = self.buffer[end * scale : -4]
        self.absent = self.buffer[-4:-3]
        self.tail = self.buffer[-4:]
        typed = self.gradients.view(first.dtype) if first.is_complex() else self.gradients
        self.slots = [
            _slot(index, name, parameter, typed, offset)
            for (index, name, parameter), offset in zip(members, offsets, strict=True)
        ]
        flags = [1] * len(members)
        # what is counted where all gradients are there: without a step since the last pass, and with one
        self._usual_counts = self.buffer.new_tensor([[*flags, 0, 0, 0, 1], [*flags, 0, 0, 1, 0]]).unbind()
        self._pointers = [slot.pointer for slot in self.slots]
        self._joinable = small and not first.is_complex() and all(slot.view.is_contiguous() for slot in self.slots)
        self.missing: list[int] = []
        self.announces = False
        self.stepped: bool | None = False
        self.adds = False
        self.reset()

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.pending = len(self.slots)
        self.arrived = bytearray(len(self.slots))
        self.taken: set[int] = set()

    @torch.no_grad()
    def take(self, place: int, scale: float) -> None:
        """Bring one gradient into the buffer ahead of :meth:`gather`, while it is in the processor's cache.

        Does nothing for small tensors, which are copied together, and for what needs a closer look.
        """
        slot = self.slots[place]
        gradient = slot.parameter.grad
        # Adding is left to gather(), which does it in one way: bits do not depend on when gradients arrived.
        if slot.small or self.adds or gradient is None or gradient.layout is not torch.strided:
            return
        if gradient.data_ptr() == slot.pointer:
            if scale != 1.0:
                gradient.mul_(scale)
        elif gradient.dtype is self.dtype and gradient.shape == slot.view.shape and self._at_home(slot):
            torch.mul(gradient, scale, out=slot.view)
            slot.parameter.grad = slot.view
        else:
            return
        self.taken.add(place)

    def _at_home(self, slot: Slot) -> bool:
        """Put back a view that ``p.grad.data = ...`` has moved; whether the parameter is still on this device."""
        if slot.view.data_ptr() != slot.pointer:
            slot.view = slot.spare.detach()
        return slot.parameter.get_device() == self._ordinal

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, flags included."""
        return self.buffer.numel() * self.buffer.element_size()

    @torch.no_grad()
    def gather(self, scale: float) -> None:
        """Bring this rank's gradients into the buffer, multiplied by ``scale``; a missing gradient counts as zero.

        From here on ``p.grad`` is the view, so that the memory of a gradient produced elsewhere is free at once.
        """
        before, self.missing = self.missing, []
        if self.taken or not (self._joinable and self._join_all(scale)):  # what was taken has been scaled
            self._bring(scale)
        if self.adds:
            self._count_again(before)
            return
        self.counts.copy_(self._usual_counts[bool(self.stepped)])
        if self.announces:
            self.tail[1] = 1
        for place in self.missing:
            self.slots[place].view.zero_()
            self.flags[place] = 0

    def _count_again(self, missing_before: list[int]) -> None:
        """Flags of one more pass. Whether all ranks stepped is asked of the first pass only, after which it matters."""
        self.flags.add_(1)
        for place in self.missing:
            self.flags[place] -= 1
        if self.announces:
            self.tail[1] = 1
        self.missing = sorted({*missing_before, *self.missing})

    def _join_all(self, scale: float) -> bool:
        """Copy many small gradients at once; ``False`` if one of them needs a closer look."""
        gradients = [slot.parameter.grad for slot in self.slots]
        if any(gradient is None or gradient.layout is not torch.strided for gradient in gradients):
            return False
        if [slot.view.data_ptr() for slot in self.slots] != self._pointers:
            return False
        joined = torch._utils._flatten_dense_tensors(gradients)
        if joined.dtype is not self.dtype or joined.numel() != self.gradients.numel():
            return False
        if self.adds:
            self.gradients.add_(joined, alpha=scale)
        else:
            torch.mul(joined, scale, out=self.gradients)
        for slot in self.slots:
            slot.parameter.grad = slot.view
        return True

    def _bring(self, scale: float) -> None:
        outside: list[Slot] = []
        sources: list[Tensor] = []
        inside: list[Tensor] = []
        for place, slot in enumerate(self.slots):
            if place in self.taken:
                continue
            gradient = slot.parameter.grad
            if gradient is not None and gradient.layout is torch.strided and gradient.data_ptr() == slot.pointer:
                inside.append(slot.view)
                continue
            if slot.view.data_ptr() != slot.pointer:  # ``p.grad.data = ...``, as model.to() does it, took it elsewhere
                slot.view = slot.spare.detach()
            if gradient is None:
                self.missing.append(place)
            else:
                outside.append(slot)
                sources.append(self._checked(slot, gradient))
        places = [slot.view for slot in outside]
        if sources and self.adds:
            torch._foreach_add_(places, sources, alpha=scale)
            places = []
        elif sources:
            torch._foreach_copy_(places, sources)
        if scale != 1.0 and (inside or places):
            torch._foreach_mul_(inside + places, scale)
        for slot in outside:
            if slot.sparse_dimensions is None:
                slot.parameter.grad = slot.view

    def _checked(self, slot: Slot, gradient: Tensor) -> Tensor:
        if gradient.dtype is not self.dtype or gradient.get_device() != self._ordinal:
            raise ValueError(
                f"parameter {slot.name!r}: was {self.dtype} on {self.device} when it was wrapped and its gradient is "
                f"now {gradient.dtype} on {gradient.device}; convert or move the model before DistributedOptimizer(...)"
            )
        if gradient.shape != slot.view.shape:
            raise ValueError(
                f"parameter {slot.name!r}: had shape {tuple(slot.view.shape)} when it was wrapped and its gradient now "
                f"has {tuple(gradient.shape)}; give it its shape before DistributedOptimizer(...), or put a new "
                "parameter into the optimizer's groups"
            )
        if gradient.layout is torch.strided:
            return gradient
        slot.sparse_dimensions = gradient.sparse_dim()
        return gradient.to_dense()

    def join(self) -> None:
        """Stand in for this rank's gradients with nothing, and say so: the average is then over the other ranks."""
        if self.adds:
            self.absent.add_(1)
            return
        self.buffer.zero_()
        self.absent.fill_(1)
        self.tail[1] = float(self.announces)
        self.missing = []

    @torch.no_grad()
    def move_in(self) -> None:
        """Take over averages that lie elsewhere: from here on ``p.grad`` is the view, with the same values."""
        for slot in self.slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                slot.view.copy_(gradient)
                slot.parameter.grad = slot.view

    def twin(self) -> Bucket:
        """Another bucket of the same parameters, with memory of its own."""
        return Bucket(self.index, [(slot.index, slot.name, slot.parameter) for slot in self.slots])

    def swap(self, other: Bucket) -> None:
        """Exchange memory, and what it holds, with a :meth:`twin`."""
        for name in _HELD:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    @torch.no_grad()
    def scatter(self) -> None:
        """Let every ``p.grad`` be its part of the buffer; one that no rank had stays as it is."""
        unused: set[int] = set()
        if self.missing:
            flags = self.flags.tolist()
            unused = {place for place in self.missing if not flags[place]}
        for place, slot in enumerate(self.slots):
            if slot.sparse_dimensions is not None:
                slot.parameter.grad = slot.view.to_sparse(slot.sparse_dimensions)
                slot.sparse_dimensions = None
            elif slot.parameter.grad is not slot.view and place not in unused:
                slot.parameter.grad = slot.view


def _slot(index: int, name: str, parameter: Tensor, flat: Tensor, offset: int) -> Slot:
    part = flat[offset : offset + parameter.numel()]
    # torch keeps strides in an empty_like only where memory is dense and not overlapping, which is just what a view
    # needs
    view = part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
    small = parameter.numel() * parameter.element_size() < SMALL_TENSOR_BYTES
    return Slot(index, name, parameter, view, view.data_ptr(), view.detach(), small)
