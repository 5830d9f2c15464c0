"""Where buckets are cut and how large they are made: by time, not by size alone.

The paper names partitioning by size only as a defect of earlier schedulers (Meng and Sun, DeFT, arXiv 2503.16815,
abstract); its own rule could not be read. Here a piece is at least so large that latency is a small part of its time,
and at most a quarter of a window, so that knapsacks can be filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crossover.deft.cost import LinkCost
from crossover.deft.profile import Profile

PIECES_PER_WINDOW = 4
MOST_BUCKETS = 40
SMALLEST_BYTES = 64 * 1024
LARGEST_BYTES = 25 * 1024 * 1024


def bucket_bytes(link: LinkCost, total_bytes: int) -> int:
    """Size at which a bucket is closed before anything is known of computing.

    As small as latency allows, for knapsacks are filled best with small pieces, but no more than some 40 buckets.

    Example:
        >>> bucket_bytes(LinkCost(latency_us=100.0, us_per_byte=0.001), total_bytes=100_000_000)
        2500000
    """
    return min(max(link.smallest_bucket, total_bytes // MOST_BUCKETS, SMALLEST_BYTES), LARGEST_BYTES)


def cuts(profile: Profile, link: LinkCost) -> list[int]:
    """Into how many pieces each bucket is cut, bucket 0 nearest the input: 1 unless it is too long for a window.

    Example:
        >>> profile = Profile((40, 40), (80, 80), 0, ((100, 5),), (10_000, 500), ("gloo",))
        >>> cuts(profile, LinkCost(latency_us=1.0, us_per_byte=0.01))
        [5, 1]
    """
    times = profile.times()
    most = max(min(times.forward_window, times.backward_window) // PIECES_PER_WINDOW, 1)
    counts = []
    for ticks, nbytes in zip(times.reduce[0], profile.nbytes, strict=True):
        allowed = max(nbytes // max(link.smallest_bucket, 1), 1)
        counts.append(max(min(-(-ticks // most), allowed), 1))
    return counts


def cut_profile(profile: Profile, counts: Sequence[int]) -> Profile:
    """The profile of the pieces. Those of one bucket are ready together, so the first sent has all of its computing.

    Example:
        >>> profile = Profile((10,), (20,), 0, ((9,),), (100,), ("gloo",))
        >>> cut_profile(profile, [2]).times()
        BucketTimes(forward=(0, 10), backward=(0, 20), reduce=((5, 5),), between=0)
    """

    def first(row: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            entry if piece == count - 1 else 0
            for entry, count in zip(row, counts, strict=True)
            for piece in range(count)
        )

    def shares(row: Sequence[int]) -> tuple[int, ...]:
        return tuple(-(-entry // count) for entry, count in zip(row, counts, strict=True) for _ in range(count))

    return replace(
        profile,
        forward_us=first(profile.forward_us),
        backward_us=first(profile.backward_us),
        reduce_us=tuple(shares(row) for row in profile.reduce_us),
        nbytes=shares(profile.nbytes),
    )


def spans(elements: int, count: int) -> list[tuple[int, int]]:
    """``count`` equal parts of a buffer, as (start, stop).

    Example:
        >>> spans(10, 3)
        [(0, 3), (3, 6), (6, 10)]
    """
    return [(part * elements // count, (part + 1) * elements // count) for part in range(count)]
