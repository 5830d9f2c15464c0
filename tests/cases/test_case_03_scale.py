"""Situation 3: ranks disagree about an overflow, or about the loss scale.

``GradScaler`` decides alone on each rank. That is safe only where every rank looks at the same gradients; otherwise
one steps and another skips, and both drift or wait. With every step shared they look at the same averages, so an
overflow on one rank is one everywhere: all skip, and the scales are equal after each ``update()``, for as long as all
ranks have data. A rank that ran out of data within ``Join`` no longer calls ``update()``: its scaler knows nothing of
the steps of the others. They decide alone then, it takes their parameters and optimizer state, and one
``broadcast_object`` brings the scale along.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import adam, flat, make_model

BATCHES = (10, 7)  # of rank 0 and of rank 1
OVERFLOWS = ((4, 1), (8, 0))  # step and rank; at the second, rank 0 has data alone


def make_scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)


def train_step(model: nn.Module, optimizer: Any, scaler: Any, step: int, ranks: list[int], divisor: int) -> float:
    optimizer.zero_grad()
    for rank, features, targets in invariants.parts_of_step(step, ranks):
        factor = float("inf") if (step, rank) in OVERFLOWS else 1.0
        scaler.scale(nn.functional.mse_loss(model(features), targets) * factor / divisor).backward()
    scaler.step(optimizer)
    scaler.update()
    return float(scaler.get_scale())


def reference() -> tuple[list[float], Tensor, int]:
    """Scales, parameters and steps taken of one process that sees the batches of the ranks that have one."""
    model, scaler, steps = make_model(), make_scaler(), []
    optimizer = adam(model)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    scales = []
    for step in range(max(BATCHES)):
        ranks = [rank for rank in range(2) if step < BATCHES[rank]]
        scales.append(train_step(model, optimizer, scaler, step, ranks, len(ranks)))
    return scales, flat(model), len(steps)


def disagree() -> None:
    log = invariants.start()
    model, scaler = make_model(), make_scaler()
    job = Job(model, adam(model), **SMALL_BUCKETS)
    scales = []
    with invariants.warnings_of_the_library() as warnings, Join([job.optimizer]):
        for step in range(BATCHES[xo.rank()]):
            scales.append(train_step(model, job.optimizer, scaler, step, [xo.rank()], 1))
    assert not warnings, warnings
    expected_scales, expected, steps = reference()
    assert steps == max(BATCHES) - len(OVERFLOWS)
    common = scales[: min(BATCHES)]
    invariants.require_same("scales while all ranks have data", common)
    assert common == expected_scales[: min(BATCHES)], common
    assert common[4] == common[3] / 2, "all ranks skip the step in which one of them overflowed"
    invariants.require_close("parameters", flat(model), expected)
    mark = log.mark
    scaler.load_state_dict(xo.broadcast_object(scaler.state_dict(), root_rank=0))
    assert log.mark > mark
    invariants.require_same("scale", scaler.get_scale())
    assert scaler.get_scale() == expected_scales[-1]
    with contextlib.suppress(IndexError):
        assert scales[8] == scales[7] / 2, "the rank that has data alone skips its own overflow"
    only_rank_0_stepped = sum(step < BATCHES[0] for step in range(BATCHES[1], BATCHES[0])) - 1
    job.check(steps=steps if xo.rank() == 0 else steps - only_rank_0_stepped)


def test_an_overflow_on_one_rank_is_skipped_by_all() -> None:
    run_ranks(disagree, 2)
