"""Situation 29: somebody else steps the learning-rate scheduler, once for each process.

Accelerate's scheduler wrapper does so by default, as if each rank's batch were a part of one larger batch that the
schedule was counted in. Nothing of ours may add to it or get in its way: the curve is the one that Accelerate
documents, and with its setting ``Accelerator(step_scheduler_with_optimizer=False)`` the scheduler runs once a step.
The model stays out of ``prepare()``, which would put it into DistributedDataParallel: two libraries would average the
same gradients, and that is refused.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import batch, flat, make_model, sgd

STEPS = 8


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=STEPS)


def backward(model: nn.Module, ranks: list[int], step: int) -> None:
    pairs = [batch(rank, step) for rank in ranks]
    features, targets = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
    nn.functional.mse_loss(model(features), targets).backward()


class SteppedOncePerProcess:
    """What Accelerate's wrapper does where batches are not split."""

    def __init__(self, scheduler: Any, times: int) -> None:
        self.scheduler = scheduler
        self.times = times

    def step(self) -> None:
        for _ in range(self.times):
            self.scheduler.step()


def curve(model: nn.Module, optimizer: Any, scheduler: Any, ranks: list[int]) -> list[float]:
    seen = []
    for step in range(STEPS):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        backward(model, ranks, step)
        optimizer.step()
        scheduler.step()
    return seen


def alone(times: int) -> tuple[list[float], torch.Tensor]:
    model = make_model()
    optimizer = sgd(model)
    return curve(model, optimizer, SteppedOncePerProcess(falling(optimizer), times), [0, 1]), flat(model)


def with_our_own_wrapper() -> list[tuple[list[float], torch.Tensor]]:
    xo.init()
    results = []
    for times in (xo.size(), 1):
        model = make_model()
        optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters())
        scheduler = SteppedOncePerProcess(falling(optimizer), times)
        results.append((curve(model, optimizer, scheduler, [xo.rank()]), flat(model)))
        invariants.require_same("parameters", invariants.digests(model))
    return results


def with_accelerate() -> list[tuple[list[float], torch.Tensor]]:
    from accelerate import Accelerator

    xo.init()
    results = []
    for with_optimizer in (True, False):
        accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=with_optimizer)
        model = make_model()
        optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters())
        optimizer, scheduler = accelerator.prepare(optimizer, falling(optimizer))
        results.append((curve(model, optimizer, scheduler, [xo.rank()]), flat(model)))
        invariants.require_same("parameters", invariants.digests(model))
    return results


NEEDS_ACCELERATE = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)


@pytest.mark.parametrize(
    "train", [with_our_own_wrapper, pytest.param(with_accelerate, marks=NEEDS_ACCELERATE)], ids=["ours", "accelerate"]
)
def test_the_rate_follows_the_curve_of_one_process(train: Any) -> None:
    first, second = run_ranks(train)
    for times, (rates, parameters), (other_rates, _) in zip((2, 1), first, second, strict=True):
        wanted_rates, wanted = alone(times)
        assert rates == other_rates == wanted_rates
        assert (parameters - wanted).abs().max() < 1e-12
    assert first[0][0][STEPS // 2] == pytest.approx(first[1][0][0] / 2), "twice as fast ends half-way"
    assert first[1][0][STEPS // 2] > first[0][0][STEPS // 2]


def with_ddp() -> list[str]:
    xo.init()
    messages = []
    for wrap_first in (True, False):
        model = make_model()
        optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters()) if wrap_first else None
        ddp = DistributedDataParallel(model)
        optimizer = optimizer or xo.DistributedOptimizer(sgd(model), model.named_parameters())
        with pytest.raises(ValueError, match="DistributedDataParallel") as caught:
            backward(ddp, [xo.rank()], 0)
        messages.append(str(caught.value))
    return messages


def test_a_model_in_ddp_is_refused() -> None:
    first, second = run_ranks(with_ddp)
    assert first == second
    assert all("parameter '0.weight'" in message or "parameter '4.bias'" in message for message in first)
