"""What does wrapping cost? Step times of the plain path beside DDP, Horovod and the bare optimizer, on loopback.

    python -m benchmarks.overhead [--quick] [--save]

Three models: an 8x1024 MLP (33.6 MB of gradients), the parameter shapes of ResNet-50 with next to no computing, and
2,000 tensors of 100 elements. Systems that can share a process take turns in blocks of steps, so that drift of the
machine meets all alike. Which model was made first in a process has its share in the speed, by where its memory lies,
so each repeat is a fresh process that makes them in another order: a ratio is the median over pairs of neighbouring
blocks, and of the repeats the geometric mean.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import crossover as xo
from benchmarks import loopback, notes
from crossover import telemetry

Step = Callable[[], None]


class Touch(nn.Module):
    """Parameters of given shapes and a loss that is their weighted sum: gradients appear with next to no computing."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(*shape) for shape in shapes])

    def forward(self, factor: Tensor) -> Tensor:
        return torch.stack([(weight * factor).sum() for weight in self.weights]).sum()


class Mlp(nn.Sequential):
    """Eight square layers of 1,024."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes of the 161 parameters of ResNet-50, 25.6 million elements."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((planes, width, 1, 1), (planes, planes, 3, 3), (planes * 4, planes, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(planes * 4, width, 1, 1), (planes * 4,), (planes * 4,)]
            width = planes * 4
    return [*shapes, (1000, 2048), (1000,)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP 8x1024": (Mlp, lambda: torch.randn(32, 1024)),
    "ResNet-50 shapes": (lambda: Touch(resnet50_shapes()), lambda: torch.ones(())),
    "2,000 x 100": (lambda: Touch([(100,)] * 2000), lambda: torch.ones(())),
}


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def bare(model: nn.Module, batch: Tensor) -> Step:
    return stepper(model, make_sgd(model), batch)


def crossover(model: nn.Module, batch: Tensor) -> Step:
    return stepper(model, xo.DistributedOptimizer(make_sgd(model), model.named_parameters()), batch)


def crossover_recorded(model: nn.Module, batch: Tensor) -> Step:
    return crossover(model, batch)


def ddp(model: nn.Module, batch: Tensor) -> Step:
    return stepper(DistributedDataParallel(model), make_sgd(model), batch)


def ddp_bucket_view(model: nn.Module, batch: Tensor) -> Step:
    return stepper(DistributedDataParallel(model, gradient_as_bucket_view=True), make_sgd(model), batch)


def horovod(model: nn.Module, batch: Tensor) -> Step:
    import horovod.torch as hvd

    return stepper(model, hvd.DistributedOptimizer(make_sgd(model), model.named_parameters()), batch)


SYSTEMS: dict[str, Callable[[nn.Module, Tensor], Step]] = {
    f.__name__: f for f in (bare, crossover, crossover_recorded, ddp, ddp_bucket_view, horovod)
}


@contextlib.contextmanager
def recording(system: str) -> Iterator[None]:
    """Records and a timeline, for the system that is measured with them."""
    if system != crossover_recorded.__name__:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        telemetry.start(records=folder, timeline=folder, rank=xo.rank())
        try:
            yield
        finally:
            telemetry.stop()


def measure(model_name: str, systems: Sequence[str], blocks: int, steps: int) -> dict[str, list[float]]:
    """Median step time in seconds of each block of steps, for each system, the systems taking turns."""
    make_model, make_batch = MODELS[model_name]
    torch.manual_seed(0)
    steps_of: dict[str, Step] = {}
    for system in systems:
        torch.manual_seed(1)
        steps_of[system] = SYSTEMS[system](make_model(), make_batch())
    for step in steps_of.values():
        for _ in range(5):
            step()
    times: dict[str, list[float]] = {system: [] for system in systems}
    for block in range(blocks):
        turn = list(systems) if block % 2 == 0 else list(reversed(systems))
        for system in turn:
            durations = []
            with recording(system):
                for number in range(steps + 1):
                    begin = time.perf_counter()
                    steps_of[system]()
                    if number:  # the first step of a block finds the other system's data in the caches
                        durations.append(time.perf_counter() - begin)
            times[system].append(statistics.median(durations))
    return times


def worker(arguments: argparse.Namespace) -> None:
    xo.init()
    systems = arguments.worker.split(",")
    loopback.report({name: measure(name, systems, arguments.blocks, arguments.steps) for name in arguments.models})
    xo.shutdown()


Times = dict[str, list[list[float]]]
"""Block times by system and repeat."""


def collect(arguments: argparse.Namespace) -> dict[str, dict[str, Times]]:
    """Block times by model and run. Runs that cannot share a process are repeated in turn."""
    runs = {
        "torch": ("torch", ["crossover", "ddp", "ddp_bucket_view", "crossover_recorded"], 2),
        "alone": ("torch", ["crossover", "bare"], 1),
    }
    if importlib.util.find_spec("horovod"):
        runs["horovod"] = ("horovod", ["crossover", "horovod"], 2)
    merged: dict[str, dict[str, Times]] = {name: {run: {} for run in runs} for name in arguments.models}
    for repeat in range(arguments.repeats):
        for run, (launcher, systems, size) in runs.items():
            first = repeat % len(systems)
            order = ",".join(systems[first:] + systems[:first])
            options = ["--worker", order, "--blocks", str(arguments.blocks), "--steps", str(arguments.steps)]
            answer, *_ = loopback.run("benchmarks.overhead", [*options, "--models", *arguments.models], size, launcher)
            for model, times in answer.items():
                for system, values in times.items():
                    merged[model][run].setdefault(system, []).append(values)
    return merged


def ratio(ours: list[list[float]], theirs: list[list[float]]) -> tuple[float, float, float]:
    """Median ratio of neighbouring blocks in each repeat: their geometric mean, smallest and largest."""
    each = [
        statistics.median(a / b for a, b in zip(mine, other, strict=True))
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return statistics.geometric_mean(each), min(each), max(each)


def row(label: str, ours: list[list[float]], theirs: list[list[float]]) -> list[str]:
    middle, least, most = ratio(ours, theirs)
    times = [f"{1e3 * statistics.median(itertools.chain(*blocks)):.2f}" for blocks in (ours, theirs)]
    return [label, *times, f"{middle:.3f}", f"{least:.3f} to {most:.3f}"]


def rows_of(merged: dict[str, dict[str, Times]]) -> list[list[str]]:
    rows = []
    for model, runs in merged.items():
        for run, systems in runs.items():
            for system, times in systems.items():
                if system == "crossover_recorded":
                    rows.append(row(f"{model}: with records and timeline / without", times, systems["crossover"]))
                elif system != "crossover":
                    rows.append(row(f"{model}: crossover ({run}) / {system}", systems["crossover"], times))
        if "horovod" in runs:
            label = f"{model}: crossover (torch) / horovod, other processes"
            rows.append(row(label, runs["torch"]["crossover"], runs["horovod"]["horovod"]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--blocks", type=int, default=6, help="blocks of steps for each system in one run")
    parser.add_argument("--steps", type=int, default=6, help="steps in a block")
    parser.add_argument("--repeats", type=int, default=4, help="fresh processes")
    parser.add_argument("--quick", action="store_true", help="a look: few blocks, one run")
    parser.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    if arguments.quick:
        arguments.blocks, arguments.repeats = 5, 1
    merged = collect(arguments)
    text = notes.table(["model: ours / peer", "ours, ms", "peer, ms", "ratio", "of repeats"], rows_of(merged))
    print(text)
    if arguments.save:
        print(
            notes.save("overhead", "Step time of the plain path beside its peers, 2 ranks on loopback", [text], merged)
        )


if __name__ == "__main__":
    main()
