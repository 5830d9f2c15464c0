"""One rank of a job that shares its device, for :mod:`benchmarks.two_jobs`: trains, and reports its steps' ends."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import crossover as xo
from benchmarks import loopback, workloads
from crossover.sync.registry import present

WARM_UP_STEPS = 3
START_SECONDS = 90.0


def work(text: str) -> None:
    """Train as ``text``, a JSON object, says, and report."""
    task = json.loads(text)
    torch.set_num_threads(1)
    xo.init()
    workload = workloads.get(task["workload"], task["batch"], seed=task["number"])
    workload.training_set()
    model = workload.model()
    optimizer: Any = xo.DistributedOptimizer(workload.optimizer(model.parameters()), model.named_parameters())
    ends = []
    for step in range(WARM_UP_STEPS + task["steps"]):
        if step == WARM_UP_STEPS:
            _wait_for_the_others(Path(task["meeting"]), task["number"], task["together"])
            ends.append(time.monotonic())
        optimizer.zero_grad()
        inputs, targets = workload.batch(xo.rank(), step % workload.steps_per_epoch(xo.size()), xo.size())
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        ends.append(time.monotonic())
    ends = ends[WARM_UP_STEPS:]
    tallies = [turn.tally for turn in present()]
    loopback.report(
        {
            "ends": ends,
            "weights": digest(model),
            "turns": sum(tally.turns for tally in tallies),
            "waited_s": sum(tally.waited_s for tally in tallies),
            "computed_s": sum(tally.computed_s for tally in tallies),
            "alone": sum(tally.alone for tally in tallies),
        }
    )
    xo.barrier()
    xo.shutdown()


def digest(model: torch.nn.Module) -> str:
    """Of all parameters' bits."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def _wait_for_the_others(meeting: Path, number: int, together: int) -> None:
    """Return when all jobs that are measured together have come this far; all their ranks meet at one place."""
    xo.barrier()
    (meeting / f"{number}.{xo.rank()}").touch()
    deadline = time.monotonic() + START_SECONDS
    while len(list(meeting.iterdir())) < together * xo.size():
        if time.monotonic() > deadline:
            raise TimeoutError("the other jobs did not start")
        time.sleep(0.005)


if __name__ == "__main__":
    work(sys.argv[1])
