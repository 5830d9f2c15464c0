"""A scripted gate, and what training with local steps has to give: worked out by hand in one process."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from tests.training import batch, flat, make_model

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Scripted(xo.selsync.Gate):
    """Each rank wants to share in the steps of which the script holds its rank.

    Args:
        script: for each step the ranks that want to; over again when it ends.
    """

    def __init__(self, script: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(**options)
        self.script = script
        self.norms: list[float] = []

    def opinion(self, gradients: xo.selsync.LocalGradients) -> bool:
        self.norms.append(float(gradients.squared_norm()))
        return xo.rank() in self.script[self.steps % len(self.script)]


def grouped_sgd(groups: int) -> MakeOptimizer:
    """SGD with momentum on the model's parameters in so many groups, each with a rate of its own."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        cuts = [len(parameters) * number // groups for number in range(groups + 1)]
        pairs = list(itertools.pairwise(cuts))
        listed = [{"params": parameters[a:b], "lr": 0.03 + 0.01 * n} for n, (a, b) in enumerate(pairs)]
        return torch.optim.SGD(listed, lr=0.05, momentum=0.9, weight_decay=1e-3)

    return build


def several(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What ``function`` returns for each of ``calls``, in one job: to start ranks takes longer than most calls."""
    results = []
    for call in calls:
        results.append(function(*call))
        gc.collect()
    return results


def backward(model: nn.Module, rank: int, step: int, passes: int = 1) -> None:
    for part in range(passes):
        features, targets = batch(rank, step, part)
        nn.functional.mse_loss(model(features), targets).backward()


def train(model: nn.Module, optimizer: Any, steps: range, passes: int = 1) -> None:
    """With the library, on this rank."""
    for step in steps:
        backward(model, xo.rank(), step, passes)
        optimizer.step()
        optimizer.zero_grad()


def by_hand(
    build: MakeOptimizer,
    shared: Sequence[bool],
    size: int = 2,
    passes: int = 1,
    average: str = "parameters",
    state: bool = False,
) -> list[Tensor]:
    """Every rank's parameters after local steps, of which those in ``shared`` end in an average."""
    with one_thread():
        return _by_hand(build, shared, size, passes, average, state)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As many as a rank has: sums over more of them round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _by_hand(
    build: MakeOptimizer, shared: Sequence[bool], size: int, passes: int, average: str, state: bool
) -> list[Tensor]:
    models = [make_model() for _ in range(size)]
    optimizers = [build(model) for model in models]
    for step, is_shared in enumerate(shared):
        for rank, model in enumerate(models):
            backward(model, rank, step, passes)
        if is_shared and average == "gradients":
            average_in_place([[p.grad for p in model.parameters() if p.grad is not None] for model in models])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if is_shared and average == "parameters":
            average_in_place([list(model.parameters()) for model in models])
            if state:
                average_in_place([[s["momentum_buffer"] for s in optimizer.state.values()] for optimizer in optimizers])
    return [flat(model) for model in models]


@torch.no_grad()
def average_in_place(replicas: Sequence[Sequence[Tensor]]) -> None:
    for tensors in zip(*replicas, strict=True):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        for tensor in tensors:
            tensor.copy_(total / len(tensors))
