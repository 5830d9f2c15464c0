"""Situation 22: the library's own methods are called where only some optimizers are wrapped, or in another order.

A script that was written for several ranks is first run with one, or wraps its optimizer on some code paths only;
extra methods that exist after wrapping with peers alone, or broadcasts that have to come before it, then fail on one
path. With us every method is there after wrapping, whatever the number of ranks, and none does harm: with one rank
the training is the bare optimizer's bit for bit, without a process group. Broadcasts take any optimizer, wrapped or
not, before wrapping or after it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import crossover as xo
from crossover.attachment import METHODS
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import adam, adamw_three_groups, flat, make_model, sgd

STEPS = 6
OPTIMIZERS = {"sgd": sgd, "adam": adam, "adamw": adamw_three_groups}


def backward(model: nn.Module, step: int, ranks: list[int], part: int = 0) -> None:
    for _, features, targets in invariants.parts_of_step(step, ranks, part):
        (nn.functional.mse_loss(model(features), targets) / len(ranks)).backward()


def plain(model: nn.Module, optimizer: Any, ranks: list[int], passes: int = 2) -> Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            backward(model, step, ranks, part)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return flat(model)


def with_every_method(model: nn.Module, optimizer: Any, ranks: list[int]) -> Tensor:
    """The training of :func:`plain`, with every method of ours called somewhere, at useful places and at odd ones."""
    optimizer.synchronize()  # before anything was computed
    optimizer.flush()
    optimizer.set_backward_passes_per_step(2)
    optimizer.join_hook()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        optimizer.synchronize()
        with optimizer.no_sync() if step % 3 else contextlib.nullcontext():
            backward(model, step, ranks, 0)
        with optimizer.skip_synchronize():  # around something else than step()
            backward(model, step, ranks, 1)
        optimizer.synchronize()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.synchronize()  # after the step, as in a script that moved the call
        with optimizer.flushed():
            flat(model)
        if step == STEPS // 2:
            optimizer.zero_grad()
            optimizer.reattach()
            optimizer.set_backward_passes_per_step(2)
    return flat(model)


def alone() -> None:
    xo.init()
    assert xo.size() == 1
    for name, make_optimizer in OPTIMIZERS.items():
        for schedule in ("overlapped", "priority"):
            model, bare_model = make_model(), make_model()
            expected = plain(bare_model, make_optimizer(bare_model), [0])
            optimizer: Any = make_optimizer(model)
            xo.broadcast_parameters(model.state_dict(), root_rank=0)
            xo.broadcast_optimizer_state(optimizer, root_rank=0)
            optimizer = xo.DistributedOptimizer(optimizer, model.named_parameters(), schedule=schedule)
            assert all(callable(getattr(optimizer, method)) for method in METHODS)
            xo.broadcast_parameters(model.state_dict(), root_rank=0)
            xo.broadcast_optimizer_state(optimizer, root_rank=0)
            assert torch.equal(with_every_method(model, optimizer, [0]), expected), name
            xo.broadcast_optimizer_state(optimizer, root_rank=0)
            invariants.require_state_to_fit_the_bare_optimizer(optimizer)
    assert xo.join() == 0
    xo.barrier()
    assert not dist.is_initialized()


@pytest.mark.parametrize("launcher", ["none", "torch", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_one_rank_trains_as_the_bare_optimizer(launcher: str) -> None:
    run_ranks(alone, 1, launcher=launcher)


def joined_alone() -> None:
    """Join itself needs a process group; the script's own, of one rank, will do."""
    xo.init()
    dist.init_process_group("gloo")
    model, bare_model = make_model(), make_model()
    expected = plain(bare_model, sgd(bare_model), [0], passes=1)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    with Join([optimizer]):
        assert torch.equal(plain(model, optimizer, [0], passes=1), expected)


def test_one_rank_may_join() -> None:
    run_ranks(joined_alone, 1)


def broadcast_around_wrapping(when: str) -> None:
    """Three optimizers of which one is wrapped; every rank's model and state are its own at first."""
    models = [make_model(seed=10 * xo.rank() + number) for number in range(3)]
    optimizers: list[Any] = [sgd(models[0]), adam(models[1]), adamw_three_groups(models[2])]
    for model, optimizer in zip(models, optimizers, strict=True):
        if xo.rank() == 0:
            plain(model, optimizer, [7], passes=1)

    def broadcast() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            xo.broadcast_parameters(model.state_dict(), root_rank=0)
            xo.broadcast_optimizer_state(optimizer, root_rank=0)

    if when in ("before", "both"):
        broadcast()
    job = Job(models[1], optimizers[1], backward_passes_per_step=2, **SMALL_BUCKETS)
    if when in ("after", "both"):
        broadcast()
    for model in models:
        invariants.require_same("parameters", invariants.digests(model))
    for bare in (optimizers[0], optimizers[2]):
        with pytest.raises(AttributeError, match="synchronize"):
            bare.synchronize()
    steps_before = job.steps
    with_every_method(models[1], job.optimizer, [xo.rank()])
    job.check(steps=steps_before + STEPS)
    reference = [make_model(seed=number) for number in range(3)]
    optimizer = adam(reference[1])
    plain(reference[1], optimizer, [7], passes=1)
    invariants.require_close(f"parameters, {when}", flat(models[1]), plain(reference[1], optimizer, [0, 1]))


def some_wrapped() -> None:
    invariants.start()
    for when in ("before", "after", "both"):
        broadcast_around_wrapping(when)


def test_broadcasts_come_before_wrapping_or_after() -> None:
    run_ranks(some_wrapped, 2)
