"""How long does each system take to the accuracy that DDP ends with?

    python -m benchmarks.time_to_accuracy [--cr 1,4] [--workloads resnet] [--systems ddp,crossover] [--hosts 2]
                                          [--repeats 3] [--steps N] [--longer 1.25] [--batch-size N] [--quick] [--save]

Every system trains the workload's steps with the same schedule of learning rates, once for each seed (``--repeats``),
all systems in turn within a seed. Accuracies are of rank 0's model on the test set, every ``--every`` steps. What is in
flight is landed before, on the clock; the models are kept, and evaluated after training, off the clock. The target is
DDP's final accuracy, mean over the seeds, in the same cell. Systems that are not exact may be given a longer training
(``--longer``), with their schedule of learning rates as long: what they lose a step they may make up for with more of
them. A system's time to the target is where its accuracy, mean over the seeds, first is there: DDP gets there at the
latest with its last step. Communication counts as exposed where it makes the mean step longer than a step's computing,
measured beforehand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import crossover as xo
from benchmarks import command, figures, harness, notes, peers, workloads
from benchmarks.figures import milliseconds
from benchmarks.harness import BASE, Measured, Outcome
from benchmarks.peers import Settings, System
from benchmarks.sites import site
from benchmarks.workloads import Workload

MODULE = "benchmarks.time_to_accuracy"
EVERY = 20
HEADER = [
    "system",
    "time to target, s",
    "x DDP",
    "reached by",
    "final accuracy",
    "sd",
    "steps",
    "step, ms",
    "exposed, ms",
]


def measure(system: System, workload: Workload, settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """Train, and return this rank's seconds at each evaluation, and the accuracies (rank 0's). Collective."""
    return evaluated(workload, train(system, workload, settings, task))


@dataclass
class Trained:
    """What a rank keeps of a training: one entry an evaluation, the first before training.

    Attributes:
        seconds: since the beginning.
        states: of the model; on rank 0 only.
        facts: of the system, for a table.
    """

    steps: int
    seconds: list[float]
    states: list[dict[str, Tensor]]
    facts: dict[str, Any]


def train(system: System, workload: Workload, settings: Settings, task: dict[str, Any]) -> Trained:
    """Train; models are kept and evaluated afterwards, so that evaluations take no time from anybody. Collective."""
    model = workload.model()
    longer = 1.0 if system.exact else task["longer"]
    steps = round(longer * task["steps"] / task["every"]) * task["every"]
    training = system.prepare(model, workload.optimizer, workload, steps, **settings)
    scheduler = workload.scheduler(training.scheduled, steps)
    rank, size = xo.rank(), xo.size()
    trained = Trained(steps, [0.0], [state_of(model)] if rank == 0 else [], training.facts)
    xo.barrier()
    began = time.perf_counter()
    for step in range(steps):
        training(*workload.batch(rank, step, size))
        scheduler.step()
        if (step + 1) % task["every"] == 0:
            training.finish()
            trained.seconds.append(trained.seconds[-1] + time.perf_counter() - began)
            if rank == 0:
                trained.states.append(state_of(model))
            xo.barrier()
            began = time.perf_counter()
    return trained


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def evaluated(workload: Workload, trained: Trained) -> dict[str, Any]:
    """What the rank answers: with the accuracy of each state it kept."""
    model = workload.model()
    accuracies = []
    for state in trained.states:
        model.load_state_dict(state)
        accuracies.append(workload.accuracy(model))
    return {
        "seconds": trained.seconds,
        "accuracies": accuracies,
        "steps": trained.steps,
        "facts": trained.facts,
    }


@dataclass(frozen=True)
class Curve:
    """Accuracy against seconds, one point an evaluation, the first before training; ``steps`` in all."""

    seconds: Sequence[float]
    accuracies: Sequence[float]
    steps: int

    def time_to(self, target: float) -> float | None:
        """Seconds at the first evaluation that is at the target, to rounding; ``None`` if none is."""
        for seconds, accuracy in zip(self.seconds, self.accuracies, strict=True):
            if accuracy >= target - 1e-9:
                return seconds
        return None


def curve(ranks: Sequence[dict[str, Any]]) -> Curve:
    """One run's: the slowest rank's seconds, rank 0's accuracies."""
    return Curve(figures.slowest([answer["seconds"] for answer in ranks]), ranks[0]["accuracies"], ranks[0]["steps"])


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Point by point the mean over the seeds, of seconds and of accuracies."""
    times = zip(*(each.seconds for each in curves), strict=True)
    accuracies = zip(*(each.accuracies for each in curves), strict=True)
    return Curve([statistics.fmean(t) for t in times], [statistics.fmean(a) for a in accuracies], curves[0].steps)


def row(label: str, curves: Sequence[Curve], target: float, base_s: float, compute_s: float) -> list[str]:
    """One system's row; ``base_s`` is DDP's time to the target."""
    reached = mean_curve(curves).time_to(target)
    final = [each.accuracies[-1] for each in curves]
    step = statistics.median(each.seconds[-1] / each.steps for each in curves)
    singly = [seconds for each in curves if (seconds := each.time_to(target)) is not None]
    span = f" ({min(singly):.1f} to {max(singly):.1f} s)" if singly else ""
    return [
        label,
        "not reached" if reached is None else f"{reached:.1f}",
        "" if reached is None else f"{reached / base_s:.3f}",
        f"{len(singly)} of {len(curves)}{span}",
        f"{statistics.fmean(final):.4f}",
        f"{statistics.stdev(final):.4f}" if len(final) > 1 else "",
        str(curves[0].steps),
        milliseconds(step),
        milliseconds(step - compute_s),
    ]


def curves_of(measured: Measured) -> list[Curve]:
    """One curve a seed."""
    return [curve(ranks) for ranks in measured.runs]


def rows(outcome: Outcome, steps: int) -> tuple[float, list[list[str]]]:
    """The target, and the rows of all systems and of the limit."""
    base = curves_of(outcome.systems[BASE])
    target = mean_curve(base).accuracies[-1]
    base_s = mean_curve(base).time_to(target)
    assert base_s is not None, "the curve ends at the target"
    made = []
    for name, measured in outcome.systems.items():
        label = peers.get(name).label
        if measured.ran:
            made.append(row(label, curves_of(measured), target, base_s, outcome.cell.compute.step_s))
        else:
            made.append([label, "cannot run", *[""] * (len(HEADER) - 2)])
    limit = outcome.cell.limit_s()
    ratio = limit * steps / statistics.median(each.seconds[-1] for each in base)
    label = "limit: max(computing, all-reduce), steps as DDP"
    return target, [*made, [label, f"{ratio * base_s:.1f}", f"{ratio:.3f}", *[""] * 4, milliseconds(limit), ""]]


def section(outcome: Outcome, steps: int) -> str:
    """One cell's table with all that has to be known about it."""
    head = f"### {outcome.cell}"
    if outcome.refused is not None:
        return f"{head}\n\nNot measured: {outcome.refused}"
    tail = [figures.choices(outcome.systems), figures.reasons(outcome.systems)]
    if not outcome.systems[BASE].ran:
        return "\n\n".join([head, outcome.sentence, "No target without DDP.", *filter(None, tail)])
    target, made = rows(outcome, steps)
    seeds = len(outcome.systems[BASE].runs)
    facts = (
        f"{figures.facts(outcome)} {outcome.cell.compute.batch_size} examples a rank and step, {steps} steps, "
        f"{seeds} seeds; target: accuracy {target:.4f}."
    )
    return "\n\n".join([head, facts, notes.table(HEADER, made), *filter(None, tail)])


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = command.parser(__doc__ or "", ["resnet"], "1,4", 3)
    parser.add_argument("--hosts", type=int, default=2, help="how many (%(default)s)")
    return training_options(parser, words, longer=1.0)


def training_options(parser: argparse.ArgumentParser, words: Sequence[str] | None, longer: float) -> argparse.Namespace:
    """The command line with what trainings to an accuracy need, completed."""
    parser.add_argument("--steps", type=int, help="steps of training (each workload's own; 2 evaluations with --quick)")
    parser.add_argument("--batch-size", type=int, help="examples a rank and step (each workload's own)")
    parser.add_argument(
        "--longer", type=float, default=longer, help="times the steps, for systems that are not exact (%(default)s)"
    )
    parser.add_argument("--every", type=int, default=EVERY, help="steps between evaluations (%(default)s)")
    options = parser.parse_args(words)
    command.complete(parser, options, (["vgg"], [2.0]))
    if options.emulated:
        parser.error("--emulated: the target is DDP's accuracy, and DDP does not run on the emulated link")
    if options.every < 4 or options.every % 4:
        parser.error(
            f"--every: is {options.every}; it has to be a multiple of 4, the steps between local SGD's averages"
        )
    if not 1 <= options.longer < float("inf"):
        parser.error(f"--longer: is {options.longer}; it has to be at least 1")
    if options.batch_size is not None and options.batch_size < 1:
        parser.error(f"--batch-size: is {options.batch_size}; it has to be at least 1")
    options.systems = [name for name in options.systems if name != harness.CEILING]
    return options


def steps_for(options: argparse.Namespace, workload: str) -> int:
    """Steps of training, a multiple of those between evaluations."""
    wanted: int = options.steps or (2 * options.every if options.quick else workloads.get(workload).steps)
    every: int = options.every
    return max(every, wanted // every * every)


def task_of(options: argparse.Namespace) -> dict[str, Any]:
    """What ranks are told about every training."""
    return {
        "every": options.every,
        "longer": options.longer,
        "tune": not options.quick,
        "batch_size": options.batch_size,
    }


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        harness.work(options.worker, measure)
        return 0

    def question() -> int:
        with site(options.hosts, options.emulated) as place:
            cells = harness.make_cells(place, options.workloads, options.cr, options.batch_size)
            outcomes = harness.in_turn(
                place,
                MODULE,
                cells,
                options.systems,
                options.repeats,
                lambda cell: steps_for(options, cell.workload),
                task_of(options),
            )
        sections = [section(outcome, steps_for(options, outcome.cell.workload)) for outcome in outcomes]
        title = "Time to the accuracy that DDP ends with"
        command.conclude(options, "time-to-accuracy", title, sections, figures.as_data(outcomes))
        return command.exit_code(outcomes)

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
