"""Averages that land later: parameters as they were travel while ranks train on, and what they learn of is added then.

Ours; SelSync's ranks wait for each average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossover.reduction import Reduction
from crossover.selsync.averaging import MakePacks, Pack, as_real, pack_up


@dataclass(slots=True)
class Share:
    """One average on its way.

    Attributes:
        number: of all so far.
        launched: steps after which it was started.
        lands: steps after which it lands; with ``number`` and ``launched`` equal on all ranks.
        tensors: what is averaged, by pack.
        packs: in which it travels; once it has arrived, what is to be added to the tensors.
        snapshots: the tensors as they were, by pack; none once it has arrived.
        stand_in: whether this rank adds nothing.
        travelled_us: how long it was on its way, where the backend told.
    """

    number: int
    launched: int
    lands: int
    tensors: list[list[Tensor]]
    packs: list[Pack]
    snapshots: list[Tensor] | None = None
    stand_in: bool = False
    travelled_us: float | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """What is recorded of an average when it lands.

    Attributes:
        number: of all so far.
        launched: steps after which it was started.
        staleness: steps that were taken since.
        drift: Euclidean distance of this rank's parameters, as they were, from the average; ``None`` unless asked for.
        travelled_us: how long it was on its way, where the backend told.
    """

    number: int
    launched: int
    staleness: int
    drift: float | None
    travelled_us: float | None


class LateAverager:
    """Starts averages and lands them; one at a time.

    An average of parameters ``p`` adds ``average - snapshot`` to them when it lands, where ``snapshot`` is what this
    rank sent: the steps taken since are kept. Right after it lands replicas differ by those steps alone.

    Averages travel in a group of ranks of their own, so that votes and they need no order. Making one is collective.

    Args:
        reduction: whose ranks take part, and where costs are booked.
        pack: makes the packs of parameters, given buffers to use.

    Attributes:
        share: what is on its way; ``None``: nothing.
        launched: averages so far; equal on all ranks.
        dropped: those that never landed, because a checkpoint did not hold every rank's part.
    """

    def __init__(self, reduction: Reduction, pack: MakePacks) -> None:
        self._reduction = reduction
        self._pack = pack
        self._link = reduction.communicator.duplicate(name=f"{reduction.name}.late")
        self._memory: list[tuple[Tensor, Tensor]] = []
        self.share: Share | None = None
        self.launched = 0
        self.dropped = 0

    @torch.no_grad()
    def launch(self, tensors: Sequence[Tensor], *, after: int, under: int, stand_in: bool = False) -> Share:
        """Start averaging ``tensors`` as they are now. Collective.

        Args:
            tensors: of floating-point or complex numbers, in the same order on every rank.
            after: steps taken so far.
            under: steps until it lands.
            stand_in: this rank has no data left: it adds nothing, and comes to the average of the others.
        """
        assert self.share is None, "one average at a time"
        groups = pack_up(tensors)
        held = dict(enumerate(self._memory))
        packs = list(self._pack(tensors, {number: buffer for number, (buffer, _) in held.items()}))
        snapshots = [_snapshot(pack, held[number][1] if number in held else None) for number, pack in enumerate(packs)]
        self._memory = [(pack.buffer, snapshot) for pack, snapshot in zip(packs, snapshots, strict=True)]
        for number, pack in enumerate(packs):
            if stand_in:
                pack.fill(stand_in=True)
            pack.send(self._reduction, f"late{number}", self._link)
        self.launched += 1
        self.share = Share(self.launched, after, after + under, groups, packs, snapshots, stand_in)
        return self.share

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for what is on its way; it is not added yet."""
        share = self.share
        if share is None or share.snapshots is None:
            return
        for pack, snapshot in zip(share.packs, share.snapshots, strict=True):
            if pack.arrive(share.stand_in):
                pack.buffer[:-1].sub_(snapshot)
            else:
                pack.buffer.zero_()
        share.travelled_us = _travelled_us(share.packs)
        share.snapshots = None

    @torch.no_grad()
    def land(self, now: int, *, measure_drift: bool = False) -> Landed | None:
        """Add what came of the average to the parameters as they are now; ``None`` if nothing is on its way.

        Args:
            now: steps taken so far.
            measure_drift: compute :attr:`Landed.drift`.
        """
        self.arrive()
        share, self.share = self.share, None
        if share is None:
            return None
        drift = None
        if measure_drift:
            drift = float(torch.stack([pack.buffer[:-1].norm() for pack in share.packs]).double().norm())
        for tensors, pack in zip(share.tensors, share.packs, strict=True):
            torch._foreach_add_([as_real(tensor) for tensor in tensors], pack.parts)
        return Landed(share.number, share.launched, now - share.launched, drift, share.travelled_us)

    def drop(self) -> int:
        """Let what is on its way never land; returns how many averages that are. Waits."""
        self.arrive()
        found, self.share = int(self.share is not None), None
        return found

    def close(self) -> None:
        """Let go of the group. Not a collective; what is on its way is lost."""
        self.share = None
        self._link.close()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is on its way on this rank. Waits for this rank's part of it; starts nothing."""
        self.arrive()
        share = self.share
        saved = None if share is None else {"number": share.number, "launched": share.launched, "lands": share.lands}
        return {
            "launched": self.launched,
            "dropped": self.dropped,
            "share": saved,
            "changes": [] if share is None else [pack.buffer.clone() for pack in share.packs],
        }

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Take back what :meth:`state_dict` gave on this rank; nothing is on its way.

        Args:
            state: of this rank.
            parameters: those of which it is an average, in the same order.
        """
        self.launched, self.dropped = state["launched"], state["dropped"]
        if state["share"] is None:
            return
        groups = pack_up(parameters)
        packs = [Pack(group) for group in groups]
        for pack, change in zip(packs, state["changes"], strict=True):
            pack.buffer.copy_(change)
        self.share = Share(**state["share"], tensors=groups, packs=packs)

    def fits(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> bool:
        """Whether ``state`` can be taken back with these parameters."""
        held = [(pack.buffer.numel(), pack.buffer.dtype) for pack in map(Pack, pack_up(parameters))]
        return state["share"] is None or held == [(change.numel(), change.dtype) for change in state["changes"]]


@torch.no_grad()
def _snapshot(pack: Pack, memory: Tensor | None) -> Tensor:
    """Fill the pack, and copy what it holds, into ``memory`` if that fits: the sum comes to lie where it was."""
    pack.fill(stand_in=False)
    values = pack.buffer[:-1]
    if memory is None or (memory.shape, memory.dtype, memory.device) != (values.shape, values.dtype, values.device):
        return values.clone()
    return memory.copy_(values)


def _travelled_us(packs: Sequence[Pack]) -> float | None:
    spans = [pack.span_ns for pack in packs]
    if not spans or not all(end for _, end in spans):
        return None
    return (max(end for _, end in spans) - min(start for start, _ in spans)) * 1e-3
