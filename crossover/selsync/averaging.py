"""What a synchronisation averages: parameters, and if wanted buffers and optimizer state, in a few flat all-reduces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossover.accounted import AccountedReduction
from crossover.comm.communicator import Communicator, ReduceOp
from crossover.reduction import Reduction

CAP_BYTES = 25 << 20
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, slots=True)
class Averaged:
    """What one synchronisation sent and found.

    Attributes:
        nbytes: payload handed to collectives.
        collectives: packs that were sent.
        drift: Euclidean distance of this rank's parameters from the average; ``None`` unless asked for.
    """

    nbytes: int
    collectives: int
    drift: float | None


class Averager:
    """Replaces tensors by their average over all ranks that take part; bit-equal everywhere afterwards.

    Tensors of one dtype and device travel together in flat buffers. Half precision is sent and added in float32, unless
    packs are made that compress. Whole numbers and flags, such as BatchNorm's count of batches, become the largest of
    all ranks.

    Args:
        reduction: whose ranks take part, and where costs are booked.
        pack: makes the packs of parameters, given buffers to use.
    """

    def __init__(self, reduction: Reduction, pack: MakePacks) -> None:
        self._reduction = reduction
        self._pack = pack
        self._buffers: dict[int, Tensor] = {}

    @torch.no_grad()
    def run(
        self,
        parameters: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        *,
        stand_in: bool = False,
        measure_drift: bool = False,
    ) -> Averaged:
        """Average now. Collective: the same shapes and dtypes in the same order on every rank.

        Args:
            parameters: overwritten in place.
            others: likewise, but not part of :attr:`Averaged.drift`.
            stand_in: this rank has no data left: it adds nothing, and takes the average of the others.
            measure_drift: compute :attr:`Averaged.drift`, at the price of one more pass over the parameters.
        """
        packs = list(self._pack(parameters, self._buffers))
        measured = len(packs) if measure_drift else 0
        for number, tensors in enumerate(pack_up(others), start=len(packs)):
            packs.append(Pack(tensors, self._buffers.get(number)))
        for number, pack in enumerate(packs):
            self._buffers[number] = pack.buffer
            pack.fill(stand_in)
            pack.send(self._reduction, f"average{number}")
        squares = sum(pack.take(stand_in, number < measured) for number, pack in enumerate(packs))
        return Averaged(sum(pack.nbytes for pack in packs), len(packs), squares**0.5 if measure_drift else None)

    def release(self) -> None:
        """Keep no memory until the next average."""
        self._buffers.clear()


class Pack:
    """Tensors of one kind that travel together, behind them one element by which ranks that add something count.

    Args:
        tensors: of one dtype and device.
        buffer: where they travel, if it fits; else new memory is taken.

    Attributes:
        buffer: where they travel.
        parts: places in it, with the tensors' shapes.
        nbytes: handed to collectives.
        stands_in: whether this rank adds nothing.
    """

    def __init__(self, tensors: Sequence[Tensor], buffer: Tensor | None = None) -> None:
        self._tensors = [as_real(tensor) for tensor in tensors]
        self._average = tensors[0].is_floating_point() or tensors[0].is_complex()
        first, size = self._tensors[0], sum(tensor.numel() for tensor in self._tensors) + 1
        dtype = wire_dtype(first.dtype)
        if buffer is None or (buffer.numel(), buffer.dtype, buffer.device) != (size, dtype, first.device):
            buffer = torch.empty(size, dtype=dtype, device=first.device)
        self.buffer = buffer
        self.parts = _parts(buffer, self._tensors)
        self.nbytes = size * buffer.element_size()
        self.stands_in = False

    def fill(self, stand_in: bool) -> None:
        """Put into the buffer what this rank adds: its tensors, or nothing."""
        self.stands_in = stand_in
        if stand_in:
            self.buffer.fill_(0 if self._average else torch.iinfo(self.buffer.dtype).min)
        else:
            torch._foreach_copy_(self.parts, self._tensors)
            self.buffer[-1:].fill_(1)

    def send(self, reduction: Reduction, name: str, link: Communicator | None = None) -> None:
        """Start the all-reduce, over ``link`` if that is given; see :class:`AccountedReduction`."""
        op = ReduceOp.SUM if self._average else ReduceOp.MAX
        self._work = AccountedReduction(reduction, self.buffer, op, name=name, link=link)

    def arrive(self, stand_in: bool) -> bool:
        """Wait, and leave the average in the buffer. Whether there is one: not where all ranks stand in."""
        buffer = self._work.wait()
        if stand_in and buffer[-1] < 1:
            return False
        if self._average:
            buffer[:-1].div_(buffer[-1:])
        return True

    @property
    def span_ns(self) -> tuple[int, int]:
        """When it was sent and when it was through, ``perf_counter`` nanoseconds; 0 where the backend did not tell."""
        return self._work.started_ns, self._work.completed_ns

    def take(self, stand_in: bool, measure_drift: bool) -> float:
        """Wait, and overwrite the tensors; the square of how far they were from the average, if asked for."""
        if not self.arrive(stand_in):
            return 0.0
        squares = 0.0
        if measure_drift:
            wide = [tensor.to(self.buffer.dtype) for tensor in self._tensors]
            squares = float(torch.stack(torch._foreach_norm(torch._foreach_sub(wide, self.parts))).square().sum())
        torch._foreach_copy_(self._tensors, self.parts)
        return squares


MakePacks = Callable[[Sequence[Tensor], dict[int, Tensor]], Sequence[Pack]]


def pack_up(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors that travel together: of one kind, up to a size."""
    packs: list[list[Tensor]] = []
    opened: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        kind = (tensor.dtype, tensor.device)
        pack, size = opened.get(kind, ([], CAP_BYTES))
        if size >= CAP_BYTES:
            pack, size = [], 0
            packs.append(pack)
        pack.append(tensor)
        opened[kind] = (pack, size + tensor.numel() * tensor.element_size())
    return packs


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of ``dtype`` are added up: half precision in float32."""
    return _WIDER.get(dtype, dtype)


def as_real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers or bytes; any shape, as only corresponding elements meet."""
    values = tensor.detach()
    if values.is_complex():
        return torch.view_as_real(values)
    return values.view(torch.uint8) if values.dtype is torch.bool else values


def _parts(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Places in the buffer with the tensors' shapes and, where memory is dense, their strides."""
    parts, offset = [], 0
    for tensor in tensors:
        strides = torch.empty_like(tensor, device="meta").stride()
        parts.append(buffer[offset : offset + tensor.numel()].as_strided(tensor.shape, strides))
        offset += tensor.numel()
    return parts
