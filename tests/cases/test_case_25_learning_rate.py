"""Situation 25: the learning rate is changed, but not where it counts.

With two copies of ``param_groups`` the logged rate follows the schedule and the training does not. Here the
*effective* rate is read from the size of an update whose gradient is one, after every way of changing it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks


class Ones(nn.Module):
    """A loss whose gradient is one for every weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return self.first.sum() + self.second.sum()


class Meter:
    """Takes steps and tells the rate at which each parameter really moved."""

    def __init__(self, model: Ones, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def step(self, change_after: float | None = None) -> tuple[float, float]:
        before = [parameter.detach().clone() for parameter in (self.model.first, self.model.second)]
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()
        if change_after is not None:
            self.optimizer.param_groups[0]["lr"] = change_after
        self.optimizer.flush()
        moved = [(old - new.detach()) for old, new in zip(before, (self.model.first, self.model.second), strict=True)]
        assert all(bool((part == part[0]).all()) for part in moved)
        return float(moved[0][0]), float(moved[1][0])


def measured(schedule: str) -> dict[str, tuple[float, float]]:
    xo.init()
    model = Ones()
    inner = torch.optim.SGD([{"params": [model.first]}, {"params": [model.second], "lr": 0.5}], lr=0.25)
    outer = xo.DistributedOptimizer(inner, model.named_parameters(), schedule=schedule)
    meter = Meter(model, outer)
    seen = {"as built": meter.step()}
    inner.param_groups[0]["lr"] = 0.125
    seen["through inner"] = meter.step()
    outer.param_groups[1]["lr"] = 0.0625
    seen["through outer"] = meter.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(outer, lambda epoch: 2.0**-epoch)
    scheduler.step()
    seen["through a scheduler"] = meter.step()
    saved = outer.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = 1.0
    outer.load_state_dict(saved)
    seen["loaded"] = meter.step()
    inner.param_groups[0]["lr"], outer.param_groups[1]["lr"] = 2.0, 4.0
    seen["changed after loading"] = meter.step()
    scheduler.step()
    seen["scheduled after loading"] = meter.step()
    if xo.rank() == 1:
        inner.param_groups[0]["lr"] = 1e9
    xo.broadcast_optimizer_state(outer, root_rank=0)
    seen["broadcast from rank 0"] = meter.step()
    seen["changed after step()"] = meter.step(change_after=32.0)
    seen["one step later"] = meter.step()
    outer.param_groups[0]["lr"] = torch.tensor(16.0, dtype=torch.float64)
    seen["a tensor"] = meter.step()
    invariants.require_same("parameters", invariants.digests(model))
    return seen


@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_the_effective_rate_is_the_one_that_was_set(schedule: str) -> None:
    first, second = run_ranks(measured, 2, schedule)
    assert first == second
    assert first == {
        "as built": (0.25, 0.5),
        "through inner": (0.125, 0.5),
        "through outer": (0.125, 0.0625),
        "through a scheduler": (0.0625, 0.03125),
        "loaded": (1.0, 1.0),
        "changed after loading": (2.0, 4.0),
        "scheduled after loading": (0.03125, 0.015625),  # what the scheduler started from, halved twice
        "broadcast from rank 0": (0.03125, 0.015625),
        # the update belongs to the rate that step() saw, also where it is applied in the next forward pass
        "changed after step()": (0.03125, 0.015625),
        "one step later": (32.0, 0.015625),
        "a tensor": (16.0, 0.015625),
    }
