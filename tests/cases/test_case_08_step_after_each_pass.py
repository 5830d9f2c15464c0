"""Situation 8: ``step()`` is called after every backward pass although a window of four was asked for.

Libraries differ in what a window counts: backward passes before one ``step()``, or calls of ``step()``. A script
written for the second kind and run on the first trains without accumulation, several times slower than its author
thinks. With us each ``step()`` applies what was computed for it, averaged over ranks, so the result is that of a
window of one; and one warning on rank 0 says so and names both ways out. A window that is left incomplete at the end
of an epoch is no reason for it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import flat, make_model, sgd

STEPS, WINDOW = 12, 4


def train(model: nn.Module, optimizer: Any, ranks: list[int], passes: list[int]) -> None:
    """Each step after as many backward passes as ``passes`` says."""
    for step, parts in enumerate(passes):
        for part in range(parts):
            for _, features, targets in invariants.parts_of_step(step, ranks, part):
                (nn.functional.mse_loss(model(features), targets) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def warnings_of(passes: list[int], schedule: str) -> list[str]:
    model = make_model()
    job = Job(model, sgd(model), backward_passes_per_step=WINDOW, schedule=schedule, **SMALL_BUCKETS)
    with invariants.warnings_of_the_library() as warnings:
        train(model, job.optimizer, [xo.rank()], passes)
    job.check(steps=len(passes))
    alone = make_model()
    train(alone, sgd(alone), list(range(xo.size())), passes)
    invariants.require_close("parameters", flat(model), flat(alone))
    return warnings


def step_after_each_pass() -> None:
    invariants.start()
    for schedule in ("overlapped", "priority"):
        warnings = warnings_of([1] * STEPS, schedule)
        assert len(warnings) == (1 if xo.rank() == 0 else 0), warnings
        for warning in warnings:
            assert "after 1 of 4 backward passes" in warning
            assert "call step() once in backward_passes_per_step passes" in warning, "one usage"
            assert "backward_passes_per_step=1" in warning, "the other"
        warnings = warnings_of([4, 4, 1, 4, 4, 1, 4, 4, 1], schedule)
        assert not warnings, warnings


def test_it_trains_without_accumulation_and_says_so_once() -> None:
    run_ranks(step_after_each_pass, 2)
