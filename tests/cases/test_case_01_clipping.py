"""Situation 1: gradients are clipped between ``backward()`` and ``step()``.

Clipping has to see the gradient averaged over ranks. Where averaging is part of ``step()``, users call
``synchronize()`` by hand, and ``step()`` then averages a second time unless it is told not to. With us a gradient is
averaged when ``backward()`` returns: a script without any call of ours clips what will be applied, a script with
Horovod's pair of calls does the same, and either averages each bucket once. The Priority schedule has no averaged
gradient before ``step()``; it refuses to be clipped, on every rank, and can be trained on afterwards.
"""

from __future__ import annotations

from collections import Counter
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

STEPS = 6
LIMIT = 1.0
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def backward(model: nn.Module, step: int, ranks: list[int], divisor: int, part: int = 0) -> None:
    """The last rank's gradient is a thousand times larger than the others'."""
    for rank, features, targets in invariants.parts_of_step(step, ranks, part):
        loss = nn.functional.mse_loss(model(features), targets) / divisor
        (loss * (1000 if rank == xo.size() - 1 else 1)).backward()


def reference(passes: int = 1) -> tuple[list[float], Tensor]:
    """Norms and parameters of one process that sees every rank's batch."""
    model, norms = make_model(), []
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            backward(model, step, list(range(xo.size())), xo.size() * passes, part)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
    return norms, flat(model)


def without_library_calls(model: nn.Module, optimizer: Any) -> float:
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
    optimizer.step()
    return norm


def as_with_horovod(model: nn.Module, optimizer: Any) -> float:
    optimizer.synchronize()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
    with optimizer.skip_synchronize():
        optimizer.step()
    return norm


def train(step_of: Callable[[nn.Module, Any], float], log: invariants.Log, passes: int = 1) -> None:
    model = make_model()
    job = Job(model, sgd(model), backward_passes_per_step=passes, **SMALL_BUCKETS)
    norms = []
    for step in range(STEPS):
        mark = log.mark
        job.optimizer.zero_grad()
        for part in range(passes):
            backward(model, step, [xo.rank()], passes, part)
        norms.append(step_of(model, job.optimizer))
        names = Counter(entry.name for entry in log.since(mark))
        buckets = len(invariants.engine_of(job.optimizer).buckets)
        assert buckets > 2
        if step:  # buckets are made at the first
            assert set(names.values()) == {1}, f"a bucket was reduced twice: {names}"
            assert len(names) == buckets, f"{names} for {buckets} buckets"
    expected_norms, expected = reference(passes)
    invariants.require_same("norms", norms)
    assert max(norms) > 10 * LIMIT, "the gradient is large enough for the limit to matter"
    invariants.require_close("norms", norms, expected_norms)
    invariants.require_close("parameters", flat(model), expected)
    job.check(steps=STEPS)


def gentle_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Does not diverge with gradients a thousand times too large."""
    return torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)


def refused_by_priority() -> None:
    model = make_model()
    job = Job(model, gentle_sgd(model), schedule="priority")
    for step in range(STEPS):
        job.optimizer.zero_grad()
        backward(model, step, [xo.rank()], 1)
        for step_of in (without_library_calls, as_with_horovod):
            with pytest.raises(ValueError, match=r"\d\.(weight|bias).*Overlapped"):
                step_of(model, job.optimizer)
        job.optimizer.step()
    job.check(steps=STEPS)
    unclipped = make_model()
    optimizer = gentle_sgd(unclipped)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(unclipped, step, list(range(xo.size())), xo.size())
        optimizer.step()
    invariants.require_close("parameters", flat(model), flat(unclipped))


def clip_in_every_way() -> None:
    log = invariants.start()
    train(without_library_calls, log)
    train(as_with_horovod, log)
    train(without_library_calls, log, passes=2)
    train(as_with_horovod, log, passes=2)
    refused_by_priority()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_averaged_gradient_is_clipped(launcher: str) -> None:
    run_ranks(clip_in_every_way, 2, launcher=launcher)
