"""How long a workload computes without any communication, on the cores that a host has.

``python -m benchmarks.workloads.measure resnet`` measures here; as a testbed's job, all hosts measure at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .. import workloads
from .workload import Workload

if TYPE_CHECKING:
    from ..testbed import Testbed

STEPS = 20
WARM_UP_STEPS = 5
TIMEOUT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """Seconds of one step's computing with one torch thread; medians.

    Attributes:
        forward_backward_s: forward pass, loss and backward pass: what coverage rates refer to.
        step_s: those, the making of the batch and the optimizer's update: what no schedule can go below.
        spread: the middle half of ``step_s``'s samples over their median.
    """

    workload: str
    batch_size: int
    gradient_bytes: int
    forward_backward_s: float
    step_s: float
    spread: float


def measure_compute(workload: Workload, steps: int = STEPS) -> ComputeTime:
    """Train ``steps`` steps of a fresh model here, pinned to one core with one torch thread, and take the medians.

    The process's cores and torch threads are as before afterwards. ``steps`` is at least 2.

    Example:
        >>> measure_compute(workloads.get("gpt", batch_size=1), steps=2).step_s > 0
        True
    """
    if steps < 2:
        raise ValueError(f"steps: got {steps}; give at least 2, or there is no spread")
    with _one_core():
        return _measure(workload, steps)


def measure_on(bed: Testbed, workload: Workload, steps: int = STEPS) -> ComputeTime:
    """Measure on every host of the testbed at the same time, under its share of the cores; the slowest host's times.

    Raises:
        JobError: a host failed or took more than 5 minutes.
    """
    words = [
        workload.name,
        "--batch-size",
        str(workload.batch_size),
        "--seed",
        str(workload.seed),
        "--steps",
        str(steps),
    ]
    result = bed.run(["-m", "benchmarks.workloads.measure", *words], timeout=TIMEOUT_SECONDS)
    times = [ComputeTime(**json.loads(text.splitlines()[-1])) for text in result.stdout]
    return max(times, key=lambda time: time.step_s)


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    # A host's share may float over several cores: then it is the quota that makes it one.
    if "CROSSOVER_TESTBED_HOST" not in os.environ:
        os.sched_setaffinity(0, {min(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


def _measure(workload: Workload, steps: int) -> ComputeTime:
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    passes, whole = [], []
    for step in range(WARM_UP_STEPS + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        inputs, targets = workload.batch(0, step)
        ready = time.perf_counter()
        workload.loss(model(inputs), targets).backward()
        passes.append(time.perf_counter() - ready)
        optimizer.step()
        whole.append(time.perf_counter() - began)
    passes, whole = passes[WARM_UP_STEPS:], whole[WARM_UP_STEPS:]
    low, median, high = statistics.quantiles(whole, n=4)
    return ComputeTime(
        workload=workload.name,
        batch_size=workload.batch_size,
        gradient_bytes=workload.gradient_bytes,
        forward_backward_s=statistics.median(passes),
        step_s=median,
        spread=(high - low) / median,
    )


def _wait_for_all() -> None:
    """Where this is one rank of several, return when all are here, so that all compute at the same time."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        torch.distributed.barrier()


def main() -> None:
    """Print the measurement as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workloads.measure", description=__doc__)
    parser.add_argument("workload", choices=workloads.names())
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    workload = workloads.get(arguments.workload, arguments.batch_size, arguments.seed)
    workload.training_set()
    _wait_for_all()
    print(json.dumps(dataclasses.asdict(measure_compute(workload, arguments.steps))))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
