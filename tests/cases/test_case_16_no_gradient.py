"""Situation 16: a gradient of zero is not the same as no gradient.

With momentum or weight decay a gradient of zero still moves a weight, so filling in zeros "to be safe" changes
training. With us a parameter that no rank used keeps ``None`` and is left alone. One that some rank used counts as
zero on the others: all of them apply the same average. The optimizer's documentation says so. Gradients that the
script itself set to zero stay zeros.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import make_model

STEPS = 8
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


class Branching(nn.Module):
    """Heads that are used always, never, by the first rank only, by the first rank in some steps, and in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ("always", "never", "first", "first_now_and_then", "now_and_then")
        self.heads = nn.ModuleDict({name: nn.Linear(7, 3) for name in names}).double()

    def forward(self, features: Tensor, used: list[str]) -> Tensor:
        return torch.stack([self.heads[name](features) for name in used]).sum(0)


def used_by(rank: int, step: int) -> list[str]:
    used = ["always"]
    if rank == 0:
        used += ["first"] + ["first_now_and_then"] * (step % 3 == 0)
    return used + ["now_and_then"] * (step % 4 == 1)


def train(model: Branching, optimizer: Any, ranks: list[int], set_to_none: bool) -> None:
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for rank, features, targets in invariants.parts_of_step(step, ranks):
            loss = nn.functional.mse_loss(model(features, used_by(rank, step)), targets)
            (loss / len(ranks)).backward()
        optimizer.step()


def momentum_and_decay(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def adam_with_decay(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def some_without_gradient(make_optimizer: Any, schedule: str, set_to_none: bool, **options: Any) -> None:
    model, alone = Branching(), Branching()
    job = Job(model, make_optimizer(model), schedule=schedule, **options)
    train(model, job.optimizer, [xo.rank()], set_to_none)
    job.check(steps=STEPS)
    train(alone, make_optimizer(alone), list(range(xo.size())), set_to_none)
    invariants.require_close(f"parameters, {schedule}, {set_to_none}", parameters(model), parameters(alone))
    fresh = Branching()
    for used, untouched in zip(model.heads["never"].parameters(), fresh.heads["never"].parameters(), strict=True):
        assert torch.equal(used, untouched), "a parameter that no rank used moved"
        assert used.grad is None
        assert used not in job.optimizer.state, "a parameter that no rank used has optimizer state"
    moved = model.heads["first"].weight - fresh.heads["first"].weight
    assert moved.abs().min() > 0, "a parameter that one rank used was trained on all"


def no_gradient_at_all(log: invariants.Log) -> None:
    """Steps of which nothing was computed."""
    for schedule in ("overlapped", "priority"):
        model = make_model()
        job = Job(model, adam_with_decay(model), schedule=schedule, **SMALL_BUCKETS)
        mark = log.mark
        job.optimizer.step()
        job.optimizer.step()
        assert log.mark == mark, "there was nothing to share"
        job.check(steps=2)
        assert torch.equal(parameters(model), parameters(make_model()))
        assert not job.optimizer.state


def every_way() -> None:
    log = invariants.start()
    no_gradient_at_all(log)
    for make_optimizer in (momentum_and_decay, adam_with_decay):
        for options in (SMALL_BUCKETS, {}):
            some_without_gradient(make_optimizer, "overlapped", True, **options)
            some_without_gradient(make_optimizer, "overlapped", False, **options)
            some_without_gradient(make_optimizer, "priority", True, **options)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_none_everywhere_is_left_alone_and_none_somewhere_counts_as_zero(launcher: str) -> None:
    run_ranks(every_way, 2, launcher=launcher)


def test_it_is_documented() -> None:
    text = " ".join(str(xo.DistributedOptimizer.__doc__).split())
    assert "A rank without a gradient for a parameter counts as zero; where no rank has one it stays ``None``" in text
