"""The gradient noise scale that real ranks estimate is the one their gradients were made with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from crossover.deft import DeFT, Preserver
from tests.deft.profiles import random_profile
from tests.harness import run_ranks

WIDTH = 400
SIGNAL, DEVIATION = 0.5, 2.0
WARMUP, STEPS = 40, 120


def estimated(merges: bool, average: bool) -> tuple[float, float, float, int]:
    """Gradients that do not depend on the weights: a constant, and noise of each rank and step."""
    xo.init()
    weights = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH // 4, dtype=torch.float64)) for _ in range(4)])
    schedule = DeFT(
        random_profile(5, 4, coverage=2.5 if merges else 0.8),
        warmup_steps=WARMUP,
        capacity=(1, 1),
        bucket_bytes=WIDTH // 4 * 8,
        preserver=Preserver(gradient_rise=1e9),
    )
    bare = torch.optim.SGD(weights.parameters(), lr=1e-3)
    optimizer: Any = xo.DistributedOptimizer(bare, schedule=schedule, op=xo.Average if average else xo.Sum)
    source = torch.Generator().manual_seed(xo.rank())
    noise = schedule.course.pilot.noise
    early = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        made = SIGNAL + DEVIATION * torch.randn(WIDTH, generator=source, dtype=torch.float64)
        torch.dot(torch.cat(list(weights)), made).backward()
        optimizer.step()
        if step == WARMUP - 1:
            early = noise.value or 0.0
    merged = max(1, round((STEPS - WARMUP) / max(schedule.updates - WARMUP, 1)))
    optimizer.flush()
    return early, noise.value or 0.0, noise.error / noise.signal, merged


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("merges", [False, True])
def test_ranks_find_the_noise_they_have(merges: bool, average: bool) -> None:
    exact = DEVIATION**2 / SIGNAL**2
    results = run_ranks(estimated, 2, merges, average)
    assert results[0] == results[1], "all hold the same estimate"
    early, late, error, merged = results[0]
    assert (merged > 1) == merges
    assert early == pytest.approx(exact, rel=5 * error + 0.1)
    assert late == pytest.approx(exact, rel=5 * error + 0.1)
    assert error < 0.2, "an estimate and not a guess"
