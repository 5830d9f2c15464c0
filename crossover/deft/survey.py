"""Measuring a job while it trains, and agreeing with all ranks on what was measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from crossover.buckets import Bucket
from crossover.deft.cost import LinkCost
from crossover.deft.measure import StepTimer
from crossover.deft.profile import Profile, agreed
from crossover.reduction import Reduction
from crossover.schedulers.generations import Generation, Piece
from crossover.schedulers.transfer import Transfer

MOST_CORRECTED = 1.25


class Survey:
    """Times computing per bucket, and the transfers of the fast link, over some steps.

    Args:
        reduction: of the optimizer.
        buckets: its buckets.
    """

    def __init__(self, reduction: Reduction, buckets: Sequence[Bucket]) -> None:
        self.timer = StepTimer(buckets)
        self._reduction = reduction
        self._free_ns = 0
        self._busy_us: dict[tuple[int, int], list[float]] = defaultdict(list)

    def start(self) -> None:
        """Begin with the next step."""
        self._busy_us.clear()
        self._free_ns = 0
        self.timer.start()

    def complete(self, generation: Generation) -> None:
        """All of a generation has arrived: how long did each of its transfers keep the fast link busy?"""
        if not self.timer.running:
            return
        for place, transfer in generation.transfers.items():
            if not isinstance(transfer, Transfer) or transfer.link is not self._reduction.communicator:
                continue
            if not transfer.told:
                continue
            begins = max(transfer.started_ns, self._free_ns)
            self._free_ns = max(transfer.completed_ns, self._free_ns)
            self._busy_us[place].append(max(self._free_ns - begins, 0) * 1e-3)

    def result(
        self, pieces: Sequence[Piece], buckets: Sequence[Bucket], fast: LinkCost, others: Sequence[LinkCost] = ()
    ) -> Profile | None:
        """Stop, and make one profile of what all ranks saw. Collective.

        Args:
            pieces: what is sent as one, in the order in which it becomes ready.
            buckets: of which they are parts.
            fast: cost of the fast link when idle, equal on all ranks: for what the backend did not tell, and because
                no link is faster in training.
            others: cost of the other links.

        Returns:
            The times of all pieces, the one nearest the input first; ``None`` if no rank saw a step.
        """
        mine = self._mine(pieces, buckets, [fast, *others]) if self.timer.steps else None
        self.timer.stop()
        name = f"{self._reduction.name}.profile"
        everyone = self._reduction.communicator.all_gather_object(mine, name=name)
        known = [profile for profile in everyone if profile is not None]
        return no_faster_than(agreed(known), fast) if known else None

    def _mine(self, pieces: Sequence[Piece], buckets: Sequence[Bucket], links: Sequence[LinkCost]) -> Profile:
        forward, backward, between = self.timer.result()
        width = [self._reduction.wire_width(bucket.buffer.dtype, bucket.device) for bucket in buckets]
        nbytes = [(piece.stop - piece.start) * width[piece.bucket] for piece in pieces]
        fast = [self._median(piece, links[0].microseconds(size)) for piece, size in zip(pieces, nbytes, strict=True)]
        slow = [tuple(link.microseconds(size) for size in reversed(nbytes)) for link in links[1:]]
        last = len(buckets) - 1
        # The pieces of a bucket are ready together: all its computing lies before the first of them.
        return Profile(
            forward_us=tuple(0 if p.start else forward[last - p.bucket] for p in reversed(pieces)),
            backward_us=tuple(0 if p.start else backward[last - p.bucket] for p in reversed(pieces)),
            between_us=between,
            reduce_us=(tuple(reversed(fast)), *slow),
            nbytes=tuple(reversed(nbytes)),
            links=(self._reduction.communicator.backend, *(f"link {n}" for n in range(1, len(links)))),
            size=self._reduction.communicator.size,
            steps=self.timer.steps,
        )

    def _median(self, piece: Piece, otherwise: int) -> int:
        samples = self._busy_us.get((piece.bucket, piece.start))
        return max(round(statistics.median(samples)), 1) if samples else otherwise


def no_faster_than(profile: Profile, link: LinkCost) -> Profile:
    """The same, where the fast link carries no more than it does when idle: corrected by a quarter at most.

    A rank that comes late to a transfer finds a part of it done, and each transfer counts as on the rank where it was
    shortest: that may leave too little of all of them, by a fifth where it was measured. By how much more the link was
    slow when it was probed, it was busy with something else.

    Example:
        >>> profile = Profile((10, 10), (20, 20), 0, ((60, 20),), (6_000, 4_000), ("gloo",))
        >>> no_faster_than(profile, LinkCost(latency_us=5.0, us_per_byte=0.01)).reduce_us
        ((75, 25),)
    """
    measured, least = sum(profile.reduce_us[0]), link.us_per_byte * sum(profile.nbytes)
    if not 0 < measured < least:
        return profile
    first, *others = profile.reduce_us
    factor = min(least / measured, MOST_CORRECTED)
    return replace(profile, reduce_us=(tuple(round(us * factor) for us in first), *others))
