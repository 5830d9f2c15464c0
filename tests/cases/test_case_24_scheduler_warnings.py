"""Situation 24: a learning-rate scheduler is given the wrapped optimizer.

Schedulers test the class of what they are given and replace its ``step``, so a wrapper that is another object is
refused or warned about at every run. Ours is the user's own object: every scheduler of torch takes it, built before
wrapping or after, with warnings turned into errors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import batch, make_model, sgd

STEPS = 5
BUILDERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    known = {name for name in schedulers.__all__ if name != "LRScheduler"}
    assert known - BUILDERS.keys() == set()


def rates(model: nn.Module, optimizer: Any, scheduler: Any, rank: int) -> list[float]:
    """The learning rate at each step."""
    seen = []
    for step in range(STEPS):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        features, targets = batch(rank, step)
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
    return seen


def every_scheduler(schedule: str) -> dict[str, list[float]]:
    xo.init()
    warnings.simplefilter("error")
    curves: dict[str, list[float]] = {}
    for name, build in BUILDERS.items():
        if name not in dir(schedulers):
            continue
        for before in (True, False):
            model = make_model()
            optimizer = sgd(model)
            scheduler = build(optimizer) if before else None
            optimizer = xo.DistributedOptimizer(optimizer, model.named_parameters(), schedule=schedule)
            scheduler = scheduler or build(optimizer)
            curves[f"{name}, {before}"] = rates(model, optimizer, scheduler, xo.rank())
            optimizer.flush()
        invariants.require_same("parameters", invariants.digests(model))
    return curves


@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_no_warning_and_the_curve_of_the_bare_optimizer(schedule: str) -> None:
    first, second = run_ranks(every_scheduler, 2, schedule)
    assert first == second
    for name, curve in first.items():
        model = make_model()
        optimizer = sgd(model)
        assert curve == rates(model, optimizer, BUILDERS[name.partition(",")[0]](optimizer), 0), name


def skipped_first_step(overflow_on: list[int], built_first: bool) -> dict[str, Any]:
    model = make_model().float()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedulers.StepLR(optimizer, 3) if built_first else None
    optimizer = xo.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = scheduler or schedulers.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales, steps = [], []
    optimizer.register_step_post_hook(lambda *_: steps.append(step))
    for step in range(4):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        loss = nn.functional.mse_loss(model(features.float()), targets.float())
        if step == 0 and xo.rank() in overflow_on:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        scales.append(scaler.get_scale())
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same("scales", scales)
    return {"scales": scales, "steps": steps, "rate": optimizer.param_groups[0]["lr"]}


def skipped_first_steps() -> list[dict[str, Any]]:
    xo.init()
    warnings.simplefilter("error")
    return [skipped_first_step(ranks, first) for ranks in ([0, 1], [1]) for first in (True, False)]


def test_a_first_step_that_the_scaler_skips_is_no_wrong_order() -> None:
    for cases in run_ranks(skipped_first_steps):
        for seen in cases:
            assert seen["steps"] == [1, 2, 3]
            assert seen["scales"] == [512.0] * 4
            assert seen["rate"] == pytest.approx(0.01)


def wrong_order() -> str:
    xo.init()
    model = make_model()
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    scheduler = schedulers.StepLR(optimizer, 3)
    features, targets = batch(xo.rank(), 0)
    nn.functional.mse_loss(model(features), targets).backward()
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        scheduler.step()
    optimizer.step()
    return " ".join(str(warning.message) for warning in caught)


def test_a_true_wrong_order_is_still_told() -> None:
    for said in run_ranks(wrong_order):
        assert "before `optimizer.step()`" in said
