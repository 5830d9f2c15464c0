"""How long is a step of each system, at each coverage rate?

    python -m benchmarks.step_time [--cr 0.5,1,2,4] [--workloads resnet,vgg] [--systems ddp,crossover] [--hosts 2]
                                   [--quick] [--save]

Every system trains the same model on the same batches between hosts whose links have the rate that gives the coverage
rate asked for. Systems take turns, ``--repeats`` times. A run's figure is the median over windows of 4 steps (after
which every system's pattern repeats), each window as long as on its slowest rank; a step is the median over the
repeats. ``exposed`` is what a step takes beyond one without communication, measured in the same turn; ``hidden`` is the
share of the ideal all-reduce that is not exposed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import command, figures, harness, notes, peers
from benchmarks.figures import milliseconds
from benchmarks.harness import BASE, CEILING, Cell, Measured, Outcome
from benchmarks.peers import HORIZON, Settings, System, tuning
from benchmarks.sites import Site, site
from benchmarks.workloads import Workload

MODULE = "benchmarks.step_time"
WINDOW = 4
WARM_UP_STEPS = 9
RUN_SECONDS = 2.0
HEADER = ["system", "step, ms", "lowest to highest", "x DDP", "exposed, ms", "hidden"]


def measure(system: System, workload: Workload, settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """This rank's seconds a step in each window of steps. Collective."""
    training = system.prepare(workload.model(), workload.optimizer, workload, HORIZON, **settings)
    marks = tuning.timed_steps(training, workload, WARM_UP_STEPS, task["steps"])[::WINDOW]
    training.finish()
    windows = [(end - begin) / WINDOW for begin, end in itertools.pairwise(marks)]
    return {"windows": windows, "facts": training.facts}


def seconds(measured: Measured) -> list[float]:
    """Seconds a step in each repeat."""
    return [statistics.median(figures.slowest([answer["windows"] for answer in ranks])) for ranks in measured.runs]


def row(label: str, own: Sequence[float], base: Sequence[float], compute_s: float | None, ideal_s: float) -> list[str]:
    """One system's row: step, spread, ratio to DDP, exposed and hidden communication; blank where not to be had."""
    step = statistics.median(own)
    ratio = f"{figures.median_ratio(own, base):.3f}" if base else ""
    exposed = hidden = ""
    if compute_s is not None:
        exposed = milliseconds(step - compute_s)
        hidden = f"{1 - (step - compute_s) / ideal_s:.0%}"
    return [label, milliseconds(step), f"{milliseconds(min(own))} to {milliseconds(max(own))}", ratio, exposed, hidden]


def rows(outcome: Outcome) -> list[list[str]]:
    """All systems of a cell, and the limit."""
    times = {name: seconds(measured) for name, measured in outcome.systems.items() if measured.ran}
    compute_s = statistics.median(times[CEILING]) if CEILING in times else None
    made = []
    for name in outcome.systems:
        label = peers.get(name).label
        if name in times:
            made.append(row(label, times[name], times.get(BASE, []), compute_s, outcome.cell.all_reduce_s))
        else:
            made.append([label, "cannot run", "", "", "", ""])
    return [*made, limit_row(outcome, times.get(BASE, []), compute_s)]


def limit_row(outcome: Outcome, base: Sequence[float], compute_s: float | None) -> list[str]:
    """``max(computing, all-reduce)``, with the step without communication as the computing."""
    limit, computing = outcome.cell.limit_s(compute_s), outcome.cell.limit_s(compute_s) > outcome.cell.all_reduce_s
    ratio = f"{limit / statistics.median(base):.3f}" if base else ""
    which = "computing" if computing else "all-reduce"
    return [f"limit: max(computing, all-reduce) = {which}", milliseconds(limit), "", ratio, "", ""]


def section(outcome: Outcome, options: argparse.Namespace) -> str:
    """One cell's table with all that has to be known about it."""
    head = f"### {outcome.cell}"
    if outcome.refused is not None:
        return f"{head}\n\nNot measured: {outcome.refused}"
    steps = f"{options.repeats} runs of {steps_for(options, outcome.cell)} steps after {WARM_UP_STEPS} to warm up"
    facts = f"{figures.facts(outcome)} {steps}."
    tail = [figures.choices(outcome.systems), figures.reasons(outcome.systems)]
    return "\n\n".join([head, facts, notes.table(HEADER, rows(outcome)), *filter(None, tail)])


def summary(outcomes: Sequence[Outcome]) -> str:
    """Ratio to DDP of every system in every cell that has DDP; empty where there is none."""
    measured = [outcome for outcome in outcomes if outcome.refused is None and outcome.systems[BASE].ran]
    if not measured:
        return ""
    lines = []
    for name in measured[0].systems:
        line = [peers.get(name).label]
        for outcome in measured:
            own, base = outcome.systems[name], outcome.systems[BASE]
            line.append(f"{figures.median_ratio(seconds(own), seconds(base)):.3f}" if own.ran else "-")
        lines.append(line)
    header = ["x DDP", *(f"{o.cell.workload} {o.cell.cr:g} on {o.cell.hosts}" for o in measured)]
    places = "\n".join(dict.fromkeys(f"- {o.place}" for o in measured))
    head = "### Step time in DDP's, by workload, coverage rate and number of hosts"
    return "\n\n".join([head, places, notes.table(header, lines)])


def run(place: Site, options: argparse.Namespace) -> list[Outcome]:
    """Measure all cells at one site."""
    cells = harness.make_cells(place, options.workloads, options.cr)
    task = {"tune": not options.quick}
    systems, steps = [CEILING, *options.systems], partial(steps_for, options)
    return harness.in_turn(place, MODULE, cells, systems, options.repeats, steps, task)


def everywhere(options: argparse.Namespace, counts: Sequence[int]) -> list[Outcome]:
    """Measure all cells with each number of hosts."""
    outcomes = []
    for hosts in counts:
        with site(hosts, options.emulated) as place:
            outcomes += run(place, options)
    return outcomes


def steps_for(options: argparse.Namespace, cell: Cell) -> int:
    """As many windows of steps as fit into 2 s at the limit, at least one and at most what was asked for."""
    windows = int(RUN_SECONDS / (WINDOW * cell.limit_s()))
    steps: int = min(options.steps, WINDOW * max(1, windows))
    return steps


def hosts_of(text: str) -> list[int]:
    """For argparse: numbers of hosts with commas between them, the smallest first."""
    words = text.split(",")
    if not all(word.strip().isdigit() and int(word) >= 2 for word in words):
        raise argparse.ArgumentTypeError(f"got {text!r}; give numbers of 2 or more with commas between them")
    return sorted({int(word) for word in words})


def options_of(
    words: Sequence[str] | None,
    description: str,
    usual: tuple[Any, ...],
    hosts_help: str = ", with commas (2)",
) -> argparse.Namespace:
    """The options of this script, and of ``scaling.py``."""
    parser = command.parser(description, *usual)
    parser.add_argument("--hosts", type=hosts_of, help=f"how many{hosts_help}")
    parser.add_argument("--steps", type=int, help="most timed steps of a run, a multiple of 4 (12)")
    options = parser.parse_args(words)
    command.complete(parser, options, (["vgg"], [1.0, 4.0]))
    options.steps = options.steps or (8 if options.quick else 12)
    if options.steps < WINDOW or options.steps % WINDOW:
        parser.error(f"--steps: is {options.steps}; it has to be a multiple of {WINDOW}")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    usual = (["resnet", "vgg", "gpt", "mlp"], "0.5,1,2,4", 3)
    options = options_of(words, __doc__ or "", usual)
    if options.worker:
        harness.work(options.worker, measure)
        return 0

    def question() -> int:
        outcomes = everywhere(options, options.hosts or [2])
        sections = [summary(outcomes), *(section(outcome, options) for outcome in outcomes)]
        command.conclude(options, "step-time", "Step time of each system", sections, figures.as_data(outcomes))
        return command.exit_code(outcomes)

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
