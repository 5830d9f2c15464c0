"""Schedules with late updates for the cases, and what one process makes of the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from crossover.deft import DeFT, Limits, make_plan
from crossover.schedulers import FifoDelayed, Schedule
from tests.deft.profiles import random_profile
from tests.deft.reference import SYNCHRONOUS, Decision, fifo_decisions

WARMUP = 2
BUCKETS = 5  # of tests.training.make_model, with 100 bytes in a bucket
SMALL = {"bucket_cap_mb": 1e-3, "first_bucket_cap_mb": 1e-4}
COVERAGE = {"deft": 0.8, "deft merging": 1.6}
KINDS = ("fifo", "fifo merging", "deft", "deft merging")


def make_schedule(kind: str, **options: Any) -> Schedule:
    """A schedule that is synchronous for ``WARMUP`` steps and late from then on; its gain for merged steps is 1."""
    if kind.startswith("fifo"):
        merged = 2 if "merging" in kind else 1
        return FifoDelayed(merged=merged, warmup_steps=WARMUP, merge="mean", **options)
    profile = random_profile(11, BUCKETS, coverage=COVERAGE[kind])
    return DeFT(
        profile,
        warmup_steps=WARMUP,
        capacity=(1, 1),
        bucket_bytes=100,
        ramp_updates=0,
        merge="mean",
        spike_compensation=False,
        **options,
    )


def decisions(kind: str, steps: int) -> list[Decision]:
    """What each step of such a schedule closes and applies."""
    if kind.startswith("fifo"):
        return fifo_decisions(steps, 2 if "merging" in kind else 1, WARMUP)
    plan = make_plan(random_profile(11, BUCKETS, coverage=COVERAGE[kind]).times(), Limits())
    planned = [plan.step(number) for number in range(steps - WARMUP)]
    return [SYNCHRONOUS] * WARMUP + [Decision(step.close, step.apply) for step in planned if step is not None]


def digest(model: nn.Module) -> torch.Tensor:
    """All parameters in one tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
