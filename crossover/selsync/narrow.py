"""Averages of parameters in fewer bits: what travels is how far parameters are from a point that all ranks know.

Half precision of the parameters themselves would round away what a step changed. Their distance from where ranks
agreed last is small, and is rounded in proportion to itself; in float16, which has few small numbers, down to about
``2e-10`` times the number of ranks, and it must not reach 256. Ours; SelSync sends parameters as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.accounted import AccountedReduction
from crossover.comm.communicator import Communicator
from crossover.reduction import Compressor, Reduction
from crossover.selsync.averaging import Pack, as_real, pack_up, wire_dtype

SCALE = 256.0
"""Distances are multiplied by this before they are compressed: a power of two, which rounds nothing by itself."""


class Packer:
    """Makes the packs of an optimizer's parameters, and knows the average that each of them brought last.

    Args:
        compression: how packs travel; ``None``: as they are, and nothing is kept.

    Attributes:
        known: averages, by number of the pack; the same bits on every rank, as each follows from sums that are.
    """

    def __init__(self, compression: type[Compressor] | None) -> None:
        self.compression = compression
        self.known: dict[int, Tensor] = {}

    def packs(self, tensors: Sequence[Tensor], buffers: dict[int, Tensor]) -> list[Pack]:
        """Packs of ``tensors``, in ``buffers`` as far as those fit. All ranks give the same ones in the same order."""
        groups = enumerate(pack_up(tensors))
        if self.compression is None:
            return [Pack(group, buffers.get(number)) for number, group in groups]
        return [NarrowPack(group, buffers.get(number), self, number) for number, group in groups]

    def forget(self) -> None:
        """Let the next averages travel as they are. On all ranks at once."""
        self.known.clear()


def wire_bytes(tensors: Sequence[Tensor], reduction: Reduction, *, widened: bool) -> int:
    """Size of ``tensors`` on their way; ``widened``: half precision is added up in float32, if it is not compressed."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    total = 0
    for value in map(as_real, tensors):
        kind = (value.dtype, value.device)
        if kind not in sizes:
            sizes[kind] = reduction.wire_width(wire_dtype(value.dtype) if widened else value.dtype, value.device)
        total += value.numel() * sizes[kind]
    return total


class NarrowPack(Pack):
    """A pack of which the distance from the last average travels, compressed; the first one travels as it is.

    Args:
        tensors: of one dtype and device.
        buffer: where they lie, if it fits; else new memory is taken.
        packer: knows the last average, and is told the new one.
        number: of this pack.
    """

    def __init__(self, tensors: Sequence[Tensor], buffer: Tensor | None, packer: Packer, number: int) -> None:
        super().__init__(tensors, buffer)
        self._packer, self._number = packer, number
        known, values = packer.known.get(number), self.buffer[:-1]
        kind = (values.shape, values.dtype, values.device)
        self._origin = known if known is not None and (known.shape, known.dtype, known.device) == kind else None
        self._context: Any = None
        self._factor = 1.0
        self._ranks: AccountedReduction | None = None

    def send(self, reduction: Reduction, name: str, link: Communicator | None = None) -> None:
        """See :meth:`Pack.send`. By which ranks add something is counted apart: few bits do not count far."""
        if self._origin is None:
            super().send(reduction, name, link)
            return
        values, counted = self.buffer[:-1], self.buffer[-1:]
        if not self.stands_in:
            # Divided before the sum, which has to fit into the few bits.
            values.sub_(self._origin).mul_(SCALE / reduction.communicator.size)
        self._factor = reduction.communicator.size / SCALE
        assert self._packer.compression is not None
        wire, self._context = self._packer.compression.compress(values)
        self._ranks = AccountedReduction(reduction, counted, name=f"{name}.ranks", link=link)
        self._work = AccountedReduction(reduction, wire, name=name, link=link)
        self.nbytes = wire.numel() * wire.element_size() + counted.element_size()

    def arrive(self, stand_in: bool) -> bool:
        """See :meth:`Pack.arrive`."""
        arrived = super().arrive(stand_in) if self._ranks is None else self._arrive_narrow(stand_in)
        if arrived:
            self._keep()
        return arrived

    def _arrive_narrow(self, stand_in: bool) -> bool:
        assert self._ranks is not None
        assert self._origin is not None
        assert self._packer.compression is not None
        counted, wire = self._ranks.wait(), self._work.wait()
        if stand_in and counted < 1:
            return False
        values = self.buffer[:-1]
        values.copy_(self._packer.compression.decompress(wire, self._context))
        values.mul_(self._factor).div_(counted).add_(self._origin)
        return True

    def _keep(self) -> None:
        # Of a training that has diverged nothing may stay behind that spoils the averages of one that is set back.
        average = torch.nan_to_num(self.buffer[:-1], nan=0.0, posinf=0.0, neginf=0.0, out=self._origin)
        if self._origin is None:
            self._packer.known[self._number] = average
