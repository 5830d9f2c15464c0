"""The same training on real data with each of Crossover's methods, over a slow link: one table and one picture.

    python -m benchmarks.comparison [--cr 4] [--workload vgg] [--steps 120] [--emulated] [--out out/comparison]

Two hosts whose link is slowed until a step's all-reduce takes ``--cr`` times its computing: network namespaces where
there are root and iproute2, else Crossover's emulated link; the table says which. Accuracy is on held-out digits. The
target is what plain training, which equals DDP, ends with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness, peers, time_to_accuracy, workloads
from benchmarks.harness import Cell, Outcome
from benchmarks.peers import Settings, System
from benchmarks.sites import Site, site
from benchmarks.testbed import TestbedError, missing
from benchmarks.time_to_accuracy import Curve, curve
from benchmarks.workloads import Workload
from crossover import telemetry

MODULE = "benchmarks.comparison"
PLAIN = "crossover"
LABELS = {
    "crossover": ("plain", "every step shared, as DDP does", "#444444"),
    "crossover_deft": ("DeFT", "gradients travel under the next steps", "#e69f00"),
    "crossover_selsync": ("SelSync", "only significant steps shared", "#0072b2"),
    "crossover_both": ("SelSync + DeFT", "what is shared travels under the next steps", "#009e73"),
}


def measure(system: System, workload: Workload, settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """Train as ``time_to_accuracy`` does, and count what was sent. Collective."""
    recorder = telemetry.start()
    try:
        answer = time_to_accuracy.measure(system, workload, settings, task)
        return {**answer, "bytes": recorder.summary().bytes_sent}
    finally:
        telemetry.stop()


def run(place: Site, options: argparse.Namespace) -> Outcome:
    """Measure all methods, one after the other."""
    [cell] = harness.make_cells(place, [options.workload], [options.cr])
    systems = [name for name in LABELS if name in peers.names()]
    task = {"every": options.every, "tune": False}
    [outcome] = harness.in_turn(place, MODULE, [cell], systems, 1, lambda _: options.steps, task)
    return outcome


def curves_of(outcome: Outcome) -> dict[str, tuple[Curve, dict[str, Any]]]:
    """Each method's curve, and rank 0's other answers."""
    ran = {name: measured.runs[0] for name, measured in outcome.systems.items() if measured.ran}
    return {name: (curve(ranks), ranks[0]) for name, ranks in ran.items()}


def show(outcome: Outcome, cell: Cell, steps: int, console: Console) -> None:
    """Print the table."""
    curves = curves_of(outcome)
    plain = curves[PLAIN][0]
    target = plain.accuracies[-1]
    base = plain.time_to(target) or plain.seconds[-1]
    table = Table(title=f"{cell.workload} on {outcome.place}: all-reduce = {cell.cr:g} x computing")
    for column in ("method", f"time to {target:.1%}", "speed-up", "all steps", "final accuracy", "sent"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, (points, answer) in curves.items():
        label, meaning, _ = LABELS[name]
        reached = points.time_to(target)
        table.add_row(
            f"{label}: {meaning}",
            "not reached" if reached is None else f"{reached:.1f} s",
            "" if reached is None else f"{base / reached:.1f} x",
            f"{points.seconds[-1]:.1f} s",
            f"{points.accuracies[-1]:.1%}",
            f"{answer['bytes'] / 1e6:.0f} MB",
        )
    console.print(table)
    for name, measured in outcome.systems.items():
        if not measured.ran:
            console.print(f"{LABELS[name][0]} could not run: {measured.reason}")
    console.print(
        f"Computing alone, without any communication, takes {cell.compute.step_s * steps:.1f} s for all steps."
    )


def draw(outcome: Outcome, cell: Cell, path: Path) -> None:
    """Accuracy against time, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = curves_of(outcome)
    target = curves[PLAIN][0].accuracies[-1]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, (points, _) in curves.items():
        label, _, colour = LABELS[name]
        axes.plot(points.seconds, [100 * value for value in points.accuracies], color=colour, marker=".", label=label)
    axes.axhline(100 * target, color="#999999", linewidth=0.8, linestyle=":")
    axes.set(xlabel="seconds of training", ylabel="% of held-out images", title="Same training, same slow link")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.supxlabel(f"{cell}; {outcome.place}", fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--cr", type=float, default=4.0, help="all-reduce time of a step / its computing (%(default)s)")
    parser.add_argument("--workload", choices=workloads.names(), default="vgg", help="(%(default)s)")
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


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        harness.work(options.worker, measure)
        return 0
    console = Console()
    emulated = options.emulated or bool(missing())
    if emulated and not options.emulated:
        console.print(f"No testbed here ({'; '.join(missing())}): taking the emulated link.")
    try:
        with site(2, emulated) as place:
            outcome = run(place, options)
    except TestbedError as error:
        console.print(f"No testbed here ({error}): taking the emulated link.")
        with site(2, emulated=True) as place:
            outcome = run(place, options)
    if outcome.refused is not None:
        console.print(f"Not measured: {outcome.refused}")
        return 3
    show(outcome, outcome.cell, options.steps, console)
    draw(outcome, outcome.cell, options.out / "comparison.png")
    console.print(f"picture: {options.out / 'comparison.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
