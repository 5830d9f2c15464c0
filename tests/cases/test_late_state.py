"""Situations 20, 31, 34, 38, 44, 46 and 47 with updates that come late: state, uneven ranks, and leaving.

The rule of a checkpoint: with every rank's state saved and loaded, training goes on bit for bit, gradients on their way
included. With the state of rank 0 alone these are dropped and counted, and counters go on. ``flush()`` first loses
nothing.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import crossover as xo
from crossover.deft import DeFT
from crossover.schedulers.delayed import DelayedSchedule
from tests.cases import invariants
from tests.cases.late import KINDS, SMALL, decisions, digest, make_schedule
from tests.deft.reference import Delayed, adam, momentum
from tests.harness import run_ranks
from tests.training import batch, make_model

STEPS = 16
SAVED_AFTER = 8
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def make_job(kind: str, make_optimizer: Any = adam, seed: int = 0) -> invariants.Job:
    model = make_model(seed)
    return invariants.Job(model, make_optimizer(model), schedule=make_schedule(kind), **SMALL)


def schedule_of(job: invariants.Job) -> DelayedSchedule:
    schedule = invariants.engine_of(job.optimizer).schedule
    assert isinstance(schedule, DelayedSchedule)
    return schedule


def train(job: invariants.Job, steps: range) -> None:
    for step in steps:
        job.optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        nn.functional.mse_loss(job.model(features), targets).backward()
        job.optimizer.step()


# -- 34: resumed jobs --------------------------------------------------------------------------------------------------


def first_half(folder: Path) -> dict[str, Tensor]:
    invariants.start()
    results = {}
    for kind in KINDS:
        job = make_job(kind)
        train(job, range(SAVED_AFTER))
        mark = invariants._log.mark
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        torch.save(state, folder / f"{kind} {xo.rank()}.pt")
        assert invariants._log.mark == mark, "state_dict() starts no collective"
        train(job, range(SAVED_AFTER, STEPS))
        results[f"{kind}, unbroken"] = digest(job.model).clone()
        job.check(steps=STEPS)
    return results


def second_half(folder: Path) -> dict[str, Any]:
    invariants.start()
    results: dict[str, Any] = {}
    for kind in KINDS:
        job = make_job(kind, seed=5)
        state = torch.load(folder / f"{kind} {xo.rank()}.pt")
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])
        train(job, range(SAVED_AFTER, STEPS))
        results[f"{kind}, unbroken"] = digest(job.model).clone()
        job.check(steps=STEPS - SAVED_AFTER)
        job = make_job(kind, seed=5 + xo.rank())
        if xo.rank() == 0:
            job.model.load_state_dict(state["model"])
            job.optimizer.load_state_dict(state["optimizer"])
        xo.broadcast_parameters(job.model.state_dict(), root_rank=0)
        xo.broadcast_optimizer_state(job.optimizer, root_rank=0)
        train(job, range(SAVED_AFTER, STEPS))
        schedule = schedule_of(job)
        assert schedule.updates > SAVED_AFTER // 2, "counters go on"
        if isinstance(schedule, DeFT):
            assert schedule.delayed, "the warm-up is not repeated"
        job.check(steps=STEPS - SAVED_AFTER)
        results[f"{kind}, rank 0 alone"] = digest(job.model).clone()
    return results


def test_a_resumed_job_goes_on(tmp_path: Path) -> None:
    before, after = (run_ranks(half, 2, tmp_path) for half in (first_half, second_half))
    for kind in KINDS:
        for rank in range(2):
            assert torch.equal(before[rank][f"{kind}, unbroken"], after[rank][f"{kind}, unbroken"]), kind
        assert torch.equal(after[0][f"{kind}, rank 0 alone"], after[1][f"{kind}, rank 0 alone"]), kind
        assert not torch.equal(after[0][f"{kind}, rank 0 alone"], after[0][f"{kind}, unbroken"]), "something was lost"


def rolled_back() -> None:
    """State loaded into a job that is training: ours is taken back as it was; a bare one leaves alone what is ours."""
    invariants.start()
    for kind in KINDS:
        job = make_job(kind)
        train(job, range(SAVED_AFTER))
        state = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
        train(job, range(SAVED_AFTER, STEPS))
        first = digest(job.model).clone()
        job.model.load_state_dict(state[0])
        job.optimizer.load_state_dict(copy.deepcopy(state[1]))
        train(job, range(SAVED_AFTER, STEPS))
        assert torch.equal(digest(job.model), first), kind
        bare = {key: value for key, value in state[1].items() if key != "crossover"}
        job.optimizer.load_state_dict(bare)
        before = digest(job.model).clone()
        job.optimizer.flush()
        assert not torch.equal(digest(job.model), before), "what was on its way is applied"
        assert schedule_of(job).dropped == 0
        train(job, range(3))
        job.check(steps=2 * STEPS - SAVED_AFTER + 3)


def test_state_loaded_into_a_living_job() -> None:
    run_ranks(rolled_back, 2)


# -- 31: hidden steps --------------------------------------------------------------------------------------------------


def saved_by_the_checkpoint_library() -> None:
    invariants.start()
    for kind in KINDS:
        results = []
        for saves in (False, True):
            job = make_job(kind, lambda model: torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1))
            for step in range(STEPS):
                if saves and step in (0, 5, 6):
                    state = get_optimizer_state_dict(job.model, job.optimizer)
                    if step == 5:
                        set_optimizer_state_dict(job.model, job.optimizer, state)
                train(job, range(step, step + 1))
            results.append(digest(job.model).clone())
            job.optimizer.flush()
            invariants.require_same("parameters", invariants.digests(job.model))
        assert torch.equal(*results), kind


def test_the_checkpoint_library_changes_nothing() -> None:
    run_ranks(saved_by_the_checkpoint_library, 2)


# -- 38: alone ---------------------------------------------------------------------------------------------------------


def alone() -> None:
    xo.init()
    threads = threading.active_count()
    for kind in KINDS:
        model, bare_model = make_model(), make_model()
        optimizer: Any = xo.DistributedOptimizer(momentum(model), schedule=make_schedule(kind))
        bare = momentum(bare_model)
        for step in range(6):
            for each, stepped in ((model, optimizer), (bare_model, bare)):
                stepped.zero_grad()
                features, targets = batch(0, step)
                nn.functional.mse_loss(each(features), targets).backward()
                stepped.step()
        optimizer.flush()
        assert torch.equal(digest(model), digest(bare_model))
    assert threading.active_count() == threads


def test_one_rank_is_the_bare_optimizer() -> None:
    run_ranks(alone, 1, launcher="none")


# -- 44: uneven inputs -------------------------------------------------------------------------------------------------


def joined(way: str) -> None:
    invariants.start()
    for kind in KINDS:
        job = make_job(kind)
        count = (10, 7)[xo.rank()]
        for _ in range(2):
            with Join([job.optimizer]) if way == "Join" else contextlib.nullcontext():
                train(job, range(count))
            if way == "join()":
                assert xo.join() == 0
        job.optimizer.flush()
        assert not invariants._log.open
        invariants.require_same("parameters", invariants.digests(job.model))
    invariants.require_same_collectives()


@pytest.mark.parametrize(("way", "launcher"), [("Join", "torch"), ("join()", "torch"), ("join()", "horovod")])
def test_uneven_inputs(way: str, launcher: str) -> None:
    if launcher == "horovod":
        pytest.importorskip("horovod.torch")
    run_ranks(joined, 2, way, launcher=launcher, env={"CROSSOVER_TIMEOUT": "20"})


# -- 46: a rank that skips ---------------------------------------------------------------------------------------------


def skipping(kind: str) -> None:
    xo.init()
    job = make_job(kind)
    for step in range(STEPS):
        features, targets = batch(xo.rank(), step)
        job.optimizer.zero_grad()
        nn.functional.mse_loss(job.model(features), targets).backward()
        if step != 5 or xo.rank() == 0:
            job.optimizer.step()


@pytest.mark.parametrize("kind", ["fifo", "deft"])
def test_a_rank_that_skips_a_step_is_named_on_all(kind: str) -> None:
    for outcome in run_ranks(skipping, 2, kind, env={"CROSSOVER_TIMEOUT": "10"}, expect_failure=True):
        assert outcome.error == "RankMismatchError", outcome.describe()
        assert "rank 1 did not" in outcome.message


# -- 47: leaving -------------------------------------------------------------------------------------------------------


def leaving(kind: str) -> tuple[float, Tensor]:
    xo.init()
    job = make_job(kind, momentum)
    train(job, range(SAVED_AFTER))
    xo.shutdown()
    return time.monotonic(), digest(job.model)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", ["fifo merging", "deft"])
def test_what_is_on_its_way_is_applied_when_a_job_ends(kind: str, launcher: str) -> None:
    outcomes = run_ranks(leaving, 2, kind, launcher=launcher, expect_failure=True)
    now = time.monotonic()
    reference = Delayed(momentum, [0, 1], gain=lambda steps: 1.0)
    for step, decision in enumerate(decisions(kind, SAVED_AFTER)):
        reference.step(step, decision)
    reference.flush()
    for outcome in outcomes:
        assert outcome.returned, outcome.describe()
        assert now - outcome.value[0] < 5
        torch.testing.assert_close(outcome.value[1], reference.result(), rtol=0, atol=1e-12)


# -- 20: one backward, two optimizers ----------------------------------------------------------------------------------


def adversaries() -> None:
    """The generator's loss passes through the discriminator: averages that no step applies. DeFT stays synchronous."""
    invariants.start()
    generator, discriminator = make_model(), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    xo.broadcast_parameters(discriminator.state_dict(), root_rank=0)
    jobs = [
        invariants.Job(model, momentum(model), schedule=DeFT(warmup_steps=6, capacity=(1, 1), bucket_bytes=100))
        for model in (generator, discriminator)
    ]
    for step in range(10):
        features, targets = batch(xo.rank(), step)
        for turn, job in enumerate((jobs[1], jobs[0])):
            job.optimizer.zero_grad()
            fake = generator(features)
            scores = discriminator(fake if turn else torch.cat([fake.detach(), targets]))
            nn.functional.softplus(scores).mean().backward()
            job.optimizer.step()
    stays = schedule_of(jobs[1])
    assert isinstance(stays, DeFT)
    assert not stays.delayed
    assert "no step() came" in str(stays.decisions[-1])
    assert schedule_of(jobs[0]).suits
    for job in jobs:
        job.check(steps=10)


def test_averages_that_are_thrown_away_keep_a_job_synchronous() -> None:
    run_ranks(adversaries, 2)
