"""How near does training over a slow link come to DDP on a link without limit?

    python -m benchmarks.moonshot [--cr 1,2,4,8] [--workloads resnet,vgg,gpt] [--repeats 3] [--longer 1.25]
                                  [--systems crossover_fp16,crossover_both_fp16] [--quick] [--save]

DDP trains between hosts whose links nobody slows: what it takes is computing and the work of the collectives
themselves. Its final accuracy, mean over the seeds, is the target, and its time to there the measure. Then each system
trains over links that give the coverage rate, as in ``benchmarks.time_to_accuracy``: systems that are not exact for
``--longer`` times the steps. ``x DDP, open link`` is time to target over DDP's: 1 is a network that costs nothing.
DDP trains first and the others after it, so drift of the machine is in the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import command, figures, harness, notes, peers, time_to_accuracy
from benchmarks.harness import BASE, Measured, Outcome, say
from benchmarks.sites import Bed, Site, site
from benchmarks.testbed import Testbed
from benchmarks.time_to_accuracy import Curve, curves_of, mean_curve, measure, row, steps_for, task_of, training_options

MODULE = "benchmarks.moonshot"
OPEN_RATE = "10gbit"
"""More than two pinned cores can send: the shaper never holds anything back."""
SYSTEMS = ("crossover_fp16", "crossover_deft_fp16", "crossover_selsync_fp16", "crossover_both_fp16")
HEADER = ["CR", *(name.replace("x DDP", "x DDP, open link") for name in time_to_accuracy.HEADER)]


def open_link(options: argparse.Namespace) -> dict[str, Measured]:
    """DDP on links that are as fast as they go, for each workload."""
    found = {}
    with Testbed(2, OPEN_RATE, check_bandwidth=False) as testbed:
        place = Bed(testbed)
        for name in options.workloads:
            found[name] = Measured()
            for seed in range(options.repeats):
                task = {**untuned(options), "workload": name, "steps": steps_for(options, name), "seed": seed}
                found[name].add(train(place, task))
                say(f"open link, seed {seed}: {name} in {curves_of(found[name])[-1].seconds[-1]:.1f} s")
    return found


def train(place: Site, task: dict[str, Any]) -> list[dict[str, Any]]:
    """One training with DDP as it comes; each rank's answer."""
    words = ["--worker", json.dumps({**task, "systems": [BASE], "choices": {}})]
    return [rank[BASE] for rank in place.run(MODULE, words, peers.get(BASE).launcher, 600.0)]


def untuned(options: argparse.Namespace) -> dict[str, Any]:
    """What ranks are told: all systems as they come, without a search."""
    return {**task_of(options), "tune": False}


def slowed(options: argparse.Namespace) -> list[Outcome]:
    """All systems at all coverage rates."""
    with site(2, emulated=False) as place:
        cells = harness.make_cells(place, options.workloads, options.cr, options.batch_size)
        task = untuned(options)
        return harness.in_turn(
            place,
            MODULE,
            cells,
            options.systems,
            options.repeats,
            lambda cell: steps_for(options, cell.workload),
            task,
        )


def sections(opened: dict[str, Measured], outcomes: Sequence[Outcome]) -> list[str]:
    """A table for each workload, and beneath them what each cell was measured on."""
    tables = [f"### {name}\n\n{table(curves_of(base), outcomes, name)}" for name, base in opened.items()]
    details = [f"### {o.cell}\n\n{o.refused or figures.facts(o)}\n\n{figures.choices(o.systems)}" for o in outcomes]
    return [*tables, *details]


def table(base: Sequence[Curve], outcomes: Sequence[Outcome], workload: str) -> str:
    """One workload: DDP on the open link, and every system at every coverage rate."""
    mean = mean_curve(base)
    target = mean.accuracies[-1]
    base_s = mean.time_to(target)
    assert base_s is not None, "the curve ends at the target"
    line = partial(row, target=target, base_s=base_s)
    cells_here = [outcome for outcome in outcomes if outcome.cell.workload == workload and not outcome.refused]
    alone_s = cells_here[0].cell.compute.step_s if cells_here else mean.seconds[-1] / mean.steps
    lines = [["-", *line("DDP, open link", base, compute_s=alone_s)]]
    for outcome in cells_here:
        compute_s = outcome.cell.compute.step_s
        for name, measured in outcome.systems.items():
            label = peers.get(name).label
            cells = line(label, curves_of(measured), compute_s=compute_s) if measured.ran else [label, "cannot run"]
            lines.append([f"{outcome.cell.cr:g}", *cells, *[""] * (len(HEADER) - 1 - len(cells))])
    return notes.table(HEADER, lines)


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = command.parser(__doc__ or "", ["resnet", "vgg", "gpt"], "1,2,4,8", 3)
    parser.set_defaults(systems=list(SYSTEMS))
    options = training_options(parser, words, longer=1.25)
    options.systems = [name for name in options.systems if name != BASE]
    if not options.systems:
        parser.error("--systems: give others than ddp, which is measured on the open link")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.script(options_of(words), measure, question)


def question(options: argparse.Namespace) -> int:
    """Measure, and show."""
    opened = open_link(options)
    outcomes = slowed(options)
    data = {"open": {k: dataclasses.asdict(v) for k, v in opened.items()}, "slowed": figures.as_data(outcomes)}
    command.conclude(options, "moonshot", "Slow links beside a link without limit", sections(opened, outcomes), data)
    return command.exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
