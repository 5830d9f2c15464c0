"""The order in which a priority queue with a credit window sends pieces: a pure function of agreed times."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bucket.

    Attributes:
        priority: the smallest goes first.
        ready: when its gradients are there, in ticks from the start of backward.
        duration: ticks it takes on the link.
        nbytes: what it takes from the credit while in flight.
    """

    priority: int
    ready: int
    duration: int
    nbytes: int


def priority_order(pieces: Sequence[Piece], credit: int) -> list[int]:
    """Indices of ``pieces`` in the order in which they enter the link.

    Whenever credit is left, the ready piece of the smallest priority enters (ties: the first listed). The link works
    on one piece at a time in the order of entry and returns a piece's credit when it is through. A piece larger than
    all credit enters alone. All times are integers, so equal input gives an equal order everywhere.

    Source: ByteScheduler's credit-based preemption, with the run-time events replaced by given times.

    Example:
        >>> late_but_urgent, early = Piece(0, 5, 10, 1), Piece(1, 0, 10, 1)
        >>> priority_order([late_but_urgent, early, early], credit=1)
        [1, 0, 2]
    """
    waiting = sorted(range(len(pieces)), key=lambda n: (pieces[n].priority, n))
    flying: deque[tuple[int, int]] = deque()
    order: list[int] = []
    clock, link_free, left = 0, 0, credit
    while waiting:
        while flying and flying[0][0] <= clock:
            left += flying.popleft()[1]
        ready = [n for n in waiting if pieces[n].ready <= clock]
        if ready and (left >= pieces[ready[0]].nbytes or not flying):
            chosen = pieces[ready[0]]
            waiting.remove(ready[0])
            order.append(ready[0])
            link_free = max(link_free, clock) + chosen.duration
            flying.append((link_free, chosen.nbytes))
            left -= chosen.nbytes
            continue
        arrivals = [pieces[n].ready for n in waiting if pieces[n].ready > clock]
        clock = min([*arrivals, *(end for end, _ in list(flying)[:1])])
    return order
