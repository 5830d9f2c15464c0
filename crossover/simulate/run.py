"""Running a prediction: one job by itself, or several that take turns on their devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from crossover.simulate.assumptions import Assumption
from crossover.simulate.cluster import Cluster
from crossover.simulate.events import Device, Link, Simulation, Transfer
from crossover.simulate.job import Job
from crossover.simulate.systems import System
from crossover.simulate.worker import Span, Worker

STEPS = 60
PERIOD = 12
"""What is averaged is a multiple of so many steps where there are enough: patterns of 2, 3, 4 and 6 steps come out."""


@dataclass(frozen=True)
class Result:
    """What one job did; seconds.

    Attributes:
        job: its name.
        system: label of the system.
        step_s: mean of a step once the first third of the run is over.
        exposed_s: of that, waited for transfers; mean over ranks.
        compute_s: a step without communication, on ranks that are all alike.
        updates_per_step: of the weights.
        marks: when each step ended.
        spans: what rank 0 did.
        transfers: by link, what it carried for this job.
        assumptions: all that this rests on.
    """

    job: str
    system: str
    step_s: float
    exposed_s: float
    compute_s: float
    updates_per_step: float
    marks: tuple[float, ...]
    spans: tuple[Span, ...] = field(repr=False, default=())
    transfers: dict[str, tuple[Transfer, ...]] = field(repr=False, default_factory=dict)
    assumptions: tuple[Assumption, ...] = field(repr=False, default=())

    @property
    def busy(self) -> float:
        """Computing over the whole step: the share that communication and stragglers leave."""
        return self.compute_s / self.step_s


def simulate(job: Job, system: System, cluster: Cluster, steps: int = STEPS) -> Result:
    """Let one job train by itself.

    Args:
        job: what it computes; cut into what the system sends by the system's own rules.
        system: how it trains.
        cluster: where.
        steps: how many, 3 or more.

    Raises:
        ValueError: fewer than 3 steps.

    Example:
        >>> from crossover.simulate import cluster, from_shape, model, processor, systems
        >>> job = from_shape(model("vgg16"), processor("a100"))
        >>> result = simulate(job, systems.Plain(), cluster("16-10g"), steps=6)
        >>> result.step_s > job.compute_s
        True
    """
    return share([(job, system)], cluster, steps)[0]


def share(
    jobs: Sequence[tuple[Job, System]], cluster: Cluster, steps: int = STEPS, weights: Sequence[float] | None = None
) -> list[Result]:
    """Let several jobs take turns on the same devices and use the same links, as with ``TimeShare``.

    Each trains ``steps`` steps; what is reported is what they did while all of them ran.

    Raises:
        ValueError: fewer than 3 steps, no job, or two jobs of one name.
    """
    names = [job.name for job, _ in jobs]
    if steps < 3:
        raise ValueError(f"steps: is {steps}; give 3 or more, the first third is left out")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"jobs: are {names}; give one or more, each with a name of its own")
    simulation = Simulation()
    links = [Link(f"link {number}") for number in range(len(cluster.links))]
    device = Device(cluster.ranks) if len(jobs) > 1 else None
    workers = []
    for (job, system), weight in zip(jobs, weights or [1.0] * len(jobs), strict=True):
        workers.append(Worker(simulation, system.prepare(job, cluster), cluster, links, device, weight))
        simulation.start(system.run(workers[-1], steps))
    simulation.run()
    begin = max(worker.marks[-1 - _settled(steps)] for worker in workers)
    end = min(worker.marks[-1] for worker in workers)
    return [
        _result(worker, job, system, begin, end, links) for worker, (job, system) in zip(workers, jobs, strict=True)
    ]


def _settled(steps: int) -> int:
    """Steps that are averaged: the last two thirds."""
    window = 2 * steps // 3
    return window - window % PERIOD if window >= PERIOD else window


def _result(worker: Worker, job: Job, system: System, begin: float, end: float, links: Sequence[Link]) -> Result:
    begin = min(begin, worker.marks[-2])
    first, last = bisect_right(worker.marks, begin) - 1, bisect_right(worker.marks, end) - 1
    first = min(max(first, 0), len(worker.marks) - 2)
    last = max(last, first + 1)
    steps = last - first
    return Result(
        job.name,
        system.label,
        (worker.marks[last] - worker.marks[first]) / steps,
        (worker.exposed_at[last] - worker.exposed_at[first]) / steps,
        job.compute_s,
        (worker.updates_at[last] - worker.updates_at[first]) / steps,
        tuple(worker.marks),
        tuple(worker.spans),
        {link.name: tuple(t for t in link.carried if t.job == job.name) for link in links},
        (*job.notes, *worker.cluster.assumptions(), *system.assumptions()),
    )


def gain(alone: Sequence[Result], together: Sequence[Result]) -> float:
    """Work that jobs get done together, over that one after the other: the sum of step alone over step together."""
    return sum(a.step_s / t.step_s for a, t in zip(alone, together, strict=True))
