"""What must be equal across real ranks although what each one sees is not."""

from __future__ import annotations

import math

import pytest
import torch

import crossover as xo
from crossover.comm import ReduceOp
from crossover.selsync.calibrate import shared_steps
from crossover.selsync.injection import DataInjection
from crossover.selsync.sampler import SelSyncSampler
from crossover.selsync.significance import TensorSignificanceTracker, squared_norm
from tests.harness import run_ranks

STEPS = 12
DELTA = 0.625  # what a jump of the squared norm from 4 to 9 gives exactly, with a factor of 0.5
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def gradient(rank: int, step: int) -> torch.Tensor:
    """Squared norm 4; but on rank 1 NaN at step 3 and on the threshold at step 6, on rank 0 infinite at step 9."""
    value = {(1, 3): math.nan, (1, 6): 3.0, (0, 9): math.inf}.get((rank, step), 2.0)
    return torch.tensor([value], dtype=torch.float64)


def decide() -> tuple[list[float | None], list[bool], list[int]]:
    xo.init()
    communicator = xo.runtime.context().communicator
    tracker = TensorSignificanceTracker(factor=0.5, warmup_steps=2)
    values, decisions, own = [], [], []
    for step in range(STEPS):
        tracker.update(squared_norm([gradient(xo.rank(), step)]))
        vote = tracker.vote(DELTA)
        own.append(int(vote.item()))
        communicator.all_reduce(vote, ReduceOp.MAX, name="selsync.vote").wait()
        decisions.append(bool(vote.item()))
        values.append(tracker.value())
    return values, decisions, own


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_decide_together_on_values_that_differ(launcher):
    results = run_ranks(decide, 2, launcher=launcher, timeout=60)
    decisions = [result[1] for result in results]
    assert decisions[0] == decisions[1]
    assert decisions[0] == shared_steps([result[0] for result in results], DELTA)
    assert [step for step, shared in enumerate(decisions[0]) if shared] == [0, 3, 6, 9]
    assert results[1][0][6] == DELTA
    assert results[0][2] != results[1][2], "a vote was needed"


def inject() -> tuple[list[list[int]], int]:
    xo.init()
    injection = DataInjection(0.5, 0.5, batch_size=8)
    batches = [(torch.arange(injection.local_batch_size) + 100 * xo.rank(), torch.zeros(injection.local_batch_size, 2))]
    return [batch.tolist() for batch, _ in injection.wrap(batches * 2)], injection.local_batch_size


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_injection_between_processes(launcher):
    (first, local), (second, _) = run_ranks(inject, 2, launcher=launcher, timeout=60)
    assert len(first) == len(second) == 2
    for mine, theirs in zip(first, second, strict=True):
        assert mine[:local] == list(range(local))
        assert mine[local:] == theirs[: len(mine) - local] == list(range(100, 100 + len(mine) - local))


def placed() -> list[int]:
    xo.init()
    return list(SelSyncSampler(8, 2, shuffle=False))


def test_sampler_takes_rank_and_size_from_the_job():
    assert run_ranks(placed, 2, timeout=60) == [[0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]]
