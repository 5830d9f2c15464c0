"""Situation 2: ``GradScaler`` finds an overflow and does not call ``step()``.

Where averages started in ``backward()`` are collected in ``step()``, a skipped step leaves them uncollected and the
next ``zero_grad()`` fails. With us nothing is left open when ``backward()`` returns, so a skipped step is no step and
nothing else: no error, no collective still running, no false warning. Every rank sees the averaged overflow,
whichever rank had it, so that all skip the same step and halve the scale together. The same holds with accumulation
over two passes, counted by us or done with ``no_sync()``, and for fused optimizers, which are stepped and skip
inside. The Priority schedule has no averaged gradient for the scaler to look at and refuses it, on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import flat, make_model, sgd

STEPS = 8
OVERFLOWS = (3, 6)
BAD_RANK = 1
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def make_scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)


@contextlib.contextmanager
def overflow(model: nn.Module, active: bool) -> Any:
    """One parameter's gradient becomes infinite in backward passes inside."""
    if not active:
        yield
        return
    handle = model[2].weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    yield
    handle.remove()


def backward(model: nn.Module, scaler: Any, step: int, part: int, parts: int, ranks: list[int]) -> None:
    for rank, features, targets in invariants.parts_of_step(step, ranks, part):
        # in the first part at one step, in the last at the other
        bad = rank == BAD_RANK and (step, part) in ((OVERFLOWS[0], 0), (OVERFLOWS[1], parts - 1))
        with overflow(model, bad):
            loss = nn.functional.mse_loss(model(features), targets) / (parts * len(ranks))
            scaler.scale(loss).backward()


def finish(model: nn.Module, optimizer: Any, scaler: Any) -> float:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return float(scaler.get_scale())


def reference(make_optimizer: MakeOptimizer, parts: int) -> tuple[list[float], Tensor]:
    model, scaler = make_model(), make_scaler()
    optimizer, scales = make_optimizer(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            backward(model, scaler, step, part, parts, list(range(xo.size())))
        scales.append(finish(model, optimizer, scaler))
    return scales, flat(model)


def train(make_optimizer: MakeOptimizer, parts: int = 1, counted: bool = True, zero_last: bool = False) -> None:
    model, scaler = make_model(), make_scaler()
    passes = parts if counted else 1
    job = Job(model, make_optimizer(model), backward_passes_per_step=passes, **SMALL_BUCKETS)
    optimizer, scales = job.optimizer, []
    with invariants.warnings_of_the_library() as warnings:
        for step in range(STEPS):
            if not zero_last:
                optimizer.zero_grad()
            for part in range(parts):
                local = not counted and part < parts - 1
                with optimizer.no_sync() if local else contextlib.nullcontext():
                    backward(model, scaler, step, part, parts, [xo.rank()])
            scales.append(finish(model, optimizer, scaler))
            if zero_last:
                optimizer.zero_grad()
    assert not warnings, warnings
    expected_scales, expected = reference(make_optimizer, parts)
    invariants.require_same("scales", scales)
    assert scales == expected_scales
    for step in OVERFLOWS:
        assert scales[step] == scales[step - 1] / 2, f"step {step} was skipped on rank {xo.rank()}"
    invariants.require_close("parameters", flat(model), expected)
    skips_inside = getattr(optimizer, "_step_supports_amp_scaling", False)
    job.check(steps=STEPS if skips_inside else STEPS - len(OVERFLOWS))


def refused_by_priority() -> None:
    model, scaler = make_model(), make_scaler()
    job = Job(model, sgd(model), schedule="priority")
    for step in range(3):
        job.optimizer.zero_grad()
        backward(model, scaler, step, 0, 1, [xo.rank()])
        for ask in (scaler.unscale_, scaler.step):
            with pytest.raises(ValueError, match=r"GradScaler.*Overlapped"):
                ask(job.optimizer)
    job.check(steps=0)


def many_overflows() -> None:
    """The start of training in half precision: the first steps are all skipped."""
    model, scaler = make_model(), make_scaler()
    job = Job(model, sgd(model))
    with invariants.warnings_of_the_library() as warnings:
        for step in range(STEPS):
            job.optimizer.zero_grad()
            features, targets = invariants.parts_of_step(step, [xo.rank()])[0][1:]
            with overflow(model, step < 5 and xo.rank() == BAD_RANK):
                scaler.scale(nn.functional.mse_loss(model(features), targets)).backward()
            finish(model, job.optimizer, scaler)
    assert not warnings, warnings
    invariants.require_same("scale", scaler.get_scale())
    assert scaler.get_scale() == 1024.0 / 2**5
    job.check(steps=STEPS - 5)


def skip_in_every_way() -> None:
    invariants.start()
    train(sgd)
    train(sgd, zero_last=True)
    train(sgd, parts=2)
    train(sgd, parts=2, counted=False)
    train(fused_adam)
    train(fused_adam, parts=2)
    many_overflows()
    refused_by_priority()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_skipped_step_is_skipped_by_all_and_leaves_nothing_behind(launcher: str) -> None:
    run_ranks(skip_in_every_way, 2, launcher=launcher)
