"""Single simulated points for the pages of scale_curves: jobs, places, and what one option gives at one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from crossover.simulate import Cluster, Job, Result, from_shape, gain, gpus, model, processor, share, simulate
from crossover.simulate.gated import Local
from crossover.simulate.layerwise import Priority
from crossover.simulate.systems import DeFT, Plain, System

STEPS, PLANNED_STEPS = 24, 48
LSSR = 0.8
SHARING = "sharing, two jobs"
OPTIONS: dict[str, System] = {
    "Priority": Priority(),
    "DeFT": DeFT(),
    f"SelSync, LSSR {LSSR:g}": Local(LSSR),
}


@dataclass(frozen=True)
class Point:
    """What one option gives at one place."""

    speed_up: float
    busy: float
    updates: float


@cache
def job(name: str, batch: int | None = None) -> Job:
    return from_shape(model(name), processor("a100"), batch)


@cache
def plain(name: str, place: str) -> Result:
    return simulate(job(name), Plain(), at(place), STEPS)


@cache
def at(place: str) -> Cluster:
    ranks, gigabits = place.split("x")
    return gpus(int(ranks), float(gigabits) * 1e9, name=place, source="8 A100 a node; our choice")


@cache
def point(name: str, option: str, ranks: int, gigabits: float) -> Point:
    """One option's gain over plain."""
    place = f"{ranks}x{gigabits:g}"
    base = plain(name, place)
    if option == "plain":
        return Point(1.0, base.busy, 1.0)
    if option == SHARING:
        twins = [(replace(job(name), name=f"job {number}"), Plain()) for number in range(2)]
        together = share(twins, at(place), STEPS)
        return Point(gain([base, base], together), min(sum(result.busy for result in together), 1.0), 1.0)
    system = OPTIONS[option]
    found = simulate(job(name), system, at(place), PLANNED_STEPS if isinstance(system, DeFT) else STEPS)
    return Point(base.step_s / found.step_s, found.busy, updates(system, job(name), at(place)))


def updates(system: System, made: Job, place: Cluster) -> float:
    """Updates a step in the long run."""
    merged = system.merged(made, place)
    return len(merged) / sum(merged)
