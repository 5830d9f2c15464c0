"""Finds out what a job's links can do, and cuts buckets to what they can."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossover.deft.cost import LinkCost, second_link_pays
from crossover.deft.links import SECOND_INTERFACE, GlooLink
from crossover.deft.partition import bucket_bytes, cut_profile, cuts, spans
from crossover.deft.profile import Profile
from crossover.deft.transfers import PROBE_BYTES, probe, probe_together
from crossover.reduction import Reduction
from crossover.schedulers.generations import Piece
from crossover.schedulers.transfer import Link

Log = Callable[..., None]


class Scout:
    """Knows the links of one optimizer. Making one is collective, and so are its methods but for :meth:`close`.

    Args:
        reduction: of the optimizer; its communicator is the first link.
        optimizer: the user's.
        second: network interface of a second link, ``"gloo"``, ``"auto"`` for ``$CROSSOVER_SECOND_IFACE``, or ``None``.

    Attributes:
        links: those that are used, the fast one first.
        cost: of the fast link when it is idle, equal on all ranks.
        slow: costs of the others while all are busy; none before :meth:`time_links`.
        device: where the parameters are.
        bucket_bytes: size at which buckets are closed.
    """

    def __init__(self, reduction: Reduction, optimizer: torch.optim.Optimizer, second: str | None) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        name = f"{reduction.name}.deft"
        self._communicator = reduction.communicator
        self.device = parameters[0].device
        # every rank has measured for itself
        self.cost: LinkCost = self._communicator.broadcast_object(
            probe(self._communicator, self.device, name), name=f"{name}.cost"
        )
        self.links: list[Link] = [self._communicator]
        self.slow: list[LinkCost] = []
        interface = os.environ.get(SECOND_INTERFACE) if second == "auto" else second
        if interface is not None:
            self.links.append(GlooLink(self._communicator, "" if interface == "gloo" else interface, f"{name}.link"))
        total = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self.bucket_bytes = bucket_bytes(self.cost, total)

    def time_links(self, name: str, log: Log) -> None:
        """Keep the second link if both together carry clearly more than the first. Links are idle. Asked once."""
        if len(self.links) == 1 or self.slow:
            return
        mine = (
            [probe(link, self.device, f"{name}.link{number}") for number, link in enumerate(self.links)],
            probe_together(self.links, self.device, name),
        )
        alone, together = self._communicator.broadcast_object(mine, name=f"{name}.links")
        before = [cost.microseconds(PROBE_BYTES[-1]) for cost in alone]
        pays = second_link_pays(before[0], together)
        log(
            "second link used" if pays else "second link not used: both together carry no more than the first",
            alone_us=before,
            together_us=[round(us) for us in together],
        )
        if pays:
            self.slow = [alone[1].scaled(together[1] / before[1])]
        else:
            self.close()
            del self.links[1:]

    def cut(self, pieces: list[Piece], profile: Profile) -> tuple[list[Piece], Profile]:
        """Cut pieces that are too long for a window; they are whole buckets so far, and nothing is on its way."""
        counts = cuts(profile, self.cost)
        if max(counts) == 1 or any(piece.start for piece in pieces):
            return pieces, profile
        return cut_pieces(pieces, counts), cut_profile(profile, counts)

    def close(self) -> None:
        """Let go of the second link."""
        for link in self.links[1:]:
            closing: Any = link
            closing.close()


def cut_pieces(pieces: Sequence[Piece], counts: Sequence[int]) -> list[Piece]:
    """Cut whole buckets, given in the order in which they become ready; ``counts`` begins at the input side.

    Example:
        >>> cut_pieces([Piece(0, 0, 4), Piece(1, 0, 9)], [1, 2])
        [Piece(bucket=0, start=0, stop=2), Piece(bucket=0, start=2, stop=4), Piece(bucket=1, start=0, stop=9)]
    """
    return [
        Piece(piece.bucket, start, stop)
        for piece, count in zip(pieces, reversed(counts), strict=True)
        for start, stop in spans(piece.stop, count)
    ]
