"""Situation 37: averaging goes wrong, and shows up as lost accuracy only.

A counter that advances once for each parameter group, or averages over copies: training goes on, towards less. With a
period of four, twelve steps have three averages for any number of groups, and parameters are those of a dozen lines
written by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import invariants
from tests.harness import run_ranks
from tests.selsync.local_steps import by_hand, grouped_sgd, several, train
from tests.training import make_model

STEPS, EVERY = 12, 4
GROUPS = (1, 2, 5)
SHARED = [(step + 1) % EVERY == 0 for step in range(STEPS)]
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def periodic(groups: int) -> tuple[int, list[Tensor]]:
    log = invariants.start()
    model = make_model()
    job = invariants.Job(model, grouped_sgd(groups)(model), gate=f"periodic:{EVERY}")
    after = []
    for step in range(STEPS):
        train(model, job.optimizer, range(step, step + 1))
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer: Any = job.optimizer
    averages = sum("average" in entry.name for entry in log.since(0, optimizer))
    job.check(steps=STEPS)
    return averages, after


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_three_averages_whatever_the_groups(launcher: str) -> None:
    results = run_ranks(several, 2, periodic, [(groups,) for groups in GROUPS], launcher=launcher)
    for groups, *ranks in zip(GROUPS, *results, strict=True):
        for rank, (averages, after) in enumerate(ranks):
            assert averages == STEPS // EVERY
            for step in range(STEPS):
                expected = by_hand(grouped_sgd(groups), SHARED[: step + 1])[rank]
                assert torch.equal(after[step], expected), f"{groups} groups, step {step}"
        assert torch.equal(ranks[0][1][-1], ranks[1][1][-1])
        assert not torch.equal(ranks[0][1][-2], ranks[1][1][-2])
