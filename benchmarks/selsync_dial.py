"""Is SelSync's threshold a dial? Share of local steps (LSSR) and final accuracy against delta, for 2, 4 and 8 ranks.

    python -m benchmarks.selsync_dial [--workload vgg] [--ranks 2,4,8] [--deltas 0,0.1,0.2,0.4,inf] [--seeds 1]
                                      [--quick] [--save]

All ranks are real processes on loopback; 4 and 8 of them share the cores where there are fewer. Every delta trains the
same model from the same parameters on the same batches, one training for each seed. LSSR counts every step, so that it
cannot pass 1 less the share of the warm-up. Rules other than the threshold are off (``lr_drop=None``). Accuracy is that
of the average of all ranks' parameters at the end. A larger delta has to give at least as many local steps, mean over
the seeds: where it does not, the table says by how much.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import crossover as xo
from benchmarks import local_steps, notes, peers, workloads
from benchmarks.command import names_of
from benchmarks.local_steps import COLOURS, Answer, mean, with_spread
from crossover.selsync import SelSync

MODULE = "benchmarks.selsync_dial"
DELTAS = (0.0, 0.1, 0.2, 0.4, math.inf)
Curves = dict[int, dict[float, list[Answer]]]
"""By number of ranks and delta, an answer for each seed."""


def gate_of(model: nn.Module, delta: float, warmup: int) -> SelSync:
    """The threshold alone decides once the warm-up is over."""
    return SelSync(delta, warmup_steps=warmup, buffers=model, lr_drop=None)


def measure(task: dict[str, Any]) -> dict[str, Answer]:
    """One training for each delta. Collective."""
    workload = workloads.get(task["workload"], task["batch_size"], task["seed"])
    rank, size = xo.rank(), xo.size()
    answers = {}
    for delta in task["deltas"]:
        make_gate = partial(gate_of, delta=float(delta), warmup=task["warmup"])
        answers[delta] = local_steps.train(
            workload, make_gate, task["steps"], lambda step: workload.batch(rank, step, size)
        )
        peers.tuning.clean_up()
    return answers


def collect(options: argparse.Namespace) -> Curves:
    """Seeds are the outermost loop, so that a run that is broken off has whole curves."""
    curves: Curves = {size: {delta: [] for delta in options.deltas} for size in options.ranks}
    for seed, size in itertools.product(range(options.seeds), options.ranks):
        task = {
            "workload": options.workload,
            "batch_size": options.batch_size,
            "steps": options.steps,
            "warmup": options.warmup,
            "seed": seed,
            "deltas": [str(delta) for delta in options.deltas],
        }
        first, *_ = local_steps.ask(MODULE, task, size)
        for delta, answer in first.items():
            curves[size][float(delta)].append(answer)
    return curves


def largest_fall(values: Sequence[float]) -> float:
    """By how much a value is below the one before at most; 0 for a sequence that never falls."""
    return (
        max((before - after for before, after in itertools.pairwise(values)), default=0.0) if len(values) > 1 else 0.0
    )


def lssr_by_delta(by_delta: dict[float, list[Answer]]) -> list[float]:
    """Mean over the seeds, for rising delta."""
    return [mean(by_delta[delta], "lssr") for delta in sorted(by_delta)]


def rows(curves: Curves) -> list[list[str]]:
    """A row for each delta: LSSR and accuracy for each number of ranks."""
    deltas = sorted(next(iter(curves.values())))
    return [
        [
            f"{delta:g}",
            *(f"{mean(curves[size][delta], 'lssr'):.3f}" for size in curves),
            *(with_spread(curves[size][delta], "accuracy") for size in curves),
        ]
        for delta in deltas
    ]


def verdict(curves: Curves) -> str:
    """Whether each curve rises all along."""
    lines = []
    for size, by_delta in curves.items():
        fall = largest_fall(lssr_by_delta(by_delta))
        found = "monotone" if fall <= 0 else f"NOT monotone: falls by {fall:.3f} at most"
        lines.append(f"- {size} ranks: LSSR against delta is {found}")
    return "\n".join(lines)


def draw(curves: Curves, warmup_share: float, title: str, path: Path) -> None:
    """LSSR and accuracy against delta, a line for each number of ranks."""
    with local_steps.picture(path, title, 2) as (left, right):
        deltas = sorted(next(iter(curves.values())))
        places = range(len(deltas))
        for (size, by_delta), colour in zip(curves.items(), COLOURS, strict=False):
            accuracies = [100 * mean(by_delta[delta], "accuracy") for delta in deltas]
            left.plot(places, lssr_by_delta(by_delta), color=colour, marker="o", label=f"{size} ranks")
            right.plot(places, accuracies, color=colour, marker="o", label=f"{size} ranks")
        left.axhline(1 - warmup_share, color="#888888", linestyle=":", label="all but the warm-up")
        left.set(title="Share of local steps", ylabel="LSSR", ylim=(-0.03, 1.03))
        right.set(title="Accuracy of the average at the end", ylabel="% of the test set")
        for axes in (left, right):
            axes.set_xticks(places, [f"{delta:g}" for delta in deltas])
            axes.set_xlabel("delta")
        left.legend(loc="lower right")
        right.legend(loc="lower left")


def deltas_of(text: str) -> list[float]:
    """For argparse: thresholds with commas between them, sorted; ``inf`` is one."""
    try:
        values = sorted({float(word) for word in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(value >= 0 for value in values):
        raise argparse.ArgumentTypeError(f"got {text!r}; give numbers of 0 or more with commas, like 0,0.3,inf")
    return values


def ranks_of(text: str) -> list[int]:
    """For argparse: numbers of ranks with commas between them, the smallest first."""
    if not all(word.strip().isdigit() and int(word) >= 2 for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}; give numbers of 2 or more with commas between them")
    return sorted({int(word) for word in text.split(",")})


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = local_steps.parser(__doc__, seeds=1)
    parser.add_argument("--workload", type=names_of(workloads.names()), default=["vgg"], help="one (vgg)")
    parser.add_argument("--ranks", type=ranks_of, help="numbers of ranks, with commas (2,4,8; 2,4 with --quick)")
    parser.add_argument("--deltas", type=deltas_of, help="thresholds, with commas (0 to inf)")
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank (%(default)s)")
    parser.add_argument("--steps", type=int, help="of training (80; 24 with --quick)")
    options = parser.parse_args(words)
    options.workload = options.workload[0]
    options.ranks = options.ranks or ([2, 4] if options.quick else [2, 4, 8])
    options.deltas = options.deltas or ([0.0, 0.2, math.inf] if options.quick else list(DELTAS))
    options.steps = options.steps or (24 if options.quick else 80)
    options.seeds = 1 if options.quick else options.seeds
    options.warmup = min(25, max(2, options.steps // 8))
    if options.steps < 8 or options.seeds < 1 or options.batch_size < 1:
        parser.error("--steps has to be at least 8, --seeds and --batch-size at least 1")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        local_steps.work(options.worker, measure)
        return 0
    curves = collect(options)
    header = ["delta", *(f"LSSR, {n} ranks" for n in curves), *(f"accuracy, {n} ranks" for n in curves)]
    facts = (
        f"{options.workload}, {options.batch_size} examples a rank and step, {options.steps} steps, {options.warmup} "
        f"of them warm-up, {options.seeds} seeds; {local_steps.place(options.ranks)}"
    )
    sections = [facts, notes.table(header, rows(curves)), verdict(curves)]
    print("\n\n".join(sections))
    if options.save:
        title = "SelSync: share of local steps against delta"
        data = [
            {"ranks": size, "delta": str(delta), "seeds": answers}
            for size, by_delta in curves.items()
            for delta, answers in by_delta.items()
        ]
        picture = partial(draw, curves, (options.warmup - 1) / options.steps, title)
        local_steps.save("selsync-dial", title, sections, data, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
