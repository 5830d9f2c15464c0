"""Situation 34: a job is stopped and resumed, and what the library counted is not what it was.

Without a gate or a delay the only counter is the place within an accumulation. The rule: gradients of an unfinished
window are in no checkpoint. A resumed job starts the window anew, equal bit for bit to the unbroken run if it passes
the same microbatches again, and to a run that dropped the window with ``zero_grad()`` if it does not. Our checkpoint
is the bare optimizer's, so that one loads here without a word, and ours there.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import adamw_three_groups, batch, flat, make_model

PASSES = 3
SAVED_AFTER = 7
STEPS = 12


def accumulate(model: nn.Module, ranks: list[int], step: int, parts: range) -> None:
    for part in parts:
        pairs = [batch(rank, step, part) for rank in ranks]
        features, targets = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
        nn.functional.mse_loss(model(features), targets).backward()


def make_job(seed: int = 0) -> tuple[nn.Module, Any, Any]:
    model = make_model(seed)
    optimizer = xo.DistributedOptimizer(
        adamw_three_groups(model), model.named_parameters(), backward_passes_per_step=PASSES
    )
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def train(job: tuple[nn.Module, Any, Any], steps: range, ranks: list[int], passed: int = 0) -> None:
    """Steps of three passes each; ``passed`` passes of the first step are in ``p.grad`` already, or are left out."""
    model, optimizer, scheduler = job
    for step in steps:
        accumulate(model, ranks, step, range(passed if step == steps.start else 0, PASSES))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def save(job: tuple[nn.Module, Any, Any], path: Path) -> None:
    torch.save([part.state_dict() for part in job], path)


def load(job: tuple[nn.Module, Any, Any], path: Path) -> None:
    for part, state in zip(job, torch.load(path), strict=True):
        part.load_state_dict(state)


def first_half(path: Path) -> dict[str, Tensor]:
    """Unbroken runs, one of which saves in the middle of a window on rank 0."""
    invariants.start()
    results = {}
    job = make_job()
    train(job, range(SAVED_AFTER), [xo.rank()])
    accumulate(job[0], [xo.rank()], SAVED_AFTER, range(1))
    if xo.rank() == 0:
        save(job, path)
    train(job, range(SAVED_AFTER, STEPS), [xo.rank()], passed=1)
    results["unbroken"] = flat(job[0])
    dropping = make_job()
    train(dropping, range(SAVED_AFTER), [xo.rank()])
    accumulate(dropping[0], [xo.rank()], SAVED_AFTER, range(1))
    dropping[1].zero_grad()
    train(dropping, range(SAVED_AFTER + 1, STEPS), [xo.rank()])
    results["dropped"] = flat(dropping[0])
    invariants.require_same_collectives()
    return results


def second_half(path: Path) -> dict[str, Tensor]:
    """Resumed in new processes; rank 0 alone reads the file."""
    invariants.start()
    results = {}
    for name, start in (("unbroken", SAVED_AFTER), ("dropped", SAVED_AFTER + 1)):
        job = make_job(seed=xo.rank())
        if xo.rank() == 0:
            load(job, path)
        xo.broadcast_parameters(job[0].state_dict(), root_rank=0)
        xo.broadcast_optimizer_state(job[1], root_rank=0)
        job[2].load_state_dict(xo.broadcast_object(job[2].state_dict() if xo.rank() == 0 else None, root_rank=0))
        assert not invariants.engine_of(job[1]).unshared
        train(job, range(start, STEPS), [xo.rank()])
        results[name] = flat(job[0])
    invariants.require_same_collectives()
    return results


def test_resumed_in_the_middle_of_a_window(tmp_path: Path) -> None:
    halves = [run_ranks(half, 2, tmp_path / "checkpoint.pt") for half in (first_half, second_half)]
    for before, after in zip(*halves, strict=True):
        for name in before:
            assert torch.equal(before[name], after[name]), name
    assert all(torch.equal(halves[0][0][name], halves[0][1][name]) for name in halves[0][0])
    assert not torch.equal(halves[0][0]["unbroken"], halves[0][0]["dropped"])
    model = make_model()
    optimizer = adamw_three_groups(model)
    train((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)), range(STEPS), [0, 1])
    assert (halves[0][0]["unbroken"] - flat(model)).abs().max() < 1e-12


def plain_checkpoints() -> Tensor:
    """A bare optimizer's checkpoint in ours, and ours in a bare one, both without a word."""
    xo.init()
    bare_model = make_model()
    bare: Any = adamw_three_groups(bare_model)
    accumulate(bare_model, [0, 1], 0, range(PASSES))
    bare.step()
    bare.zero_grad()
    with invariants.warnings_of_the_library() as warnings:
        model, optimizer, scheduler = make_job()
        model.load_state_dict(bare_model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(bare.state_dict()))
        train((model, optimizer, scheduler), range(1, 3), [xo.rank()])
        adamw_three_groups(make_model()).load_state_dict(optimizer.state_dict())
    assert warnings == []
    invariants.require_same("parameters", invariants.digests(model))
    return flat(model)


def test_plain_checkpoints_come_and_go() -> None:
    results = run_ranks(plain_checkpoints)
    model = make_model()
    optimizer = adamw_three_groups(model)
    accumulate(model, [0, 1], 0, range(PASSES))
    optimizer.step()
    optimizer.zero_grad()
    train((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)), range(1, 3), [0, 1])
    for result in results:
        assert (result - flat(model)).abs().max() < 1e-12


def loaded_while_accumulating() -> None:
    """State loaded into a living job in the middle of a window: the window goes on until ``zero_grad()``."""
    invariants.start()
    model, optimizer, scheduler = make_job()
    train((model, optimizer, scheduler), range(1), [xo.rank()])
    saved = copy.deepcopy(optimizer.state_dict())
    accumulate(model, [xo.rank()], 1, range(2))
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    before = flat(model).clone()
    train((model, optimizer, scheduler), range(1, 2), [xo.rank()])
    assert not torch.equal(before, flat(model))
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()


def test_state_loaded_while_accumulating() -> None:
    run_ranks(loaded_while_accumulating)
