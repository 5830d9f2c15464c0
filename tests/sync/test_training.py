"""Training with turns: the same bits as without, on every path, and no circle of waits between nodes."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import crossover as xo
from crossover.sync import TimeShare
from crossover.sync.holding import Phase
from tests.harness import RankFailed, RanksHung, run_ranks
from tests.sync.arbiters import process_of, until
from tests.sync.jobs import (
    free_ports,
    job_alone,
    rivals,
    two_jobs_on_two_nodes,
    with_ddp,
    with_sync_batch_norm,
)
from tests.training import batch, make_model, sgd

STEPS = 25
SHARING = "timeshare:job=a"


def shared_env(directory: Path, **more: str | None) -> dict[str, str | None]:
    return {"CROSSOVER_RUN_DIR": str(directory), "CROSSOVER_HOST": "here", "CROSSOVER_SHARING": SHARING, **more}


@functools.lru_cache
def bits_without_turns(passes: int) -> str:
    (first, _), (second, _) = run_ranks(job_alone, 2, STEPS, {}, passes)
    assert first == second
    return str(first)


DEFERRED = {"sharing": "timeshare:job=a,mode=defer"}


@pytest.mark.parametrize(
    ("passes", "options"), [(1, {}), (3, {}), (1, DEFERRED), (1, {"schedule": "priority"})], ids=str
)
def test_the_same_bits_with_turns_and_without(run_dir: Path, passes: int, options: dict[str, Any]) -> None:
    with rivals(run_dir, "cpu0", "cpu1") as turns:
        shared = run_ranks(job_alone, 2, STEPS, options, passes, env=shared_env(run_dir))
    assert [bits for bits, _ in shared] == [bits_without_turns(passes)] * 2
    assert all(tally.turns >= STEPS // 2 and not tally.alone for _, tally in shared)
    assert len(turns) >= STEPS // 2


@pytest.mark.parametrize(
    "options", [{"gate": "periodic:3"}, {"gate": "selsync:0.3"}, {"schedule": "fifo_delayed"}], ids=str
)
def test_the_same_bits_with_another_method_and_turns(run_dir: Path, options: dict[str, Any]) -> None:
    without = run_ranks(job_alone, 2, STEPS, options)
    with rivals(run_dir, "cpu0", "cpu1"):
        shared = run_ranks(job_alone, 2, STEPS, options, env=shared_env(run_dir))
    assert [bits for bits, _ in shared] == [bits for bits, _ in without]
    assert all(tally.turns >= STEPS // 2 and not tally.alone for _, tally in shared)


@pytest.mark.horovod
def test_the_same_bits_through_horovod(run_dir: Path) -> None:
    without = run_ranks(job_alone, 2, STEPS, {}, launcher="horovod")
    with rivals(run_dir, "cpu0", "cpu1"):
        shared = run_ranks(job_alone, 2, STEPS, {}, launcher="horovod", env=shared_env(run_dir))
    assert {bits for bits, _ in [*without, *shared]} == {without[0][0]}
    assert all(tally.turns >= STEPS // 2 for _, tally in shared)


def test_the_same_bits_with_ddp(run_dir: Path) -> None:
    without = run_ranks(with_ddp, 2, STEPS, False)
    with rivals(run_dir, "cpu0", "cpu1"):
        shared = run_ranks(with_ddp, 2, STEPS, True, env=shared_env(run_dir))
    assert {bits for bits, _ in [*without, *shared]} == {without[0][0]}
    assert all(tally.turns >= STEPS // 2 for _, tally in shared)


def test_collectives_within_forward_and_backward(run_dir: Path) -> None:
    """A synchronised batch normalisation waits for other ranks in the middle of a turn, twice a step."""
    without = run_ranks(with_sync_batch_norm, 2, STEPS, {})
    with rivals(run_dir, "cpu0", "cpu1"):
        shared = run_ranks(with_sync_batch_norm, 2, STEPS, {}, env=shared_env(run_dir))
    assert {bits for bits, _ in [*without, *shared]} == {without[0][0]}
    assert all(tally.turns > STEPS for _, tally in shared)  # three a step, where the rival asks in time for each


def test_a_lone_job_sends_nothing_after_the_start(run_dir: Path) -> None:
    for _, tally in run_ranks(job_alone, 2, 60, {}, env=shared_env(run_dir)):
        assert tally.sent == 1
        assert tally.turns == 0


@pytest.mark.slow
def test_nodes_that_start_in_opposite_order(run_dir: Path) -> None:
    env = {**shared_env(run_dir), "TORCHELASTIC_USE_AGENT_STORE": None, "CROSSOVER_LEASE": "1000"}
    results = run_ranks(two_jobs_on_two_nodes, 4, free_ports(2), 1000, False, env=env, timeout=240)
    assert results[0][0] == results[1][0]
    assert results[2][0] == results[3][0]
    for _, tally in results:
        assert tally.evictions == tally.alone == 0
        assert tally.turns > 0


def test_holding_while_waiting_hangs(run_dir: Path) -> None:
    """What the test above is worth: with the turn kept over the all-reduce, all four wait for each other."""
    env = {**shared_env(run_dir), "TORCHELASTIC_USE_AGENT_STORE": None, "CROSSOVER_LEASE": "1000"}
    with pytest.raises(RanksHung) as caught:
        run_ranks(two_jobs_on_two_nodes, 4, free_ports(2), 100, True, env=env, timeout=9)
    assert all(outcome.exit_code is None for outcome in caught.value.outcomes)


def kill_arbiter(lock: Path) -> None:
    pid = process_of(lock)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: process_of(lock) != pid, "its end")


def killed_arbiter(steps: int) -> tuple[int, bool]:
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), sharing=TimeShare(job="a"))
    turn = optimizer._crossover.engine.sharing.turn
    for step in range(steps):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        ((model(features) - targets) ** 2).mean().backward()
        optimizer.step()
        if step == steps // 2:
            kill_arbiter(Path(os.environ["CROSSOVER_RUN_DIR"], f"here.cpu{xo.rank()}.lock"))
    until(lambda: turn.served, "a new arbiter")
    return turn.tally.turns, turn.served


def test_a_job_outlives_its_arbiter(run_dir: Path) -> None:
    with rivals(run_dir, "cpu0", "cpu1"):
        for turns, served in run_ranks(killed_arbiter, 2, 30, env=shared_env(run_dir)):
            assert served
            assert turns > 0


def bad_directory() -> None:
    xo.init()
    model = make_model()
    xo.DistributedOptimizer(sgd(model), model.named_parameters())


def test_a_directory_that_is_not_safe_is_an_error_in_words(run_dir: Path) -> None:
    run_dir.chmod(0o777)
    with pytest.raises(RankFailed, match="could pose as the arbiter"):
        run_ranks(bad_directory, 2, env=shared_env(run_dir))
    run_dir.chmod(0o700)


def evaluate() -> int:
    """How often a rank gave its turn back while it evaluated."""
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), sharing=TimeShare(job="a"))
    turn = optimizer._crossover.engine.sharing.turn
    turn.take()
    until(lambda: turn.contended, "the rival")
    model.eval()
    with torch.no_grad():
        # Batches as small as these outrun the news that the rival asks again: as many as it takes.
        until(lambda: model(batch(0, 0)[0]) is not None and turn.tally.turns >= 2, "two turns given back")
    given_back: int = turn.tally.turns
    with xo.sync.paused():
        until(lambda: turn.phase is not Phase.LEAVING, "the pause")
    with xo.sync.turn():
        assert turn.phase is Phase.COMPUTING
    return given_back


def test_evaluation_takes_a_turn_a_batch(run_dir: Path) -> None:
    with rivals(run_dir, "cpu0", "cpu1"):
        for given_back in run_ranks(evaluate, 2, env=shared_env(run_dir)):
            assert given_back >= 2, "whoever waits goes first between two batches"
