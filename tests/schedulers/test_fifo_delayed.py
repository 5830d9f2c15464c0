"""The ablation against the rule written down by hand, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover.schedulers import FifoDelayed, schedule_of
from tests.deft.reference import OPTIMIZERS, Delayed, fifo_decisions
from tests.harness import run_ranks
from tests.training import batch, flat, make_model

STEPS = 17
SMALL_BUCKETS = {"bucket_cap_mb": 1e-3, "first_bucket_cap_mb": 1e-4}
CASES = [("sgd", 1), ("momentum", 1), ("adam", 1), ("momentum", 2), ("adam", 3)]


def backward(model: nn.Module, step: int) -> None:
    features, targets = batch(xo.rank(), step)
    nn.functional.mse_loss(model(features), targets).backward()


def train(name: str, merged: int, set_to_none: bool = True) -> tuple[Tensor, Tensor]:
    model = make_model()
    schedule = FifoDelayed(merged=merged, warmup_steps=3)
    optimizer: Any = xo.DistributedOptimizer(
        OPTIMIZERS[name](model), model.named_parameters(), schedule=schedule, **SMALL_BUCKETS
    )
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(model, step)
        optimizer.step()
    before = flat(model).clone()
    optimizer.flush()
    return before, flat(model).clone()


def train_all() -> dict[str, tuple[Tensor, Tensor]]:
    xo.init()
    results = {f"{name} {merged}": train(name, merged) for name, merged in CASES}
    results["zeroed momentum 2"] = train("momentum", 2, set_to_none=False)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_equals_the_rule_written_by_hand(size: int) -> None:
    results = run_ranks(train_all, size)
    for name, merged in CASES:
        reference = Delayed(OPTIMIZERS[name], range(size), gain=lambda steps: steps**0.5)
        for step, decision in enumerate(fifo_decisions(STEPS, merged, 3)):
            reference.step(step, decision)
        before = reference.result()
        reference.flush()
        for result in results:
            torch.testing.assert_close(result[f"{name} {merged}"][0], before, rtol=0, atol=1e-12)
            torch.testing.assert_close(result[f"{name} {merged}"][1], reference.result(), rtol=0, atol=1e-12)
            for mine, first in zip(result[f"{name} {merged}"], results[0][f"{name} {merged}"], strict=True):
                assert torch.equal(mine, first), f"{name} {merged}: ranks differ"
    for result in results:
        assert torch.equal(result["zeroed momentum 2"][1], result["momentum 2"][1])


def test_arguments_are_checked() -> None:
    for arguments in ({"merged": 0}, {"warmup_steps": 0}, {"merge": "max"}, {"compensation": -1.0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            FifoDelayed(**arguments)
    with pytest.raises(ValueError, match="grad_scaler"):
        FifoDelayed(grad_scaler=1024.0)
    assert isinstance(schedule_of("fifo_delayed"), FifoDelayed)
