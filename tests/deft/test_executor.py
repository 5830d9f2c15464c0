"""Real ranks that follow a plan equal one process that follows the rule written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover.deft import DeFT, Limits, make_plan
from tests.deft.profiles import random_profile
from tests.deft.reference import OPTIMIZERS, SYNCHRONOUS, Decision, Delayed
from tests.harness import run_ranks
from tests.training import batch, flat, make_model

STEPS = 30
WARMUP = 2
BUCKETS = 5  # of 100 bytes, tests.training.make_model has so many
PROFILES = [(name, seed, coverage) for seed, name in enumerate(OPTIMIZERS) for coverage in (0.6, 1.4, 2.7)]


def planned(seed: int, coverage: float, capacity: tuple[int, int], links: int = 1) -> list[Decision]:
    """What each step does, from the plan alone."""
    profile = random_profile(seed, BUCKETS, links, coverage)
    plan = make_plan(profile.times(), Limits(capacity))
    decisions = [SYNCHRONOUS] * WARMUP
    for number in range(STEPS - WARMUP):
        step = plan.step(number)
        assert step is not None
        decisions.append(Decision(step.close, step.apply))
    return decisions


def train(name: str, seed: int, coverage: float, capacity: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
    model = make_model()
    profile = random_profile(seed, BUCKETS, coverage=coverage)
    schedule = DeFT(
        profile, warmup_steps=WARMUP, capacity=capacity, bucket_bytes=100, ramp_updates=0, merge="mean", most_merged=8
    )
    optimizer: Any = xo.DistributedOptimizer(OPTIMIZERS[name](model), model.named_parameters(), schedule=schedule)
    for step in range(STEPS):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    assert schedule.profile == profile, schedule.decisions
    before = flat(model).clone()
    optimizer.flush()
    return before, flat(model).clone(), schedule.updates


def train_all(cases: Sequence[tuple[str, int, float]], capacity: tuple[int, int]) -> list[tuple[Tensor, Tensor, int]]:
    xo.init()
    return [train(*case, capacity) for case in cases]


@pytest.mark.parametrize(("size", "capacity"), [(2, (1, 1)), (3, (1, 1)), (2, (3, 2)), (2, (2, 1))])
def test_executor_equals_a_serial_reference(size: int, capacity: tuple[int, int]) -> None:
    results = run_ranks(train_all, size, PROFILES, capacity)
    for number, (name, seed, coverage) in enumerate(PROFILES):
        reference = Delayed(OPTIMIZERS[name], range(size), gain=lambda steps: 1.0, spike=True)
        for step, decision in enumerate(planned(seed, coverage, capacity)):
            reference.step(step, decision)
        before = reference.result()
        reference.flush()
        for result in results:
            torch.testing.assert_close(result[number][0], before, rtol=0, atol=1e-12)
            torch.testing.assert_close(result[number][1], reference.result(), rtol=0, atol=1e-12)
            assert torch.equal(result[number][1], results[0][number][1]), f"{name}: ranks differ"
            assert result[number][2] == reference.updates
