"""Does a second, slower link between the same hosts let DeFT update more often?

    python -m benchmarks.two_links [--rate 500mbit] [--second-rate 300mbit] [--workload mlp] [--batch-size 256]
                                   [--repeats 2] [--quick] [--save]

Two hosts on the testbed with two links each. DeFT trains the same model over the first one, and over both, in turn,
with the Preserver off: the plan hides all communication, and merges as many steps into an update as that takes. At
500 Mbit/s the MLP's all-reduce takes about twice its computing. Counted after the warm-up: updates in a step, and a
step's time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import crossover as xo
from benchmarks import command, loopback, notes, workloads
from benchmarks.figures import milliseconds, slowest
from benchmarks.harness import say
from benchmarks.peers import Training
from benchmarks.peers.ours import last_plan
from benchmarks.peers.tuning import timed_steps
from benchmarks.sites import Bed
from benchmarks.testbed import Testbed
from crossover.deft import DeFT

MODULE = "benchmarks.two_links"
WARM_UP_STEPS, STEPS, TIMEOUT_S = 24, 24, 400.0
LABELS = {False: "one link", True: "two links"}
HEADER = ["links", "step, ms", "lowest to highest", "updates a step", "updates a second", "decided"]


def work(text: str) -> None:
    """One rank: train, and report the seconds of each step and the updates."""
    task = json.loads(text)
    torch.set_num_threads(1)
    xo.init()
    workload = workloads.get(task["workload"], task["batch_size"], task["seed"])
    workload.training_set()
    model = workload.model()
    schedule = DeFT(
        warmup_steps=8,
        profile_steps=4,
        ramp_updates=2,
        capacity=(1, 1),
        second_link="auto" if task["second"] else None,
    )
    optimizer: Any = xo.DistributedOptimizer(
        workload.optimizer(model.parameters()), model.named_parameters(), schedule=schedule
    )
    training = Training(model, optimizer, optimizer, workload.loss, optimizer.flush)
    timed_steps(training, workload, WARM_UP_STEPS, 0)
    before = schedule.updates
    marks = timed_steps(training, workload, 0, STEPS)
    updates = schedule.updates - before
    training.finish()
    seconds = [end - begin for begin, end in itertools.pairwise(marks)]
    loopback.report({"seconds": seconds, "updates": updates, "plan": last_plan(schedule.decisions)})
    xo.barrier()
    xo.shutdown()


def measured(options: argparse.Namespace) -> tuple[dict[bool, list[list[dict[str, Any]]]], str]:
    """The ranks' answers by number of links and repeat, and where they ran."""
    found: dict[bool, list[list[dict[str, Any]]]] = {False: [], True: []}
    with Testbed(2, options.rate, options.second_rate) as testbed:
        place = Bed(testbed)
        for repeat in range(options.repeats):
            for second in (False, True) if repeat % 2 == 0 else (True, False):
                task = {"workload": options.workload, "batch_size": options.batch_size, "seed": repeat}
                words = ["--worker", json.dumps({**task, "second": second})]
                found[second].append(place.run(MODULE, words, "torchrun", TIMEOUT_S))
                say(f"repeat {repeat + 1}/{options.repeats}: {LABELS[second]}")
        return found, f"{place.place()}; links of {options.rate} and {options.second_rate} on each host"


def row(second: bool, runs: Sequence[list[dict[str, Any]]]) -> list[str]:
    """One line: with one link or two."""
    steps = [statistics.fmean(slowest([rank["seconds"] for rank in ranks])) for ranks in runs]
    updates = statistics.fmean(ranks[0]["updates"] for ranks in runs) / STEPS
    step = statistics.median(steps)
    return [
        LABELS[second],
        milliseconds(step),
        f"{milliseconds(min(steps))} to {milliseconds(max(steps))}",
        f"{updates:.2f}",
        f"{updates / step:.2f}",
        runs[0][0]["plan"],
    ]


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rate", default="500mbit", help="of the first link (%(default)s)")
    parser.add_argument("--second-rate", default="300mbit", help="of the second one (%(default)s)")
    parser.add_argument("--workload", choices=workloads.names(), default="mlp", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="examples a rank and step (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="fresh processes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a look: once")
    parser.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    options = parser.parse_args(words)
    options.repeats = 1 if options.quick else options.repeats
    if options.repeats < 1 or options.batch_size < 1:
        parser.error("--repeats, --batch-size: give at least 1")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        work(options.worker)
        return 0
    return command.carry_out(partial(question, options))


def question(options: argparse.Namespace) -> int:
    """Measure, and show."""
    found, place = measured(options)
    table = notes.table(HEADER, [row(second, runs) for second, runs in found.items()])
    once, twice = (statistics.fmean(ranks[0]["updates"] for ranks in found[second]) for second in (False, True))
    verdict = f"With two links there are {twice / once:.2f} times as many updates in as many steps."
    sections = [f"{place}. {options.repeats} runs of {STEPS} steps.", table, verdict]
    data = {LABELS[second]: runs for second, runs in found.items()}
    print("\n\n".join(sections))
    if options.save:
        print(notes.save("two-links", "One link and two", sections, data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
