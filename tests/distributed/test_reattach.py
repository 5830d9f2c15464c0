"""Elastic training: the job ends and begins anew within one process, and the same optimizer goes on."""

from __future__ import annotations

import pytest
import torch

import crossover as xo
from tests.harness import run_ranks
from tests.training import Recipe as TrainingRecipe
from tests.training import alone, batch, flat, make_model, sgd


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        torch.nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()


def goes_on(schedule: str) -> tuple[torch.Tensor, torch.Tensor]:
    xo.init()
    model = make_model()
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=schedule)
    train(model, optimizer, range(3))
    model[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a pass that is cut off before anything was sent
        train(model, optimizer, range(3, 4))
    model[0].weight._backward_hooks.clear()
    optimizer.flush()
    optimizer.reattach()
    train(model, optimizer, range(3, 6))
    optimizer.flush()
    together = flat(model)
    xo.shutdown()
    xo.init(backend="solo")
    optimizer.reattach()
    train(model, optimizer, range(6, 8))
    return together, flat(model)


@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_same_optimizer_goes_on_in_a_new_job(schedule: str) -> None:
    (first, first_alone), (second, _) = run_ranks(goes_on, 2, schedule)
    assert torch.equal(first, second)
    assert (first - alone(TrainingRecipe(), [0, 1], 6)).abs().max() < 1e-12
    assert not torch.equal(first, first_alone)
