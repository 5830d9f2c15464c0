"""Situation 31: the checkpoint library takes a step of its own.

``torch.distributed.checkpoint`` fills in missing optimizer state by a ``step()`` on zero gradients with a rate of
zero, for optimizers without state at every save and load. Taken for a training step it would start collectives, and
where rank 0 saves alone the job would hang. Here nothing may change: parameters, counters and what is trained next
are those of a run that was never saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import crossover as xo
from crossover import telemetry
from crossover.attachment import Attachment
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import batch, flat, make_model

STEPS = 8
SAVED_AT = (0, 5)
BUILDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD without state": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
}
Saving = Callable[[nn.Module, Any], None]


def save(model: nn.Module, optimizer: Any) -> None:
    get_optimizer_state_dict(model, optimizer)


def save_and_load(model: nn.Module, optimizer: Any) -> None:
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


def backward(model: nn.Module, ranks: list[int], step: int, part: int = 0) -> None:
    pairs = [batch(rank, step, part) for rank in ranks]
    features, targets = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
    nn.functional.mse_loss(model(features), targets).backward()


def train(model: nn.Module, optimizer: Any, ranks: list[int], passes: int, saving: Saving | None) -> Tensor:
    for step in range(STEPS):
        if step in SAVED_AT and saving is not None:
            saving(model, optimizer)
        for part in range(passes):
            backward(model, ranks, step, part)
            if step in SAVED_AT and part == 0 and saving is not None and optimizer.state:
                saving(model, optimizer)  # in the middle of an accumulation
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def on_one_rank(saving: Saving) -> Saving:
    def saving_on_rank_0(model: nn.Module, optimizer: Any) -> None:
        if xo.rank() == 0:
            saving(model, optimizer)

    return saving_on_rank_0


def unchanged(saving: Saving) -> Saving:
    """``saving``, around which nothing moves and no collective is started."""

    def checked(model: nn.Module, optimizer: Any) -> None:
        attachment = Attachment.of(optimizer)
        assert attachment is not None
        engine = invariants.engine_of(optimizer)
        counters = (attachment.steps, engine.shares, engine.passes)
        gradients = [(p.grad, p.grad.clone() if type(p.grad) is Tensor else None) for p in model.parameters()]
        before, mark = flat(model).clone(), invariants._log.mark
        saving(model, optimizer)
        assert torch.equal(flat(model), before)
        assert counters == (attachment.steps, engine.shares, engine.passes)
        assert invariants._log.mark == mark
        for parameter, (gradient, values) in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is gradient
            assert values is None or torch.equal(parameter.grad, values)

    return checked


def every_way(schedule: str) -> dict[str, Tensor]:
    invariants.start()
    emitted: list[Any] = []
    telemetry.start(loggers=[emitted.append])
    results: dict[str, Tensor] = {}
    for name, build in BUILDS.items():
        for passes in (1, 3):
            for saving in (None, save, save_and_load, on_one_rank(save), on_one_rank(save_and_load)):
                model = make_model()
                job = invariants.Job(model, build(model), backward_passes_per_step=passes, schedule=schedule)
                emitted.clear()
                train(model, job.optimizer, [xo.rank()], passes, None if saving is None else unchanged(saving))
                assert len(emitted) == STEPS
                job.optimizer.flush()
                invariants.require_same("parameters", invariants.digests(model))
                trained = flat(model)
                unsaved = results.setdefault(f"{name}, {passes}", trained)
                assert torch.equal(unsaved, trained), f"{name}, {passes} passes: {saving} changed training"
    invariants.require_same_collectives()
    return results


@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_saving_and_loading_change_nothing(schedule: str) -> None:
    first, _ = run_ranks(every_way, 2, schedule, env={"CROSSOVER_TIMEOUT": "8"})
    for name, trained in first.items():
        kind, passes = name.rsplit(", ", 1)
        model = make_model()
        reference = train(model, BUILDS[kind](model), [0, 1], int(passes), None)
        assert (trained - reference).abs().max() < 1e-12, name


def after_dropped_windows() -> None:
    """A window that was dropped behind our back, and a layer unfrozen, just before rank 0 saves by itself."""
    invariants.start()
    for build in (BUILDS["SGD without state"], BUILDS["AdamW"]):
        model = make_model()
        model[0].weight.requires_grad_(False)
        optimizer: Any = xo.DistributedOptimizer(build(model), model.named_parameters(), backward_passes_per_step=2)
        backward(model, [xo.rank()], 0)
        model.zero_grad()
        on_one_rank(save)(model, optimizer)
        train_on(model, optimizer, 1)
        backward(model, [xo.rank()], 2)
        model.zero_grad()
        model[0].weight.requires_grad_(True)
        on_one_rank(save)(model, optimizer)
        train_on(model, optimizer, 3)
        invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()


def train_on(model: nn.Module, optimizer: Any, step: int) -> None:
    for part in range(2):
        backward(model, [xo.rank()], step, part)
    optimizer.step()
    optimizer.zero_grad()


def test_rank_0_saves_alone_after_a_dropped_window() -> None:
    run_ranks(after_dropped_windows, env={"CROSSOVER_TIMEOUT": "8"})
