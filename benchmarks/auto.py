"""Does ``schedule="auto"`` find the fastest of what it may choose from, at each coverage rate?

    python -m benchmarks.auto [--cr 0.3,1,2,4] [--workloads resnet,vgg,gpt,mlp] [--hosts 2] [--quick] [--save]

The same steps as in ``benchmarks.step_time``, for the plain schedule, DeFT and auto, after so many steps that all have
decided, with enough of them to know the gradient noise scale. A step is the median over the repeats. ``x best`` is
auto's step over that of the faster fixed one, ``x plain`` over plain's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks import command, figures, harness, notes
from benchmarks.figures import milliseconds
from benchmarks.harness import CEILING, Outcome
from benchmarks.peers import Settings, System, tuning
from benchmarks.sites import site
from benchmarks.step_time import WINDOW, options_of, seconds, steps_for
from benchmarks.workloads import Workload

MODULE = "benchmarks.auto"
HORIZON = 400
WARM_UP_STEPS = 60
"""Auto has chosen after 25 plain steps and a trial of 8, DeFT after 25 and again after 50."""
FIXED, AUTO = ("crossover", "crossover_deft"), "crossover_auto"
HEADER = ["workload", "CR", "plain, ms", "DeFT, ms", "auto, ms", "x best", "x plain", "auto chose"]


def measure(system: System, workload: Workload, settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """This rank's seconds a step in each window of steps. Collective."""
    training = system.prepare(workload.model(), workload.optimizer, workload, HORIZON, **settings)
    marks = tuning.timed_steps(training, workload, WARM_UP_STEPS, task["steps"])[::WINDOW]
    training.finish()
    return {"windows": [(end - begin) / WINDOW for begin, end in itertools.pairwise(marks)], "facts": training.facts}


def row(outcome: Outcome) -> list[str]:
    """One cell."""
    cell = [outcome.cell.workload, f"{outcome.cell.cr:g}"]
    wanted = [*FIXED, AUTO]
    if outcome.refused is not None or not all(outcome.systems[name].ran for name in wanted):
        return [*cell, *[""] * (len(HEADER) - 3), "not measured"]
    times = {name: seconds(outcome.systems[name]) for name in wanted}
    best = min(FIXED, key=lambda name: statistics.median(times[name]))
    chose = ", ".join(dict.fromkeys(ranks[0]["facts"]["choice"] for ranks in outcome.systems[AUTO].runs))
    return [
        *cell,
        *(milliseconds(statistics.median(times[name])) for name in wanted),
        f"{figures.median_ratio(times[AUTO], times[best]):.3f}",
        f"{figures.median_ratio(times[AUTO], times[FIXED[0]]):.3f}",
        chose,
    ]


def measured(options: argparse.Namespace) -> list[Outcome]:
    """All cells with each number of hosts."""
    outcomes = []
    for hosts in options.hosts or [2]:
        with site(hosts, options.emulated) as place:
            cells = harness.make_cells(place, options.workloads, options.cr)
            systems, steps = [CEILING, *FIXED, AUTO], partial(steps_for, options)
            outcomes += harness.in_turn(place, MODULE, cells, systems, options.repeats, steps, {"tune": False})
    return outcomes


def sections(outcomes: Sequence[Outcome]) -> list[str]:
    """The table, and beneath it what each cell was measured on and how auto decided."""
    table = notes.table(HEADER, [row(outcome) for outcome in outcomes])
    details = [f"### {outcome.cell}\n\n{outcome.refused or figures.facts(outcome)}" for outcome in outcomes]
    return [table, *(f"{d}\n\n{figures.choices(o.systems)}" for d, o in zip(details, outcomes, strict=True))]


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words, __doc__ or "", (["resnet", "vgg", "gpt", "mlp"], "0.3,1,2,4", 3))
    if options.worker:
        harness.work(options.worker, measure)
        return 0

    def question() -> int:
        outcomes = measured(options)
        command.conclude(options, "auto", "Auto beside fixed schedules", sections(outcomes), figures.as_data(outcomes))
        return command.exit_code(outcomes)

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
