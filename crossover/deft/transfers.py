"""How long all-reduces take: of buckets while training runs, and of probes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from crossover.deft.cost import LinkCost, fit_link
from crossover.schedulers.transfer import Link, Transfer

PROBE_BYTES = (4_096, 1_048_576)
PROBES = 5


def busy_microseconds(transfers: Sequence[Transfer]) -> list[float] | None:
    """How long each transfer kept its link busy; ``None`` where the backend does not tell.

    Args:
        transfers: over one link, in the order in which they were started, all complete.
    """
    if not all(transfer.told for transfer in transfers):
        return None
    times, free = [], 0
    for transfer in transfers:
        begins = max(transfer.started_ns, free)
        free = max(transfer.completed_ns, free)
        times.append(max(free - begins, 0) * 1e-3)
    return times


def probe(link: Link, device: torch.device, name: str) -> LinkCost:
    """Time small and large all-reduces on an idle link. Collective; each rank measures for itself."""
    samples: list[tuple[int, float]] = []
    for nbytes in PROBE_BYTES:
        tensor = torch.zeros(nbytes // 4, device=device)
        times = []
        for number in range(PROBES):
            before = time.perf_counter_ns()
            link.all_reduce(tensor, name=f"{name}.probe{nbytes}.{number}").wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter_ns() - before) * 1e-3)
        samples.append((nbytes, statistics.median(times)))
    return fit_link(samples)


def probe_together(links: Sequence[Link], device: torch.device, name: str) -> list[float]:
    """Microseconds of an equal all-reduce on each link while all are busy. Collective."""
    tensors = [torch.zeros(PROBE_BYTES[1] // 4, device=device) for _ in links]
    rounds = []
    for number in range(PROBES):
        before = time.perf_counter_ns()
        works = [
            link.all_reduce(tensor, name=f"{name}.together{number}.{place}")
            for place, (link, tensor) in enumerate(zip(links, tensors, strict=True))
        ]
        ends = []
        for work in works:
            work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            ends.append((time.perf_counter_ns() - before) * 1e-3)
        rounds.append(ends)
    return [statistics.median(column) for column in zip(*rounds, strict=True)]
