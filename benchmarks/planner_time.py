"""How long does DeFT's planner take, for how many buckets and links?

    python -m benchmarks.planner_time [--buckets 10,20,40,48,100,200,400] [--links 1,2,3] [--seeds 2] [--quick] [--save]

Random profiles with fine times, at coverage rates on both sides of whole numbers, where cycles are longest, and with
the capacities 1 and 3/2. The time is that of ``make_plan`` alone, on one core; a decision of the Preserver makes up to
eight plans. ``hidden`` is the share of the possible updates that plans with capacity 1 reach: 1 is one update for each
``max(1, CR)`` steps, with several links counted by what they carry together.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks import notes
from benchmarks.command import numbers
from crossover.deft import BucketTimes, Limits, Plan, make_plan

BUCKETS = (10, 20, 40, 48, 100, 200, 400)
COVERAGE = (0.6, 0.98, 1.02, 1.3, 1.97, 2.05, 2.7, 4.0)
CAPACITIES = ((1, 1), (3, 2))
SLOWER = 0.65  # by so much of its time each further link is slower than the one before
HEADER = ["buckets", "links", "median, ms", "longest, ms", "steps planned", "hidden"]


def profile(seed: int, buckets: int, links: int, cr: float) -> BucketTimes:
    """Times of a made-up model, in microseconds."""
    source = random.Random(seed)
    forward = tuple(source.randint(500, 4_000) for _ in range(buckets))
    backward = tuple(source.randint(1_000, 8_000) for _ in range(buckets))
    shares = [source.uniform(0.2, 1.0) for _ in range(buckets)]
    total = cr * (sum(forward) + sum(backward))
    fast = [max(round(share / sum(shares) * total), 1) for share in shares]
    rows = tuple(tuple(round(ticks * (1 + SLOWER * link)) for ticks in fast) for link in range(links))
    return BucketTimes(forward, backward, rows, source.randint(0, 2_000))


def timed(times: BucketTimes, limits: Limits) -> tuple[float, Plan]:
    """Milliseconds, and the plan."""
    began = time.perf_counter()
    plan = make_plan(times, limits)
    return (time.perf_counter() - began) * 1e3, plan


def possible(times: BucketTimes) -> float:
    """Updates a step if every link were always full and updates were not bound to steps."""
    carried = sum(times.compute / sum(row) for row in times.reduce)
    return min(carried, 1.0)


def row(buckets: int, links: int, seeds: int) -> list[str]:
    """All profiles of one size."""
    taken, planned, hidden = [], [], []
    for cr in COVERAGE:
        for seed in range(seeds):
            times = profile(seed, buckets, links, cr)
            for capacity in CAPACITIES:
                ms, plan = timed(times, Limits(capacity))
                taken.append(ms)
                planned.append(len(plan.prefix) + len(plan.cycle))
                if capacity == (1, 1):
                    hidden.append(plan.updates_per_step() / possible(times))
    return [
        str(buckets),
        str(links),
        f"{statistics.median(taken):.1f}",
        f"{max(taken):.1f}",
        f"{min(planned)} to {max(planned)}",
        f"{statistics.fmean(hidden):.2f}",
    ]


def whole(text: str) -> list[int]:
    """For argparse: whole numbers with commas between them."""
    return [int(number) for number in numbers(text)]


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=whole, default=list(BUCKETS), help="with commas")
    parser.add_argument("--links", type=whole, default=[1, 2, 3], help="with commas")
    parser.add_argument("--seeds", type=int, default=2, help="profiles of each kind (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one profile of each kind, one link")
    parser.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    options = parser.parse_args(words)
    if options.quick:
        options.links, options.seeds = options.links[:1], 1
    rows = [row(buckets, links, options.seeds) for links in options.links for buckets in options.buckets]
    table = notes.table(HEADER, rows)
    print(table)
    if options.save:
        print(notes.save("planner-time", "Time of DeFT's planner", [table], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
