"""For how long all-reduces keep a link busy, by probes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from crossover.deft.cost import LinkCost, fit_link
from crossover.schedulers.transfer import Link

PROBE_BYTES = (4_096, 1_048_576)
QUEUED = (8, 4)
"""All-reduces of each of these sizes that are queued behind each other."""
ROUNDS = 2


def probe(link: Link, device: torch.device, name: str) -> LinkCost:
    """For how long small and large all-reduces keep an otherwise idle link busy. Collective; each rank for itself.

    They are queued behind each other, as buckets are: the latency of one passes under another where a backend has
    several under way, and what it costs a link that is kept busy is less than what one all-reduce alone takes.
    """
    samples = []
    for nbytes, queued in zip(PROBE_BYTES, QUEUED, strict=True):
        rounds = [_queued([link], device, nbytes, queued, f"{name}.probe{nbytes}.{n}")[0] for n in range(ROUNDS)]
        samples.append((nbytes, min(rounds)))  # in the first, ranks wait for each other
    return fit_link(samples)


def probe_together(links: Sequence[Link], device: torch.device, name: str) -> list[float]:
    """Microseconds of an equal all-reduce on each link while all are busy. Collective."""
    rounds = [_queued(links, device, PROBE_BYTES[1], QUEUED[1], f"{name}.together{n}") for n in range(ROUNDS)]
    return [min(column) for column in zip(*rounds, strict=True)]


def _queued(links: Sequence[Link], device: torch.device, nbytes: int, count: int, name: str) -> list[float]:
    """Microseconds that each of ``count`` all-reduces takes on each link."""
    tensors = torch.zeros(len(links), count, nbytes // 4, dtype=torch.float32, device=device)
    before = time.perf_counter_ns()
    works = [
        [link.all_reduce(tensor, name=f"{name}.{place}.{number}") for number, tensor in enumerate(rows)]
        for place, (link, rows) in enumerate(zip(links, tensors, strict=True))
    ]
    took = []
    for queue in works:
        for work in queue:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append((time.perf_counter_ns() - before) * 1e-3 / count)
    return took
