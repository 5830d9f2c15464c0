"""Starts transfers as a plan says: in its order on each link, whatever order gradients arrive in."""

from __future__ import annotations

from collections.abc import Sequence

from crossover.deft.plan import Sends, StepPlan
from crossover.schedulers.generations import Generations
from crossover.schedulers.transfer import Link


class Sender:
    """Serves one step after the other.

    Plans number buckets from the input side; here pieces are numbered as they become ready, which is the reverse.

    Args:
        generations: of which it sends.
        links: the fast one first.
    """

    def __init__(self, generations: Generations, links: Sequence[Link]) -> None:
        self._generations = generations
        self._links = links
        self._fresh: list[list[int]] = []
        self._ready: set[int] = set()
        self.timed = False

    def begin(self, step: StepPlan, first_bucket: int = 0) -> None:
        """What ``step`` sends of its own generation is sent once it is ready; ``first_bucket`` and later ones only."""
        self._ready.clear()
        self._fresh = [[] for _ in self._links]
        for link, number in self._numbered(step.fresh):
            if self._generations.pieces[number].bucket >= first_bucket:
                self._fresh[link].append(number)

    def ready(self, bucket: int) -> None:
        """A bucket is ready. On each link the next piece in order is sent if it is, and so on."""
        pieces = self._generations.pieces
        self._ready.update(number for number, piece in enumerate(pieces) if piece.bucket == bucket)
        for link, waiting in enumerate(self._fresh):
            while waiting and waiting[0] in self._ready:
                self._send(link, waiting.pop(0), fresh=True)

    def queue(self, step: StepPlan) -> None:
        """Start what ``step`` sends of the current generation, also what it has in backward.

        Queued behind each other, a link that is done early goes on. The order is the plan's.
        """
        for link, number in self._numbered((*step.forward, *step.backward)):
            self._send(link, number, fresh=False)

    def _numbered(self, sends: Sends) -> list[tuple[int, int]]:
        last = len(self._generations.pieces) - 1
        return [(link, last - bucket) for link, bucket in sends]

    def _send(self, link: int, number: int, fresh: bool) -> None:
        self._generations.send(self._links[link], self._generations.pieces[number], fresh, self.timed)
