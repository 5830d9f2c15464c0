"""A short search for a system's settings, on the spot, with the same outcome on every rank."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import crossover as xo

from ..workloads import Workload
from .system import HORIZON, Settings, System, get

WARM_UP_STEPS = 4
"""DDP rebuilds its buckets after the first step; Priority plans in the fourth."""
STEPS = 5


def tune(system: System, workload: Workload) -> tuple[Settings, dict[str, float]]:
    """Train a few steps with each candidate of the system that decides for this one; keep the fastest. Collective.

    Returns:
        The settings, the same on every rank, and the median seconds a step of each candidate on its slowest rank.
    """
    decider = get(system.tuned_as or system.name)
    candidates = decider.candidates(workload)
    if len(candidates) == 1:
        return candidates[0], {}
    seconds = [_slowest(_seconds(decider, workload, settings)) for settings in candidates]
    best = min(range(len(candidates)), key=lambda number: (seconds[number], number))
    return candidates[best], {str(dict(c)): s for c, s in zip(candidates, seconds, strict=True)}


def _slowest(mine: float) -> float:
    return float(max(xo.allgather_object(mine)))


def _seconds(system: System, workload: Workload, settings: Settings) -> float:
    training = system.prepare(workload.model(), workload.optimizer, workload, HORIZON, **settings)
    marks = timed_steps(training, workload, WARM_UP_STEPS, STEPS)
    training.finish()
    del training
    clean_up()
    return statistics.median(end - begin for begin, end in itertools.pairwise(marks))


def timed_steps(training: Any, workload: Workload, warm_up: int, steps: int) -> Sequence[float]:
    """Train ``warm_up`` steps, then ``steps`` more; the times at which those began, and that at which the last ended.

    The clock starts and stops in the middle of training, not at a barrier: what a step leaves in flight under the next
    one counts once for each step.
    """
    rank, size = xo.rank(), xo.size()
    for step in range(warm_up):
        training(*workload.batch(rank, step, size))
    marks = [time.perf_counter()]
    for step in range(warm_up, warm_up + steps):
        training(*workload.batch(rank, step, size))
        marks.append(time.perf_counter())
    return marks


def clean_up() -> None:
    """After a system: its model and hooks go before the next one's come. Collective."""
    gc.collect()
    xo.barrier()
