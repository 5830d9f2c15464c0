"""Situation 7: the number of microbatches in an epoch is no multiple of the accumulation window.

With seven microbatches and a window of three, one is left over. A script may step with it, drop it with
``zero_grad()`` (the optimizer's or the model's), or let it count towards the next epoch's first window. A counter
that is not put back makes the second epoch fail, or shifts every window in it. With us all three are legal, equal to
one process that does the same, and nothing is carried over that the script did not keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import flat, make_model, sgd

EPOCHS, MICROBATCHES, WINDOW = 3, 7, 3
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
AtEpochEnd = Callable[[nn.Module, Any], None]


def step_with_it(model: nn.Module, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def drop_it(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def drop_it_in_place(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def drop_it_through_the_model(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()


def drop_it_through_the_model_in_place(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad(set_to_none=False)


def train(model: nn.Module, optimizer: Any, at_epoch_end: AtEpochEnd, ranks: list[int]) -> None:
    for epoch in range(EPOCHS):
        for number in range(MICROBATCHES):
            for _, features, targets in invariants.parts_of_step(epoch, ranks, number):
                (nn.functional.mse_loss(model(features), targets) / (WINDOW * len(ranks))).backward()
            if (number + 1) % WINDOW == 0:
                optimizer.step()
                optimizer.zero_grad()
        at_epoch_end(model, optimizer)


def carry_over(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    """Windows go on over the end of the epoch: the script counts microbatches itself, and clears after steps only."""
    for number in range(EPOCHS * MICROBATCHES):
        for _, features, targets in invariants.parts_of_step(number, ranks):
            (nn.functional.mse_loss(model(features), targets) / (WINDOW * len(ranks))).backward()
        if (number + 1) % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()


def compare(run: Callable[[nn.Module, Any, list[int]], None], steps: int, shares: int, **options: Any) -> Tensor:
    model = make_model()
    job = Job(model, sgd(model), backward_passes_per_step=WINDOW, **SMALL_BUCKETS, **options)
    with invariants.warnings_of_the_library() as warnings:
        run(model, job.optimizer, [xo.rank()])
    assert not warnings, warnings
    job.check(steps=steps)
    assert invariants.engine_of(job.optimizer).shares == shares, "a window was shared early or late"
    alone = make_model()
    run(alone, sgd(alone), list(range(xo.size())))
    invariants.require_close("parameters", flat(model), flat(alone))
    return flat(model)


def every_epoch_end() -> None:
    invariants.start()
    full = EPOCHS * (MICROBATCHES // WINDOW)
    drops = [drop_it, drop_it_in_place, drop_it_through_the_model, drop_it_through_the_model_in_place]
    for schedule in ("overlapped", "priority"):
        for at_end in [step_with_it, *drops]:
            steps = full + (EPOCHS if at_end is step_with_it else 0)

            def run(model: nn.Module, optimizer: Any, ranks: list[int], at_end: AtEpochEnd = at_end) -> None:
                train(model, optimizer, at_end, ranks)

            compare(run, steps, steps, schedule=schedule)
        whole = EPOCHS * MICROBATCHES // WINDOW
        compare(carry_over, whole, whole, schedule=schedule)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_leftover_is_stepped_with_dropped_or_kept(launcher: str) -> None:
    run_ranks(every_epoch_end, 2, launcher=launcher)
