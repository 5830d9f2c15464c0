"""Random profiles for tests: whole numbers from a seed."""

from __future__ import annotations

import random

from crossover.deft import BucketTimes, Profile


def random_times(seed: int, buckets: int | None = None, links: int = 1, coverage: float | None = None) -> BucketTimes:
    """Times of a made-up model; no transfer is longer than a quarter of a window unless ``coverage`` asks for more."""
    source = random.Random(seed)
    count = buckets or source.randint(2, 9)
    forward = tuple(source.randint(5, 40) for _ in range(count))
    backward = tuple(source.randint(10, 80) for _ in range(count))
    wanted = coverage if coverage is not None else source.uniform(0.3, 3.0)
    shares = [source.uniform(0.2, 1.0) for _ in range(count)]
    total = wanted * (sum(forward) + sum(backward))
    fast = tuple(max(round(share / sum(shares) * total), 1) for share in shares)
    rows = [tuple(max(round(ticks * (1 + 0.65 * link)), 1) for ticks in fast) for link in range(links)]
    return BucketTimes(forward, backward, tuple(rows), between=source.randint(0, 20))


def random_profile(seed: int, buckets: int, links: int = 1, coverage: float | None = None) -> Profile:
    """The same as a profile, a tick being a microsecond."""
    times = random_times(seed, buckets, links, coverage)
    return Profile(
        times.forward,
        times.backward,
        times.between,
        times.reduce,
        (1000,) * buckets,
        tuple(f"link {number}" for number in range(links)),
    )
