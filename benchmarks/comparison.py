"""The same training on real data with each of Crossover's methods, over a slow link: one table and one picture.

    python -m benchmarks.comparison [--cr 3] [--workload vgg] [--batch-size 32] [--steps 120] [--emulated]
                                    [--out out/comparison]

Two hosts whose link is slowed until a step's all-reduce takes ``--cr`` times its computing: network namespaces where
there are root and iproute2, else Crossover's emulated link; the table says which. Accuracy is on held-out digits. The
target is what plain training, which equals DDP, ends with. Then two such trainings share the hosts and take turns: with
the plain path, and with all methods together, averaging significant steps only: the gaps are the other job's. Beside
them stands twice the time of one training alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import command, harness, time_to_accuracy, together, workloads
from benchmarks.harness import Cell, Outcome
from benchmarks.peers import Settings, System
from benchmarks.sites import Emulated, Site, site
from benchmarks.testbed import TestbedError, missing
from benchmarks.time_to_accuracy import Curve, curve
from benchmarks.workloads import Workload
from crossover import telemetry
from crossover.telemetry.style import GRID, STYLE

MODULE = "benchmarks.comparison"
PLAIN, SELDOM = "crossover", "crossover_both_seldom_fp16"
LABELS = {
    PLAIN: ("plain", "every step shared, as DDP does", "#444444"),
    "crossover_deft": ("DeFT", "gradients travel under the next steps", "#e69f00"),
    "crossover_selsync": ("SelSync", "only significant steps shared", "#0072b2"),
    "crossover_both": ("SelSync + DeFT", "what is shared travels under the next steps", "#009e73"),
    "crossover_both_fp16": ("SelSync + DeFT, fp16", "the same, each average in half as many bytes", "#cc79a7"),
    SELDOM: ("SelSync at 0.3 + DeFT, fp16", "the same for significant steps only, which leaves gaps", "#56b4e9"),
}
PAIRS = {PLAIN: "plain, taking turns", SELDOM: "SelSync at 0.3 + DeFT, fp16, taking turns"}


@dataclass(frozen=True)
class Pair:
    """Two trainings at the same time: seconds until both are done, and their final accuracies."""

    seconds: float
    accuracies: tuple[float, ...]


# -- on the ranks ------------------------------------------------------------------------------------------------------


def measure(system: System, workload: Workload, settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """Train as ``time_to_accuracy`` does, and count what was sent. Collective."""
    together.meet(task, "start")
    recorder = telemetry.start()
    try:
        trained = time_to_accuracy.train(system, workload, settings, task)
        sent = recorder.summary().bytes_sent
    finally:
        telemetry.stop()
    together.meet(task, "end")
    return {**time_to_accuracy.evaluated(workload, trained), "bytes": sent}


# -- what is measured --------------------------------------------------------------------------------------------------


def run(place: Site, options: argparse.Namespace) -> tuple[Outcome, dict[str, Pair]]:
    """Measure all methods, one after the other, then the pairs."""
    [cell] = harness.make_cells(place, [options.workload], [options.cr], options.batch_size)
    task = {"every": options.every, "longer": 1.0, "tune": False, "batch_size": options.batch_size}
    [outcome] = harness.in_turn(place, MODULE, [cell], list(LABELS), 1, lambda _: options.steps, task)
    if outcome.refused is not None:
        return outcome, {}
    if isinstance(place, Emulated):
        harness.say("two jobs at once need the testbed: an emulated link is not shared between jobs")
        return outcome, {}
    alone = {**task, "workload": cell.workload, "steps": options.steps, "every": options.steps, "choices": {}}
    return outcome, {name: pair(place, name, alone) for name in PAIRS if outcome.systems[name].ran}


def pair(place: Site, system: str, task: dict[str, Any]) -> Pair:
    """Two jobs of a system with turns, begun together, evaluated at their ends."""
    harness.say(f"two jobs, {PAIRS[system]}")
    curves = [curve(ranks) for ranks in together.run(place, MODULE, system, task, range(2), 600.0)]
    return Pair(max(points.seconds[-1] for points in curves), tuple(points.accuracies[-1] for points in curves))


def curves_of(outcome: Outcome) -> dict[str, tuple[Curve, dict[str, Any]]]:
    """Each method's curve, and rank 0's other answers."""
    ran = {name: measured.runs[0] for name, measured in outcome.systems.items() if measured.ran}
    return {name: (curve(ranks), ranks[0]) for name, ranks in ran.items()}


# -- what is shown -----------------------------------------------------------------------------------------------------


def show(outcome: Outcome, pairs: dict[str, Pair], console: Console) -> None:
    """Print the tables."""
    cell, curves = outcome.cell, curves_of(outcome)
    plain = curves[PLAIN][0]
    console.print(table_of_methods(cell, outcome.place, curves))
    for name in curves:
        console.print(f"{LABELS[name][0]}: {LABELS[name][1]}", style="dim")
    for name, measured in outcome.systems.items():
        if not measured.ran:
            console.print(f"{LABELS[name][0]} could not run: {measured.reason}")
    console.print(f"Computing alone, without any communication: {cell.compute.step_s * plain.steps:.1f} s.\n")
    if pairs:
        console.print(table_of_pairs(2 * plain.seconds[-1], plain.accuracies[-1], pairs))


def table_of_methods(cell: Cell, place: str, curves: dict[str, tuple[Curve, dict[str, Any]]]) -> Table:
    """Time, accuracy, bytes and updates of one training."""
    plain = curves[PLAIN][0]
    target = plain.accuracies[-1]
    base = plain.time_to(target) or plain.seconds[-1]
    table = Table(title=f"One training: {cell.workload} on {place}; all-reduce = {cell.cr:g} x computing")
    for column in ("method", f"time to {target:.1%}", "speed-up", "all steps", "speed-up", "accuracy", "sent"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, (points, answer) in curves.items():
        label = LABELS[name][0]
        reached = points.time_to(target)
        table.add_row(
            label,
            "not reached" if reached is None else f"{reached:.1f} s",
            "" if reached is None else f"{base / reached:.1f} x",
            f"{points.seconds[-1]:.1f} s",
            f"{plain.seconds[-1] / points.seconds[-1]:.1f} x",
            f"{points.accuracies[-1]:.1%}",
            f"{answer['bytes'] / 1e6:.0f} MB",
        )
    return table


def table_of_pairs(serial: float, accuracy: float, pairs: dict[str, Pair]) -> Table:
    """Two trainings, beside the plain ones one after the other."""
    table = Table(title="Two trainings on the same hosts")
    for column in ("way", "both done", "speed-up", "accuracies"):
        table.add_column(column, justify="left" if column == "way" else "right")
    table.add_row("plain, one after the other", f"{serial:.1f} s", "1.0 x", f"{accuracy:.1%}")
    for name, found in pairs.items():
        accuracies = ", ".join(f"{value:.1%}" for value in found.accuracies)
        table.add_row(PAIRS[name], f"{found.seconds:.1f} s", f"{serial / found.seconds:.1f} x", accuracies)
    return table


def draw(outcome: Outcome, pairs: dict[str, Pair], path: Path) -> None:
    """Accuracy against time, one line a method; beside it the time that two trainings take."""
    import matplotlib
    from matplotlib.figure import Figure

    curves = curves_of(outcome)
    plain = curves[PLAIN][0]
    with matplotlib.rc_context({**STYLE, **GRID}):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        for name, (points, _) in curves.items():
            label, _, colour = LABELS[name]
            accuracies = [100 * value for value in points.accuracies]
            left.plot(points.seconds, accuracies, color=colour, marker=".", label=label)
        left.axhline(100 * plain.accuracies[-1], color="#999999", linewidth=0.8, linestyle=":")
        left.set(xlabel="seconds of training", ylabel="% of held-out images", title="One training, same slow link")
        left.legend(loc="lower right")
        bars = [(f"2 x {LABELS[name][0]}", 2 * points.seconds[-1], LABELS[name][2])
                for name, (points, _) in curves.items()]  # fmt: skip
        wrapped = {name: PAIRS[name].replace(", taking", ",\ntaking") for name in pairs}
        bars += [(wrapped[name], found.seconds, LABELS[name][2]) for name, found in pairs.items()]
        drawn = right.barh([label for label, *_ in bars], [s for _, s, _ in bars], color=[c for *_, c in bars])
        right.bar_label(drawn, fmt="%.0f s", padding=3, fontsize=8.5)
        right.invert_yaxis()
        right.grid(axis="y", visible=False)
        right.margins(x=0.15)
        right.set(xlabel="seconds until both are done", title="Two trainings")
        figure.supxlabel(f"{outcome.cell}; {outcome.place}", fontsize="x-small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


# -- the command -------------------------------------------------------------------------------------------------------


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--cr", type=float, default=3.0, help="all-reduce time of a step / its computing (%(default)s)")
    parser.add_argument("--workload", choices=workloads.names(), default="vgg", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="examples a rank and step (%(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="of training (%(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations (%(default)s)")
    parser.add_argument("--emulated", action="store_true", help="the emulated link, also where the testbed could run")
    parser.add_argument("--out", type=Path, default=Path("out/comparison"), help="for the picture (%(default)s)")
    options = parser.parse_args(words)
    if options.steps < options.every or options.steps % options.every or options.every < 4:
        parser.error("--steps: has to be a multiple of --every, which has to be 4 or more")
    if not options.cr > 0:
        parser.error(f"--cr: is {options.cr}; it has to be above 0")
    return options


def compare(options: argparse.Namespace, console: Console) -> tuple[Outcome, dict[str, Pair]]:
    """Measure on the testbed, or where it is not to be had on the emulated link."""
    reason = "" if options.emulated else "; ".join(missing())
    try:
        with site(2, options.emulated or bool(reason)) as place:
            if reason:
                console.print(f"No testbed here ({reason}): taking the emulated link.")
            return run(place, options)
    except TestbedError as error:
        console.print(f"No testbed here ({error}): taking the emulated link.")
    with site(2, emulated=True) as place:
        return run(place, options)


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        harness.work(options.worker, measure)
        return 0
    console = Console()

    def question() -> int:
        outcome, pairs = compare(options, console)
        if outcome.refused is not None or not outcome.systems[PLAIN].ran:
            console.print(f"Not measured: {outcome.refused or outcome.systems[PLAIN].reason}")
            return command.OFF
        show(outcome, pairs, console)
        draw(outcome, pairs, options.out / "comparison.png")
        console.print(f"picture: {options.out / 'comparison.png'}")
        return 0

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
