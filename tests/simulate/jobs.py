"""Jobs and clusters for tests: whole microseconds, and links whose times are given."""

from __future__ import annotations

from dataclasses import dataclass

from crossover.deft import BucketTimes
from crossover.simulate import Cluster, Job, Network, Part


@dataclass(frozen=True, slots=True)
class Exact(Network):
    """One microsecond a byte, times ``factor``; nothing else."""

    factor: int = 1

    def all_reduce_s(self, nbytes: float) -> float:
        return 1e-6 * self.factor * nbytes


def exact_cluster(factors: tuple[int, ...] = (1,), **more: object) -> Cluster:
    networks = [Exact(2, 1e9, factor=factor) for factor in factors]
    settings: dict[str, object] = {"ranks": 2, "second": networks[1] if len(networks) > 1 else None, **more}
    return Cluster("exact", network=networks[0], **settings)  # type: ignore[arg-type]


def job_of(times: BucketTimes, name: str = "job") -> Job:
    """A job whose all-reduces take what the fast link's row says, on an :func:`exact_cluster`."""
    rows = zip(times.forward, times.backward, times.reduce[0], strict=True)
    parts = tuple(Part(1e-6 * forward, 1e-6 * backward, ticks) for forward, backward, ticks in rows)
    return Job(name, parts, 1e-6 * times.between)
