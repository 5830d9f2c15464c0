"""What the SelSync studies share: training with a gate on loopback ranks, jobs one after the other, pictures.

A study is driver and worker in one, as the question scripts are: the driver runs ``python -m SCRIPT --worker TASK`` on
every rank, and the worker answers through :func:`work`. Ranks are real processes. There may be more of them than cores,
as nothing here is a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo

from . import loopback, notes, peers
from .harness import say
from .workloads import Workload

MakeGate = Callable[[nn.Module], xo.selsync.Gate]
"""A new gate; the model is given for its buffers."""
Batches = Callable[[int], tuple[Tensor, Tensor]]
"""This rank's input and target of a step."""
Answer = dict[str, float]

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#444444")


# -- on the ranks ------------------------------------------------------------------------------------------------------


def train(workload: Workload, make_gate: MakeGate, steps: int, batches: Batches) -> Answer:
    """Train with a gate and evaluate the average of all ranks' parameters. Collective.

    Returns:
        ``steps``, ``shared`` and ``lssr`` of the gate; test ``accuracy`` and ``loss`` of the average; and
        ``own_accuracy``, of this rank's replica before the average.
    """
    model = workload.model()
    gate = make_gate(model)
    optimizer: Any = workload.optimizer(model.parameters())
    optimizer = xo.DistributedOptimizer(optimizer, model.named_parameters(), gate=gate)
    scheduler = workload.scheduler(optimizer, steps)
    for step in range(steps):
        inputs, targets = batches(step)
        optimizer.zero_grad()
        torch.autograd.backward(workload.loss(model(inputs), targets))
        optimizer.step()
        scheduler.step()
    counts = {"steps": gate.steps, "shared": gate.shared_steps, "lssr": gate.lssr}
    own = workload.accuracy(model)
    optimizer.flush()
    return {**counts, **evaluate(workload, model), "own_accuracy": own}


@torch.no_grad()
def evaluate(workload: Workload, model: nn.Module) -> Answer:
    """Accuracy and mean loss on the test set."""
    inputs, targets = workload.test_set()
    was_training = model.training
    model.eval()
    loss = workload.loss(model(inputs), targets).item()
    model.train(was_training)
    return {"accuracy": workload.accuracy(model), "loss": loss}


def work(text: str, measure: Callable[[dict[str, Any]], Any]) -> None:
    """One rank of a job: report what ``measure`` makes of the task."""
    torch.set_num_threads(1)
    xo.init()
    loopback.report(measure(json.loads(text)))
    peers.tuning.clean_up()
    xo.shutdown()


# -- jobs --------------------------------------------------------------------------------------------------------------


def ask(module: str, task: Mapping[str, Any], size: int, timeout: float = 900.0) -> list[Any]:
    """Every rank's answer to a task, by rank."""
    began = time.monotonic()
    answers = loopback.run(module, ["--worker", json.dumps(task)], size, "torch", timeout)
    say(f"{size} ranks, {', '.join(f'{key} {value}' for key, value in task.items())}: {time.monotonic() - began:.1f} s")
    return answers


def place(sizes: Sequence[int]) -> str:
    """On what the ranks ran, for a note."""
    cores = len(os.sched_getaffinity(0))
    counts = ", ".join(str(size) for size in sizes)
    shared = " (more ranks than cores: they share cores)" if max(sizes) > cores else ", one to a core"
    return f"{counts} real ranks on loopback on {cores} cores{shared}."


# -- figures -----------------------------------------------------------------------------------------------------------


def mean(answers: Sequence[Mapping[str, float]], key: str) -> float:
    """Over the seeds, or over the ranks."""
    return statistics.fmean(answer[key] for answer in answers)


def spread(answers: Sequence[Mapping[str, float]], key: str) -> float:
    """Standard deviation over the seeds; 0 for one."""
    return statistics.stdev([answer[key] for answer in answers]) if len(answers) > 1 else 0.0


def with_spread(answers: Sequence[Mapping[str, float]], key: str, digits: int = 4) -> str:
    """Mean and standard deviation, for a table."""
    text = f"{mean(answers, key):.{digits}f}"
    return f"{text} ± {spread(answers, key):.{digits}f}" if len(answers) > 1 else text


# -- what is left behind -----------------------------------------------------------------------------------------------


def parser(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """The options that every study has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--seeds", type=int, default=seeds, help="of parameters and order of the data (%(default)s)")
    made.add_argument("--quick", action="store_true", help="a look: one seed, short training")
    made.add_argument("--save", action="store_true", help="leave a dated note and picture in benchmarks/results/")
    return made


def save(name: str, title: str, sections: Sequence[str], data: Any, draw: Callable[[Path], None]) -> None:
    """A note in ``benchmarks/results/`` and its picture beside it."""
    note = notes.save(name, title, sections, data)
    picture = note.with_suffix(".png")
    draw(picture)
    with note.open("a") as file:
        file.write(f"\n![{title}]({picture.name})\n")
    print(note, picture, sep="\n")


@contextmanager
def picture(path: Path, title: str, panels: int) -> Iterator[list[Any]]:
    """Axes side by side; written to ``path`` when the block ends.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6eaee",
        "axes.axisbelow": True,
        "axes.titlesize": 10.5,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
        figure.suptitle(title, x=0.012, ha="left", fontweight="bold")
        yield list(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path, dpi=130)
