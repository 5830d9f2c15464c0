"""How do the systems' steps grow with the number of hosts?

    python -m benchmarks.scaling [--hosts 2,3,4] [--cr 1] [--workloads resnet,vgg] [--systems ddp,crossover]
                                 [--quick] [--save]

As ``step_time.py``, once for each number of hosts. The coverage rate is kept, not the link rate: with more hosts than
cores each host computes on an equal share of a core, its computing is measured under that share, and the links are set
to match. ``computing / step`` is the part of a step that is not exposed communication.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from benchmarks import command, figures, notes, peers, step_time
from benchmarks.figures import milliseconds
from benchmarks.harness import BASE, CEILING, Outcome


def columns(outcome: Outcome, name: str) -> list[str]:
    """Step, ratio to DDP and share of computing of one system at one number of hosts."""
    if outcome.refused is not None or not outcome.systems[name].ran:
        return ["-"] * 3
    own = step_time.seconds(outcome.systems[name])
    base, alone = outcome.systems[BASE], outcome.systems[CEILING]
    ratio = f"{figures.median_ratio(own, step_time.seconds(base)):.3f}" if base.ran else "-"
    step = statistics.median(own)
    share = f"{statistics.median(step_time.seconds(alone)) / step:.2f}" if alone.ran else "-"
    return [milliseconds(step), ratio, share]


def overview(outcomes: Sequence[Outcome]) -> str:
    """All systems against the numbers of hosts, for one workload and coverage rate."""
    cell = outcomes[0].cell
    header = ["system"]
    for outcome in outcomes:
        hosts = outcome.cell.hosts
        header += [f"{hosts} hosts: step, ms", "x DDP", "computing / step"]
    made = [
        [peers.get(name).label, *(text for outcome in outcomes for text in columns(outcome, name))]
        for name in outcomes[0].systems
    ]
    places = "\n".join(f"- {outcome.sentence or outcome.refused}" for outcome in outcomes)
    head = f"### {cell.workload}, coverage rate {cell.cr:g}, by number of hosts"
    return "\n\n".join([head, places, notes.table(header, made)])


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = step_time.options_of(words, __doc__ or "", (["resnet", "vgg"], "1", 3), ", with commas (2,3,4)")

    def question() -> int:
        outcomes = step_time.everywhere(options, options.hosts or ([2, 4] if options.quick else [2, 3, 4]))
        alike: dict[tuple[str, float], list[Outcome]] = {(o.cell.workload, o.cell.cr): [] for o in outcomes}
        for outcome in outcomes:
            alike[outcome.cell.workload, outcome.cell.cr].append(outcome)
        sections = [overview(group) for group in alike.values()]
        sections += [step_time.section(outcome, options) for outcome in outcomes]
        command.conclude(options, "scaling", "Step time by number of hosts", sections, figures.as_data(outcomes))
        return command.exit_code(outcomes)

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
