"""Situation 45: one rank fails, and its error is buried under what the others say.

Survivors report a lost peer, later and louder than the cause. Here the failing rank's own traceback is the last thing
on its stderr; the others stop within the time-out, say which collective they were in and which rank is absent, and
where it could still speak, repeat what it said. No exit code is zero.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.harness import Outcome, run_ranks
from tests.training import batch, make_model, sgd

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
FAILS_AT = 3
STEPS = 6
TIMEOUT_S = 6.0


class OutOfMemory(RuntimeError):
    """Stands for the failure on one rank."""


class FailingBackward(torch.autograd.Function):
    """Passes values on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise OutOfMemory("rank 1 is out of memory")


def fail(*_: Any) -> None:
    raise OutOfMemory("rank 1 is out of memory")


def job(place: str) -> None:
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(
        sgd(model), model.named_parameters(), bucket_cap_mb=1e-3, first_bucket_cap_mb=1e-3
    )
    for step in range(STEPS):
        failing = step == FAILS_AT and xo.rank() == 1
        if failing and place == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if failing and place == "hook":
            model[2].weight.register_hook(fail)
        if failing and place == "forward":
            fail()
        if failing and place == "step":
            optimizer.register_step_pre_hook(fail)
        features, targets = batch(xo.rank(), step)
        middle = model[:3](features)
        if failing and place == "backward":
            middle = FailingBackward.apply(middle)
        optimizer.zero_grad()
        nn.functional.mse_loss(model[3:](middle), targets).backward()
        optimizer.step()


def outcomes_of(place: str, launcher: str) -> tuple[Outcome, Outcome]:
    survivor, failed = run_ranks(
        job, 2, place, launcher=launcher, env={"CROSSOVER_TIMEOUT": str(TIMEOUT_S)}, expect_failure=True, timeout=60
    )
    return survivor, failed


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("place", ["forward", "backward", "hook", "step"])
def test_the_failing_ranks_own_error_comes_last_and_is_repeated(place: str, launcher: str) -> None:
    survivor, failed = outcomes_of(place, launcher)
    assert failed.error == "OutOfMemory", failed.describe()
    assert failed.exit_code == 1
    assert failed.stderr.rstrip().endswith("OutOfMemory: rank 1 is out of memory"), failed.stderr
    check_survivor(survivor)
    assert "rank 1: raised OutOfMemory: rank 1 is out of memory" in survivor.message, survivor.message
    assert "Absent: rank 1" in survivor.message


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_is_named(launcher: str) -> None:
    survivor, failed = outcomes_of("killed", launcher)
    assert failed.exit_code == -signal.SIGKILL
    check_survivor(survivor)
    assert "Absent: rank 1" in survivor.message, survivor.message
    assert "killed" in survivor.message


def check_survivor(survivor: Outcome) -> None:
    assert survivor.error == "CommunicationError", survivor.describe()
    assert survivor.exit_code == 1
    assert "optimizer0.bucket" in survivor.message, survivor.message
    assert "on rank 0 of ranks 0,1" in survivor.message
    assert "CommunicationError" in survivor.stderr


def caught_and_ended() -> float:
    """A script that catches the error, saves what it has and goes: nothing keeps the process."""
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    features, targets = batch(xo.rank(), 0)
    nn.functional.mse_loss(model(features), targets).backward()
    optimizer.step()
    if xo.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(xo.CommunicationError):
        nn.functional.mse_loss(model(features), targets).backward()
    optimizer.zero_grad()
    return time.time()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_that_catches_the_error_can_end(launcher: str) -> None:
    env = {"CROSSOVER_TIMEOUT": str(TIMEOUT_S)}
    survivor, _ = run_ranks(caught_and_ended, 2, launcher=launcher, env=env, expect_failure=True, timeout=60)
    assert survivor.returned, survivor.describe()
    assert time.time() - survivor.value < 30
