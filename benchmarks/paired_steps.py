"""Is the plain path ever slower than its peers? Steps of synchronous systems, alternating within the same processes.

    python -m benchmarks.paired_steps [--cr 0.5,1,2,4] [--workloads resnet,vgg,gpt,mlp] [--hosts 2,4] [--rounds 8]
                                      [--repeats 2] [--quick] [--save]

``step_time`` gives each system a run of its own, and on a busy machine two runs of the same system differ by more than
the systems do. Here all systems of a launcher are prepared in the same processes and train a window of 4 steps each in
turn, in alternating order, so that drift of the machine meets all alike. A ratio is the median over neighbouring
windows, each as long as on its slowest rank; the spread is that of the repeats, which are fresh processes. Only systems
that leave nothing in flight between two steps can take turns. Horovod's systems need its launcher: they are compared
with each other in the same way, and Crossover's with Horovod by the medians of neighbouring jobs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import crossover as xo
from benchmarks import command, figures, harness, notes, peers
from benchmarks.figures import milliseconds
from benchmarks.harness import BASE, CEILING, Cell, Outcome
from benchmarks.peers import HORIZON, NotRunnable, Training
from benchmarks.sites import site
from benchmarks.step_time import hosts_of
from benchmarks.workloads import Workload

MODULE = "benchmarks.paired_steps"
SYSTEMS = (CEILING, BASE, "crossover", "horovod", "crossover_horovod")
WARM_UP_STEPS = 6
WINDOW = 4
PAIRS = (("crossover", "ddp"), ("crossover", "horovod"), ("crossover_horovod", "horovod"))
HEADER = ["system", "step, ms", "x DDP", "lowest to highest", "x Horovod", "lowest to highest"]


def answers(workload: Workload, task: dict[str, Any]) -> dict[str, Any]:
    """This rank's seconds a step in each window, for all systems of the task. Collective."""
    found: dict[str, Any] = {}
    trainings: dict[str, Training] = {}
    for name in task["systems"]:
        system = peers.get(name)
        try:
            settings, tried = harness.chosen(system, workload, task)
            trainings[name] = system.prepare(workload.model(), workload.optimizer, workload, HORIZON, **settings)
        except NotRunnable as reason:
            found[name] = {"reason": str(reason)}
            continue
        found[name] = {"windows": [], "choice": dict(settings), "tried": tried, "facts": trainings[name].facts}
        window(trainings[name], workload, WARM_UP_STEPS)
    for turn in range(task["steps"] // WINDOW):
        for name in list(trainings)[:: 1 if turn % 2 == 0 else -1]:
            found[name]["windows"].append(window(trainings[name], workload, WINDOW))
    for training in trainings.values():
        training.finish()
    return found


def window(training: Training, workload: Workload, steps: int) -> float:
    """Seconds a step over ``steps`` of them, after one that finds another system's data in the caches. Collective."""
    rank, size = xo.rank(), xo.size()
    training(*workload.batch(rank, 0, size))
    began = time.perf_counter()
    for step in range(1, steps + 1):
        training(*workload.batch(rank, step, size))
    return (time.perf_counter() - began) / steps


def windows(outcome: Outcome, name: str) -> list[list[float]]:
    """Seconds a step by repeat and window; empty where the system did not run."""
    measured = outcome.systems.get(name)
    if measured is None or not measured.ran:
        return []
    return [figures.slowest([answer["windows"] for answer in ranks]) for ranks in measured.runs]


def ratios(ours: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[float]:
    """Of each repeat, the median ratio of neighbouring windows.

    Example:
        >>> ratios([[1.0, 2.0, 3.0]], [[1.0, 1.0, 1.0]])
        [2.0]
    """
    return [
        statistics.median(a / b for a, b in zip(mine, other, strict=True))
        for mine, other in zip(ours, base, strict=True)
    ]


def against(outcome: Outcome, name: str, base: str) -> list[str]:
    """Ratio to a peer over the repeats, and its spread; blank where one of the two did not run."""
    ours, theirs = windows(outcome, name), windows(outcome, base)
    if not ours or not theirs or name == base:
        return ["", ""]
    each = ratios(ours, theirs)
    return [f"{statistics.geometric_mean(each):.3f}", f"{min(each):.3f} to {max(each):.3f}"]


def rows(outcome: Outcome) -> list[list[str]]:
    """All systems of a cell."""
    made = []
    for name in outcome.systems:
        times = [seconds for repeat in windows(outcome, name) for seconds in repeat]
        step = milliseconds(statistics.median(times)) if times else "cannot run"
        made.append([peers.get(name).label, step, *against(outcome, name, BASE), *against(outcome, name, "horovod")])
    return made


def section(outcome: Outcome, options: argparse.Namespace) -> str:
    """One cell's table with all that has to be known about it."""
    head = f"### {outcome.cell}"
    if outcome.refused is not None:
        return f"{head}\n\nNot measured: {outcome.refused}"
    facts = f"{figures.facts(outcome)} {options.repeats} jobs of {options.rounds} windows of {WINDOW} steps."
    tail = [figures.choices(outcome.systems), figures.reasons(outcome.systems)]
    return "\n\n".join([head, facts, notes.table(HEADER, rows(outcome)), *filter(None, tail)])


def summary(outcomes: Sequence[Outcome]) -> str:
    """The pairs that the plain path is judged by, one line a cell."""
    lines = []
    for outcome in (outcome for outcome in outcomes if outcome.refused is None):
        pairs = [" (".join(filter(None, against(outcome, *pair))) for pair in PAIRS]
        lines.append([str(outcome.cell), *(f"{pair})" if pair else "-" for pair in pairs)])
    return notes.table(["cell", "Crossover / DDP", "Crossover / Horovod", "Crossover on Horovod / Horovod"], lines)


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = command.parser(__doc__ or "", ["resnet", "vgg", "gpt", "mlp"], "0.5,1,2,4", 2)
    parser.add_argument("--hosts", type=hosts_of, default=[2], help="how many, with commas (2)")
    parser.add_argument("--rounds", type=int, default=8, help="windows of each system in a job (%(default)s)")
    parser.add_argument("--batch-size", type=int, help="examples a rank and step (each workload's own)")
    parser.set_defaults(systems=list(SYSTEMS))
    options = parser.parse_args(words)
    command.complete(parser, options, (["vgg"], [1.0]))
    unfit = [name for name in options.systems if name not in SYSTEMS]
    if unfit or options.emulated or options.rounds < 1:
        parser.error(f"give some of {','.join(SYSTEMS)} as --systems, at least 1 as --rounds, and no --emulated")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        harness.on_rank(options.worker, answers)
        return 0

    def steps(_: Cell) -> int:
        return int(options.rounds * WINDOW)

    def question() -> int:
        outcomes = []
        for hosts in options.hosts:
            with site(hosts, emulated=False) as place:
                cells = harness.make_cells(place, options.workloads, options.cr, options.batch_size)
                task = {"tune": not options.quick, "batch_size": options.batch_size}
                systems = [CEILING, *options.systems]
                outcomes += harness.in_turn(place, MODULE, cells, systems, options.repeats, steps, task)
        sections = [summary(outcomes), *(section(outcome, options) for outcome in outcomes)]
        title = "Steps of the plain path and its peers, alternating in the same processes"
        command.conclude(options, "paired-steps", title, sections, figures.as_data(outcomes))
        return command.exit_code(outcomes)

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
