"""What does a local step of SelSync cost? Significance and vote, and the whole step beside the bare optimizer's.

    python -m benchmarks.selsync_cost [--workloads mlp resnet] [--quick] [--save]
    .venv-imagenet/bin/python -m benchmarks.selsync_cost --workloads resnet50      the published shapes, by torchvision

Two ranks on loopback, one a core. The same step, without any sharing, with the bare optimizer, with local SGD (neither
statistic nor vote), with votes alone, and with SelSync, whose threshold is so high that no step is shared, as it comes
and looking at every fourth step only. They take turns in blocks of steps, so that drift of the machine meets all alike;
a ratio is the median over pairs of neighbouring blocks, of the blocks' mean steps. What SelSync does in a step is timed
by itself too, as it is less than the noise of whole steps: reading gradients as they arrive, the rest of the statistic
and starting the vote, and the wait for it after the optimizer's step, which holds the other rank's delay as well.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import crossover as xo
from benchmarks import loopback, notes, workloads
from benchmarks.peers.ours import LOOKS_EVERY
from benchmarks.workloads.resnet50 import ResNet50
from crossover.selsync import Gate, LocalGradients, Periodic, SelSync
from crossover.selsync.local_gradients import Observation
from crossover.selsync.synchronizer import Synchronizer

PARTS = {
    "gradients read": (Observation, "arrived"),
    "statistic, vote started": (Synchronizer, "backward_ended"),
    "vote awaited": (Synchronizer, "decide"),
}


class Votes(Gate):
    """Asks every step, and never wants to share."""

    reads_norm = False

    def opinion(self, gradients: LocalGradients) -> bool:
        """No."""
        return False


SYSTEMS: dict[str, Callable[[], Gate | None]] = {
    "bare": lambda: None,
    "local SGD": lambda: Periodic(1_000_000),
    "votes": Votes,
    "SelSync": lambda: SelSync(1e9, warmup_steps=0),
    f"SelSync, every {LOOKS_EVERY}": lambda: SelSync(1e9, warmup_steps=0, every=LOOKS_EVERY),
}


class Stopwatch:
    """Seconds spent in each of :data:`PARTS` since :meth:`take` was last called."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        for name, (owner, method) in PARTS.items():
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return call

    def take(self) -> list[float]:
        """In the order of :data:`PARTS`."""
        seconds = list(self.seconds.values())
        self.seconds = dict.fromkeys(PARTS, 0.0)
        return seconds


def stepper(workload: workloads.Workload, system: str) -> Callable[[], None]:
    """One step on the same batch again and again."""
    model = workload.model()
    optimizer: Any = workload.optimizer(model.parameters(), scale=1e-6)
    gate = SYSTEMS[system]()
    if gate is not None:
        optimizer = xo.DistributedOptimizer(optimizer, model.named_parameters(), gate=gate)
    inputs, targets = workload.batch(xo.rank(), 0, xo.size())

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(workload.loss(model(inputs), targets))
        optimizer.step()

    return step


def measure(name: str, blocks: int, steps: int, watch: Stopwatch) -> dict[str, Any]:
    """Mean step time in seconds of each block, and means of the parts of a step, by system."""
    workload = ResNet50() if name == ResNet50.name else workloads.get(name)
    steps_of = {system: stepper(workload, system) for system in SYSTEMS}
    for step in steps_of.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    parts: dict[str, list[list[float]]] = {system: [] for system in SYSTEMS}
    for block in range(blocks):
        for system in SYSTEMS if block % 2 == 0 else reversed(SYSTEMS):
            steps_of[system]()  # finds another system's data in the caches
            watch.take()
            begin = time.perf_counter()
            for _ in range(steps):
                steps_of[system]()
            times[system].append((time.perf_counter() - begin) / steps)
            parts[system].append([seconds / steps for seconds in watch.take()])
            xo.barrier()
    return {"times": times, "parts": parts}


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    xo.init()
    watch = Stopwatch()  # before hooks are made, which keep the method that there is then
    loopback.report({name: measure(name, arguments.blocks, arguments.steps, watch) for name in arguments.workloads})
    xo.shutdown()


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over pairs of neighbouring blocks."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def rows_of(measured: dict[str, dict[str, Any]]) -> tuple[list[list[str]], list[list[str]]]:
    """Whole steps, and the parts of those with SelSync."""
    whole, parts = [], []
    for workload, found in measured.items():
        bare = found["times"]["bare"]
        for system, times in found["times"].items():
            middle = f"{1e3 * statistics.median(times):.2f}"
            whole.append([f"{workload}: {system}", middle, f"{ratio(times, bare):.4f}"])
        step_s = statistics.median(bare)
        for system in (name for name in SYSTEMS if name.startswith("SelSync")):
            medians = [statistics.median(column) for column in zip(*found["parts"][system], strict=True)]
            for part, seconds in zip([*PARTS, "together"], [*medians, sum(medians)], strict=True):
                share = f"{100 * seconds / step_s:.2f} %"
                parts.append([f"{workload}, {system}: {part}", f"{1e3 * seconds:.3f}", share])
    return whole, parts


def collect(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What rank 0 measured, runs in fresh processes put together."""
    merged: dict[str, dict[str, Any]] = {}
    options = ["--worker", "--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
    for _ in range(arguments.repeats):
        command = [*options, "--workloads", *arguments.workloads]
        first, *_ = loopback.run("benchmarks.selsync_cost", command, 2, "torch")
        for name, found in first.items():
            into = merged.setdefault(name, {kind: {system: [] for system in SYSTEMS} for kind in found})
            for kind, system in itertools.product(found, SYSTEMS):
                into[kind][system] += found[kind][system]
    return merged


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workloads", nargs="+", default=["mlp"], help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of steps for each system in one run")
    parser.add_argument("--steps", type=int, default=8, help=f"steps in a block, a multiple of {LOOKS_EVERY}")
    parser.add_argument("--repeats", type=int, default=2, help="fresh processes")
    parser.add_argument("--quick", action="store_true", help="a look: few blocks, one run")
    parser.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    arguments = parser.parse_args(words)
    if arguments.steps < 1 or arguments.steps % LOOKS_EVERY:
        parser.error(
            f"--steps: is {arguments.steps}; it has to be a multiple of {LOOKS_EVERY}, so that blocks are alike"
        )
    if arguments.worker:
        worker(arguments)
        return
    if arguments.quick:
        arguments.blocks, arguments.steps, arguments.repeats = 4, 4, 1
    measured = collect(arguments)
    whole, parts = rows_of(measured)
    tables = [
        notes.table(["workload: system", "step, ms", "x bare"], whole),
        notes.table(["workload, system: part of its local step", "ms", "of the bare step"], parts),
    ]
    print("\n\n".join(tables))
    if arguments.save:
        print(notes.save("selsync-cost", "Cost of a local step of SelSync, 2 ranks on loopback", tables, measured))


if __name__ == "__main__":
    main()
