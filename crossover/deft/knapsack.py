"""Which buckets to send in one stage: exact knapsacks over whole ticks.

The paper casts the choice as multiple knapsacks with the whole forward or backward time as capacity (Meng and Sun,
DeFT, arXiv 2503.16815, abstract). The value of a bucket, release times, the solver and the ties are our choices.

A link works on one bucket at a time, in launch order: from ``free`` on, bucket ``i`` is on the link from
``max(free, release_i)`` for ``cost_i`` ticks. What is chosen has to end by ``capacity``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_UNREACHED = np.int64(-1) << 60


@dataclass(frozen=True, slots=True)
class Item:
    """A bucket that may be sent.

    Attributes:
        bucket: its number.
        release: ticks from the start of the stage until it is ready.
        cost: ticks on the link in question.
        value: what sending it is worth; its ticks on the fast link, as a rule.
    """

    bucket: int
    release: int
    cost: int
    value: int


@dataclass(frozen=True, slots=True)
class Packing:
    """What one link sends in a stage.

    Attributes:
        buckets: in launch order.
        finish: when the last of them ends.
    """

    buckets: tuple[int, ...]
    finish: int


def pack_link(items: Sequence[Item], free: int, capacity: int) -> Packing:
    """The most valuable choice of ``items`` for one link, exactly.

    Args:
        items: in launch order; on one link with a common deadline, sending a choice in the order of release is best.
        free: when the link is free.
        capacity: by when the last one has to end.

    Returns:
        Of equally valuable choices one that ends first; what is still equal is decided by the order of ``items`` alone.
        Empty if nothing fits.

    Example:
        >>> pack_link([Item(1, 0, 40, 40), Item(0, 0, 30, 30)], free=0, capacity=40)
        Packing(buckets=(1,), finish=40)
    """
    clock = free
    for item in items:
        clock = max(clock, item.release) + item.cost
    if clock <= capacity:
        return Packing(tuple(item.bucket for item in items), clock)
    fitting = [item for item in items if max(free, item.release) + item.cost <= capacity]
    if not fitting:
        return Packing((), free)
    if all(item.release <= free and item.value == item.cost for item in fitting):
        return _fill(fitting, free, capacity)
    return _pack(fitting, free, capacity)


def _fill(items: Sequence[Item], free: int, capacity: int) -> Packing:
    """All are ready and worth what they cost: subset sums, as the bits of whole numbers."""
    window = (1 << (capacity - free + 1)) - 1
    sums = [1]
    for item in items:
        sums.append((sums[-1] | sums[-1] << item.cost) & window)
    left = total = sums[-1].bit_length() - 1
    chosen = []
    for number in range(len(items) - 1, -1, -1):
        cost = items[number].cost
        if left >= cost and sums[number] >> (left - cost) & 1:
            chosen.append(items[number].bucket)
            left -= cost
    return Packing(tuple(reversed(chosen)), free + total)


def _pack(items: Sequence[Item], free: int, capacity: int) -> Packing:
    """Dynamic programme over the finish time: ``best[t]`` is the value of the best choice that ends at ``t``.

    Of equals the later item wins, here and in :func:`_fill`: any rule does that is the same everywhere.
    """
    best = np.full(capacity + 1, _UNREACHED)
    best[free] = 0
    taken = np.zeros((len(items), capacity + 1), dtype=np.bool_)
    heads = []
    for number, item in enumerate(items):
        heads.append(_consider(item, best, taken[number]))
    clock = finish = int(np.argmax(best))  # the first of the largest
    chosen = []
    for number in range(len(items) - 1, -1, -1):
        if taken[number, clock]:
            item = items[number]
            chosen.append(item.bucket)
            clock = heads[number] if clock == item.release + item.cost else clock - item.cost
    return Packing(tuple(reversed(chosen)), finish)


def _consider(item: Item, best: npt.NDArray[np.int64], taken: npt.NDArray[np.bool_]) -> int:
    """Extend every choice by ``item``, mark the ends at which that is no worse than what ended there before.

    Returns:
        The end of the choice that is extended where the item has to wait for its release.
    """
    first = item.release + item.cost
    head = int(np.argmax(best[: item.release + 1]))  # of the best the earliest
    candidates = best[item.release : best.size - item.cost] + item.value
    candidates[0] = best[head] + item.value
    ends = best[first:]
    np.greater_equal(candidates, ends, out=taken[first:])
    np.maximum(candidates, ends, out=ends)
    return head


def pack_links(
    buckets: Sequence[tuple[int, int]], costs: Sequence[Sequence[int]], free: Sequence[int], capacity: Sequence[int]
) -> list[tuple[int, int]]:
    """Choose for several links, one after the other, the fast link first.

    Args:
        buckets: ``(bucket, release)`` in launch order.
        costs: ``costs[k][i]``: ticks of bucket ``i`` on link ``k``.
        free: when each link is free.
        capacity: by when each link has to be done.

    Returns:
        ``(link, bucket)``; for each link in launch order.

    Example:
        >>> pack_links([(1, 0), (0, 0)], [[30, 40], [45, 60]], free=[0, 0], capacity=[40, 50])
        [(0, 1), (1, 0)]
    """
    chosen: list[tuple[int, int]] = []
    left = list(buckets)
    for link, row in enumerate(costs):
        if not left:
            break
        items = [Item(bucket, release, row[bucket], costs[0][bucket]) for bucket, release in left]
        packed = pack_link(items, free[link], capacity[link]).buckets
        chosen += [(link, bucket) for bucket in packed]
        taken = set(packed)
        left = [entry for entry in left if entry[0] not in taken]
    return chosen


def place_all(
    buckets: Sequence[int], costs: Sequence[Sequence[int]], capacity: Sequence[int]
) -> tuple[list[tuple[int, int]], list[int]] | None:
    """Place every bucket, all ready at the start; ``None`` if they do not fit.

    The fast link alone if that does; else the slow links are loaded first, the slowest of all before the others.

    Returns:
        ``(link, bucket)`` in launch order for each link, and when each link is done.

    Example:
        >>> place_all([2, 0], [[10, 20, 30]], capacity=[40])
        ([(0, 2), (0, 0)], [40])
        >>> place_all([2, 1], [[10, 20, 30]], capacity=[40]) is None
        True
    """
    finish = [0] * len(costs)
    left = list(buckets)
    elsewhere: list[tuple[int, int]] = []
    if sum(costs[0][bucket] for bucket in left) > capacity[0]:
        for link in range(len(costs) - 1, 0, -1):
            items = [Item(bucket, 0, costs[link][bucket], costs[0][bucket]) for bucket in left]
            packed = pack_link(items, 0, capacity[link])
            finish[link] = packed.finish
            elsewhere += [(link, bucket) for bucket in packed.buckets]
            taken = set(packed.buckets)
            left = [bucket for bucket in left if bucket not in taken]
    finish[0] = sum(costs[0][bucket] for bucket in left)
    if finish[0] > capacity[0]:
        return None
    return [(0, bucket) for bucket in left] + elsewhere, finish
