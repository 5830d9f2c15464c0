"""Situation 47: the script ends, early or at its end, and the process stays.

Background loops that wait for peers keep it alive, or turn a good run into an error. Here every way out ends the
process within five seconds and with the exit code that the script asked for: a ``break`` on all ranks, ``sys.exit``,
Ctrl-C, an optimizer that was simply dropped. Where one rank leaves alone the others are told that it left.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from tests.harness import Outcome, run_ranks
from tests.training import batch, make_model, sgd

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
ENDS_AT = 5
STEPS = 50
ENV = {"CROSSOVER_TIMEOUT": "6"}


def job(way: str, schedule: str) -> float:
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=schedule)
    for step in range(STEPS):
        if step == ENDS_AT:
            if way == "break" or (way == "break on rank 1" and xo.rank() == 1):
                break
            if way == "sys.exit(0)":
                sys.exit(0)
            if way == "sys.exit(3)":
                sys.exit(3)
            if way == "Ctrl-C":
                os.kill(os.getpid(), signal.SIGINT)
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        nn.functional.mse_loss(model(features), targets).backward()
        if step == ENDS_AT - 1 and way == "in flight":
            return time.monotonic()  # averaged, never stepped, never flushed
        optimizer.step()
        if step == ENDS_AT - 1 and way == "dropped":
            reference = weakref.ref(optimizer)
            del optimizer
            gc.collect()
            assert reference() is None, "something keeps the optimizer"
            features, targets = batch(xo.rank(), 0)
            nn.functional.mse_loss(model(features), targets).backward()
            break
    assert [thread for thread in threading.enumerate() if not thread.daemon] == [threading.main_thread()]
    return time.monotonic()


def left(way: str, launcher: str = "torch", schedule: str = "overlapped") -> list[Outcome]:
    return run_ranks(job, 2, way, schedule, launcher=launcher, env=ENV, expect_failure=True, timeout=60)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("way", ["break", "in flight", "dropped"])
def test_a_good_run_ends_by_itself_with_code_0(way: str, launcher: str) -> None:
    for schedule in ("overlapped", "priority") if (way, launcher) == ("in flight", "torch") else ("overlapped",):
        outcomes = left(way, launcher, schedule)
        now = time.monotonic()
        for outcome in outcomes:
            assert outcome.returned, outcome.describe()
            assert now - outcome.value < 5, outcome.describe()
            assert "Error" not in outcome.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("way", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3)])
def test_sys_exit_keeps_its_code(way: str, code: int, launcher: str) -> None:
    for outcome in left(way, launcher):
        assert outcome.exit_code == code, outcome.describe()
        assert "Error" not in outcome.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_ends_all_ranks(launcher: str) -> None:
    for outcome in left("Ctrl-C", launcher):
        assert outcome.error == "KeyboardInterrupt", outcome.describe()
        assert outcome.exit_code == 130
        assert outcome.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_where_one_leaves_the_others_are_told(launcher: str) -> None:
    waiting, gone = left("break on rank 1", launcher)
    assert gone.returned, gone.describe()
    assert waiting.error == "CommunicationError", waiting.describe()
    assert waiting.exit_code == 1
    assert "Absent: rank 1, which ended before this rank" in waiting.message


def waits_for_ctrl_c() -> None:
    """Rank 1 never comes; rank 0 is interrupted while it waits for it."""
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    if xo.rank() == 1:
        time.sleep(7)
        os._exit(0)
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    nn.functional.mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
    optimizer.step()


def test_ctrl_c_during_a_wait() -> None:
    waiting, never_there = run_ranks(waits_for_ctrl_c, env={"CROSSOVER_TIMEOUT": "30"}, expect_failure=True, timeout=60)
    assert waiting.error == "KeyboardInterrupt", waiting.describe()
    assert waiting.exit_code == 130
    assert waiting.seconds < never_there.seconds - 2, "it ended only when the other rank did"


def started_and_ended_again() -> list[torch.Tensor]:
    """shutdown() and init() in one process: the second job works like the first."""
    results = []
    for _ in range(2):
        xo.init()
        model = make_model()
        optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            features, targets = batch(xo.rank(), step)
            nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        del optimizer
        xo.shutdown()
        assert not xo.is_initialized()
    return results


def test_a_job_after_a_job() -> None:
    for first, second in run_ranks(started_and_ended_again):
        assert torch.equal(first, second)
