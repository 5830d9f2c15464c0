"""How long do two trainings take to DDP's accuracy: one after the other, and at once with turns?

    python -m benchmarks.pair_to_accuracy [--cr 2,4] [--workloads gpt] [--repeats 1] [--longer 1.25]
                                          [--systems crossover_fp16,crossover_both_fp16] [--quick] [--save]

The same workload is trained twice, with two seeds, between the same two hosts over the same slowed links. Each system
does so one after the other, and with both jobs at the same time and turns (``TimeShare``); the base is DDP, one after
the other. The target is DDP's final accuracy, mean over the seeds. A pair is there at the first evaluation at which the
mean of its accuracies is at the target, when the second job comes to it. Systems that are not exact train for
``--longer`` times the steps. Models are kept and evaluated when both jobs are done, off the clock. Repeats count the
seeds up, two at a time, and swap the order of the systems.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import command, figures, harness, notes, peers, time_to_accuracy, together
from benchmarks.harness import BASE, Cell, Outcome, say
from benchmarks.peers import Settings, System
from benchmarks.sites import Site, site
from benchmarks.testbed import BandwidthError, JobError
from benchmarks.time_to_accuracy import Curve, curve, mean_curve, steps_for, task_of, training_options
from benchmarks.workloads import Workload

MODULE = "benchmarks.pair_to_accuracy"
JOBS = 2
SYSTEMS = (
    "crossover_fp16",
    "crossover_deft_fp16",
    "crossover_selsync_fp16",
    "crossover_both_fp16",
    "crossover_both_seldom_fp16",
)
HEADER = ["both trainings", "at the target, s", "speed-up", "all steps, s", "accuracies", "sd", "steps"]


@dataclass(frozen=True)
class Way:
    """How two trainings are done: with which system, and whether at the same time."""

    system: str
    turns: bool

    def __str__(self) -> str:
        return f"{peers.get(self.system).label}, {'taking turns' if self.turns else 'one after the other'}"


@dataclass
class Measured:
    """One way in one cell: for each repeat the two trainings' curves; or why it cannot run."""

    pairs: list[list[Curve]] = field(default_factory=list)
    reason: str | None = None


Results = dict[Way, Measured]


def measure(system: System, workload: Workload, settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """Train as ``time_to_accuracy`` does, when all jobs are there; evaluate when all have trained. Collective."""
    together.meet(task, "start")
    trained = time_to_accuracy.train(system, workload, settings, task)
    together.meet(task, "end")
    return time_to_accuracy.evaluated(workload, trained)


def ways_of(systems: Sequence[str]) -> list[Way]:
    """DDP one after the other, and every other system both ways."""
    others = [Way(name, turns) for name in systems if name != BASE for turns in (False, True)]
    return [Way(BASE, turns=False), *others]


# -- what is measured --------------------------------------------------------------------------------------------------


def run(place: Site, options: argparse.Namespace) -> list[tuple[Outcome, Results]]:
    """Measure all cells, ``--repeats`` times."""
    cells = harness.make_cells(place, options.workloads, options.cr, options.batch_size)
    ways = ways_of(options.systems)
    found = [(Outcome(cell, {}), {way: Measured() for way in ways}) for cell in cells]
    for repeat in range(options.repeats):
        for outcome, results in found:
            if outcome.refused is None:
                _repeat(place, outcome, results, repeat, options)
    return found


def _repeat(place: Site, outcome: Outcome, results: Results, repeat: int, options: argparse.Namespace) -> None:
    cell = outcome.cell
    try:
        place.set_rate(cell.rate)
    except (BandwidthError, ValueError) as error:
        outcome.refused = str(error)
        say(f"{cell}: refused: {error}")
        return
    outcome.take(place, {})
    seeds = range(JOBS * repeat, JOBS * (repeat + 1))
    turn = [way for way, measured in results.items() if measured.reason is None]
    for way in turn if repeat % 2 == 0 else turn[::-1]:
        _add(place, cell, way, results[way], seeds, options)


def _add(
    place: Site, cell: Cell, way: Way, measured: Measured, seeds: Sequence[int], options: argparse.Namespace
) -> None:
    try:
        measured.pairs.append(train(place, cell, way, seeds, options))
    except JobError as error:
        measured.reason = f"failed: {error}"
        say(f"{way}: {error}")
        return
    seconds = pair_curve(measured.pairs[-1], way.turns).seconds[-1]
    say(f"{cell}, seeds {seeds[0]} and {seeds[-1]}: {way}: {seconds:.1f} s")


def train(place: Site, cell: Cell, way: Way, seeds: Sequence[int], options: argparse.Namespace) -> list[Curve]:
    """One curve a seed."""
    task = {**task_of(options), "tune": False, "choices": {}, "workload": cell.workload}
    task["steps"] = steps_for(options, cell.workload)
    timeout = 120.0 + 20 * JOBS * options.longer * task["steps"] * cell.limit_s()
    groups = [seeds] if way.turns else [[seed] for seed in seeds]
    return [curve(ranks) for group in groups for ranks in together.run(place, MODULE, way.system, task, group, timeout)]


# -- what it comes to --------------------------------------------------------------------------------------------------


def pair_curve(curves: Sequence[Curve], turns: bool) -> Curve:
    """Two trainings as one: seconds until both are at an evaluation, and the mean of their accuracies there.

    At the same time the later one counts; one after the other their seconds add up.
    """
    both = max if turns else sum
    times = zip(*(each.seconds for each in curves), strict=True)
    accuracies = mean_curve(curves).accuracies
    return Curve([both(seconds) for seconds in times], accuracies, curves[0].steps)


def row(way: Way, pairs: Sequence[Sequence[Curve]], target: float, base_s: float) -> list[str]:
    """One way's row; ``base_s`` is when DDP, one after the other, is at the target."""
    mean = mean_curve([pair_curve(pair, way.turns) for pair in pairs])
    reached = mean.time_to(target)
    finals = [each.accuracies[-1] for pair in pairs for each in pair]
    return [
        str(way),
        "not reached" if reached is None else f"{reached:.1f}",
        "" if reached is None else f"{base_s / reached:.2f}",
        f"{mean.seconds[-1]:.1f}",
        f"{statistics.fmean(finals):.4f}",
        f"{statistics.stdev(finals):.4f}",
        str(mean.steps),
    ]


def section(outcome: Outcome, results: Results, steps: int) -> str:
    """One cell's table with all that has to be known about it."""
    head = f"### {outcome.cell}"
    [(base_way, base), *_] = results.items()
    if outcome.refused is not None:
        return f"{head}\n\nNot measured: {outcome.refused}"
    reasons = [f"- cannot run: {way}. {measured.reason}" for way, measured in results.items() if measured.reason]
    if base.reason is not None:
        return "\n\n".join([head, "No target without DDP.", *reasons])
    mean = mean_curve([pair_curve(pair, base_way.turns) for pair in base.pairs])
    target = mean.accuracies[-1]
    base_s = mean.time_to(target)
    assert base_s is not None, "the curve ends at the target"
    line = partial(row, target=target, base_s=base_s)
    rows = [line(way, measured.pairs) for way, measured in results.items() if measured.reason is None]
    facts = (
        f"{figures.facts(outcome)} {outcome.cell.compute.batch_size} examples a rank and step, {steps} steps, "
        f"{JOBS * len(base.pairs)} seeds; target: accuracy {target:.4f}. Computing of both, measured beforehand: "
        f"{JOBS * steps * outcome.cell.compute.step_s:.1f} s."
    )
    return "\n\n".join([head, facts, notes.table(HEADER, rows), *reasons])


def as_data(found: Sequence[tuple[Outcome, Results]]) -> list[dict[str, Any]]:
    """All that was measured, for JSON."""
    cells = figures.as_data([outcome for outcome, _ in found])
    for cell, (_, results) in zip(cells, found, strict=True):
        cell["ways"] = [
            {**dataclasses.asdict(way), **dataclasses.asdict(measured)} for way, measured in results.items()
        ]
    return cells


# -- the command -------------------------------------------------------------------------------------------------------


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = command.parser(__doc__ or "", ["gpt"], "2,4", 1)
    parser.set_defaults(systems=list(SYSTEMS))
    options = training_options(parser, words, longer=1.25)
    if options.systems == [BASE]:
        parser.error("--systems: give others than ddp, which is the base")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.script(options_of(words), measure, question)


def question(options: argparse.Namespace) -> int:
    """Measure, and show."""
    with site(2, emulated=False) as place:
        found = run(place, options)
    sections = [section(*each, steps_for(options, each[0].cell.workload)) for each in found]
    command.conclude(options, "pair-to-accuracy", "Two trainings to DDP's accuracy", sections, as_data(found))
    return command.exit_code([outcome for outcome, _ in found])


if __name__ == "__main__":
    sys.exit(main())
