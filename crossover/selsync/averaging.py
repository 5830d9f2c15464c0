"""What a synchronisation averages: parameters, and if wanted buffers and optimizer state, in a few flat all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossover.accounted import AccountedReduction
from crossover.comm.communicator import ReduceOp
from crossover.reduction import Reduction

CAP_BYTES = 25 << 20
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True, slots=True)
class Averaged:
    """What one synchronisation sent and found.

    Attributes:
        nbytes: payload handed to collectives.
        collectives: how many were started.
        drift: Euclidean distance of this rank's parameters from the average; ``None`` unless asked for.
    """

    nbytes: int
    collectives: int
    drift: float | None


class Averager:
    """Replaces tensors by their average over all ranks that take part; bit-equal everywhere afterwards.

    Tensors of one dtype and device travel together in flat buffers. Half precision is sent and added in float32. Whole
    numbers and flags, such as BatchNorm's count of batches, become the largest of all ranks.

    Args:
        reduction: whose ranks take part, and where costs are booked.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
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
        packs = [_Pack(self._reduction, tensors) for tensors in [*_packs(parameters), *_packs(others)]]
        measured = len(_packs(parameters)) if measure_drift else 0
        for number, pack in enumerate(packs):
            self._buffers[number] = pack.send(self._buffers.get(number), number, stand_in)
        squares = sum(pack.take(stand_in, number < measured) for number, pack in enumerate(packs))
        nbytes = sum(buffer.numel() * buffer.element_size() for buffer in list(self._buffers.values())[: len(packs)])
        return Averaged(nbytes, len(packs), squares**0.5 if measure_drift else None)


class _Pack:
    """Tensors of one kind that travel together, behind them one element by which ranks that add something count."""

    def __init__(self, reduction: Reduction, tensors: Sequence[Tensor]) -> None:
        self._reduction = reduction
        self._tensors = [_real(tensor) for tensor in tensors]
        self._average = tensors[0].is_floating_point() or tensors[0].is_complex()

    def send(self, buffer: Tensor | None, number: int, stand_in: bool) -> Tensor:
        """Start the all-reduce in ``buffer``, or in a new one where that does not fit; returns the one used."""
        first, size = self._tensors[0], sum(tensor.numel() for tensor in self._tensors) + 1
        dtype = _WIDER.get(first.dtype, first.dtype)
        if buffer is None or (buffer.numel(), buffer.dtype, buffer.device) != (size, dtype, first.device):
            buffer = torch.empty(size, dtype=dtype, device=first.device)
        self._parts = _parts(buffer, self._tensors)
        if stand_in:
            buffer.fill_(0 if self._average else torch.iinfo(dtype).min)
        else:
            torch._foreach_copy_(self._parts, self._tensors)
            buffer[-1:].fill_(1)
        op = ReduceOp.SUM if self._average else ReduceOp.MAX
        self._work = AccountedReduction(self._reduction, buffer, op, name=f"average{number}")
        return buffer

    def take(self, stand_in: bool, measure_drift: bool) -> float:
        """Wait, and overwrite the tensors; the square of how far they were from the average, if asked for."""
        buffer = self._work.wait()
        if stand_in and buffer[-1] < 1:
            return 0.0  # all ranks stand in: nothing was added
        if self._average:
            buffer[:-1].div_(buffer[-1:])
        squares = 0.0
        if measure_drift:
            wide = [tensor.to(buffer.dtype) for tensor in self._tensors]
            squares = float(torch.stack(torch._foreach_norm(torch._foreach_sub(wide, self._parts))).square().sum())
        torch._foreach_copy_(self._tensors, self._parts)
        return squares


def _packs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
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


def _real(tensor: Tensor) -> Tensor:
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
