"""Situation 40: which weights does a late gradient meet?

The rule, written down as a recurrence for one weight and the loss ``k w^2 / 2`` on each rank, with other ``k`` on
other ranks. With a delay of one the gradient of step ``t`` is applied in step ``t + 1``, to the weights as they are
then, with the learning rate of then, and clipped then. Nothing is applied in the first step after the switch. The last
one is applied by ``flush()``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from crossover.schedulers import FifoDelayed
from tests.harness import run_ranks

CURVATURES = (0.5, 1.5)  # of the ranks; their mean is 1
STEPS = 12
RATE, LATER_RATE, DECAY, CLIP = 0.1, 0.05, 0.01, 0.3
WARMUP = 2


def by_hand(momentum: float, changes_rate: bool, clips: bool) -> list[float]:
    """The weight after each step, and after the flush."""
    weight, velocity, waiting, weights = 1.0, None, None, []
    for step in range(STEPS + 1):
        rate = LATER_RATE if changes_rate and step >= STEPS // 2 else RATE
        fresh = sum(CURVATURES) / len(CURVATURES) * weight
        due, waiting = (fresh, None) if step < WARMUP else (waiting, fresh)
        if due is not None:
            if clips and step < STEPS:
                due *= min(1.0, CLIP / (abs(due) + 1e-6))  # as torch has it
            due += DECAY * weight
            velocity = due if velocity is None else momentum * velocity + due
            weight -= rate * velocity
        weights.append(weight)
    return weights


def trained(momentum: float, changes_rate: bool, clips: bool, zeroing: str) -> list[float]:
    parameter = nn.Parameter(torch.ones((), dtype=torch.float64))
    bare = torch.optim.SGD([parameter], lr=RATE, momentum=momentum, weight_decay=DECAY)
    optimizer: Any = xo.DistributedOptimizer(bare, schedule=FifoDelayed(warmup_steps=WARMUP))
    weights = []
    for step in range(STEPS):
        if changes_rate and step == STEPS // 2:
            optimizer.param_groups[0]["lr"] = LATER_RATE
        if zeroing != "never":
            optimizer.zero_grad(set_to_none=zeroing == "to none")
        (CURVATURES[xo.rank()] * parameter**2 / 2).backward()
        if clips:
            nn.utils.clip_grad_norm_([parameter], CLIP)
        optimizer.step()
        weights.append(float(parameter))
        if zeroing == "never":
            parameter.grad = None
    optimizer.flush()
    weights.append(float(parameter))
    optimizer.flush()
    assert float(parameter) == weights[-1], "a flushed job has nothing to apply"
    return weights


CASES = [
    (momentum, changes_rate, clips, zeroing)
    for momentum in (0.0, 0.9)
    for changes_rate, clips, zeroing in (
        (False, False, "to none"),
        (True, False, "in place"),
        (False, True, "to none"),
        (True, True, "never"),
    )
]


def every_case() -> list[list[float]]:
    xo.init()
    return [trained(*case) for case in CASES]


@pytest.mark.parametrize("launcher", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_a_late_gradient_follows_the_recurrence(launcher: str) -> None:
    results = run_ranks(every_case, 2, launcher=launcher)
    for number, (momentum, changes_rate, clips, _) in enumerate(CASES):
        expected = by_hand(momentum, changes_rate, clips)
        assert results[0][number] == results[1][number]
        assert results[0][number] == pytest.approx(expected, abs=1e-14)
