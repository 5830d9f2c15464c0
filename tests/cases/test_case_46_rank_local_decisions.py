"""Situation 46: one rank decides by itself to leave something out.

A batch whose loss is not a number is skipped where it is seen, and a few steps later the job hangs or its ranks have
drifted apart. Three places where a script may decide, and what has to come of each:

* before ``backward()``: the rank falls one batch behind, as with uneven inputs. Ranks stay equal; at the end the
others are told of the rank that is missing, or ``xo.join()`` ends the epoch. * after ``backward()``, by its own loss:
the rank leaves out ``step()`` and holds other parameters than the others from then on. Every rank is told in the next
backward pass, with the rank named. * by the averaged gradients: all ranks see the same, and do the same.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import adam, batch, flat, make_model, sgd

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
STEPS = 7
BAD_STEP = 3
ENV = {"CROSSOVER_TIMEOUT": "6"}


def loss_of(model: nn.Module, ranks: list[int], step: int) -> Tensor:
    pairs = [batch(rank, step) for rank in ranks]
    features, targets = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
    return nn.functional.mse_loss(model(features), targets)


def loss_with_a_bad_batch(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = loss_of(model, [rank], step)
    return loss * math.nan if step == BAD_STEP and rank == 1 else loss


def before_backward(joined: bool) -> Tensor:
    invariants.start()
    model = make_model()
    job = invariants.Job(model, sgd(model))
    for step in range(STEPS):
        loss = loss_with_a_bad_batch(model, xo.rank(), step)
        if not loss.isfinite():
            continue
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    if joined:
        assert xo.join() == 0
        job.check(steps=STEPS - xo.rank())
    return flat(model)


def falling_behind() -> Tensor:
    """One process in which rank 1 goes from its third batch to its fifth and has none for the last step."""
    model = make_model()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, [0], step)]
        if step < STEPS - 1:
            losses.append(loss_of(model, [1], step if step < BAD_STEP else step + 1))
        torch.stack(losses).mean().backward()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_batch_skipped_before_backward(launcher: str) -> None:
    results = run_ranks(before_backward, 2, True, launcher=launcher, env=ENV)
    assert torch.equal(*results)
    assert (results[0] - falling_behind()).abs().max() < 1e-12
    waiting, short = run_ranks(before_backward, 2, False, launcher=launcher, env=ENV, expect_failure=True, timeout=60)
    assert short.returned, short.describe()
    assert waiting.error == "CommunicationError", waiting.describe()
    assert waiting.exit_code == 1
    assert "Absent: rank 1, which ended before this rank" in waiting.message


def after_backward(schedule: str, accumulation: int) -> tuple[int, str]:
    """At which step this rank was told, and what."""
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(
        adam(model),
        model.named_parameters(),
        schedule=schedule,
        backward_passes_per_step=accumulation,
        **invariants.SMALL_BUCKETS,
    )
    for step in range(STEPS):
        bad = step == BAD_STEP and xo.rank() == 1
        optimizer.zero_grad()
        try:
            for _ in range(accumulation):
                loss_of(model, [xo.rank()], step).backward()
        except xo.RankMismatchError as error:
            return step, str(error)
        if not bad:
            optimizer.step()
    return STEPS, "nothing"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_left_out_by_one_rank_is_told_on_every_rank(launcher: str, accumulation: int) -> None:
    results = run_ranks(after_backward, 2, "overlapped", accumulation, launcher=launcher, env=ENV)
    for step, message in results:
        assert step == BAD_STEP + 1, message
        assert message.startswith("step(): rank 1 did not call it")
        assert "averaged gradients" in message
    assert results[0] == results[1]


def test_a_step_left_out_is_told_with_priority_too() -> None:
    """There the averages of a pass are waited for in the pass after it."""
    results = run_ranks(after_backward, 2, "priority", 1, env=ENV)
    for step, message in results:
        assert step == BAD_STEP + 2, message
        assert message.startswith("step(): rank 1 did not call it")
    assert results[0] == results[1]


def by_averaged_gradients() -> tuple[Tensor, list[int]]:
    invariants.start()
    model = make_model()
    job = invariants.Job(model, adam(model))
    skipped = []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        loss_with_a_bad_batch(model, xo.rank(), step).backward()
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            job.optimizer.step()
        else:
            skipped.append(step)
    job.check(steps=STEPS - len(skipped))
    return flat(model), skipped


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_decision_by_averaged_gradients_is_the_same_everywhere(launcher: str) -> None:
    model = make_model()
    optimizer = adam(model)
    for step in range(STEPS):
        if step != BAD_STEP:
            optimizer.zero_grad()
            loss_of(model, [0, 1], step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    for trained, skipped in run_ranks(by_averaged_gradients, launcher=launcher, env=ENV):
        assert skipped == [BAD_STEP]
        assert (trained - flat(model)).abs().max() < 1e-12


def voted() -> tuple[Tensor, list[int]]:
    """The remedy that the message names: the flag is reduced, and a batch is left out by all or none."""
    invariants.start()
    model = make_model()
    job = invariants.Job(model, sgd(model))
    skipped = []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        loss = loss_with_a_bad_batch(model, xo.rank(), step)
        bad = torch.tensor(float(not loss.isfinite()))
        if xo.allreduce(bad, op=xo.Max, name="bad batch"):
            skipped.append(step)
            continue
        loss.backward()
        job.optimizer.step()
    job.check(steps=STEPS - len(skipped))
    return flat(model), skipped


def test_a_vote_keeps_ranks_together() -> None:
    (ours, skipped), (theirs, _) = run_ranks(voted, env=ENV)
    assert skipped == [BAD_STEP]
    assert torch.equal(ours, theirs)
    model = make_model()
    optimizer = sgd(model)
    for step in range(STEPS):
        if step != BAD_STEP:
            optimizer.zero_grad()
            loss_of(model, [0, 1], step).backward()
            optimizer.step()
    assert (ours - flat(model)).abs().max() < 1e-12
