"""Situation 12: some parameters do not require a gradient when the optimizer is wrapped.

Code that walks every parameter and expects a gradient or state for each fails as soon as a backbone is frozen,
whether its parameters were given to the optimizer or not. With us frozen weights keep every bit, get no state, and
cost no communication; broadcasting, stepping, saving and loading go on without them. An optimizer of frozen
parameters alone does nothing.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import flat, make_model

STEPS = 6


def half_frozen(seed: int = 0) -> nn.Module:
    """The largest layer, most of the model, is frozen."""
    model = make_model(seed)
    model[2].requires_grad_(False)
    return model


def adam(model: nn.Module, all_given: bool = True) -> torch.optim.Optimizer:
    given = [parameter for parameter in model.parameters() if all_given or parameter.requires_grad]
    return torch.optim.AdamW(given, lr=0.01, weight_decay=0.1)


def train(model: nn.Module, optimizer: Any, ranks: list[int], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        for _, features, targets in invariants.parts_of_step(step, ranks):
            (nn.functional.mse_loss(model(features), targets) / len(ranks)).backward()
        optimizer.step()


def reference(all_given: bool) -> Tensor:
    model = half_frozen()
    train(model, adam(model, all_given), list(range(xo.size())), range(STEPS))
    return flat(model)


def freeze_wrap_broadcast_step(schedule: str, all_given: bool, log: invariants.Log) -> None:
    model = half_frozen(seed=xo.rank())  # as different as a script without a seed makes them
    job = Job(model, adam(model, all_given), schedule=schedule, **SMALL_BUCKETS)
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    xo.broadcast_optimizer_state(job.optimizer, root_rank=0)
    before = [parameter.detach().clone() for parameter in model[2].parameters()]
    mark = log.mark
    train(model, job.optimizer, [xo.rank()], range(STEPS))
    job.check(steps=STEPS)
    _require_no_traffic_for_frozen(model, job.optimizer, log.since(mark, job.optimizer))
    for kept, parameter in zip(before, model[2].parameters(), strict=True):
        assert torch.equal(kept, parameter), "a frozen weight moved"
        assert parameter not in job.optimizer.state, "a frozen weight has optimizer state"
        assert parameter.grad is None
    invariants.require_close("parameters", flat(model), reference(all_given))


def _require_no_traffic_for_frozen(model: nn.Module, optimizer: Any, entries: list[invariants.Collective]) -> None:
    frozen = {id(parameter) for parameter in model[2].parameters()}
    for bucket in invariants.engine_of(optimizer).buckets:
        assert not any(id(slot.parameter) in frozen for slot in bucket.slots)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    sent = sum(entry.shape[0] for entry in entries if entry.kind.startswith("all_reduce") and ".bucket" in entry.name)
    overhead = STEPS * 4 * len(list(model.parameters()))
    assert STEPS * trained <= sent <= STEPS * trained + overhead, f"{sent} elements for {trained} parameters"


def save_and_go_on(schedule: str) -> None:
    model = half_frozen()
    job = Job(model, adam(model), schedule=schedule)
    train(model, job.optimizer, [xo.rank()], range(3))
    file = io.BytesIO()
    with job.optimizer.flushed():
        torch.save({"model": model.state_dict(), "optimizer": job.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed = half_frozen(seed=5)
    resumed.load_state_dict(saved["model"])
    resumed_job = Job(resumed, adam(resumed), schedule=schedule)
    resumed_job.optimizer.load_state_dict(saved["optimizer"])
    for goes_on in (job, resumed_job):
        train(goes_on.model, goes_on.optimizer, [xo.rank()], range(3, STEPS))
        goes_on.optimizer.flush()
    assert torch.equal(flat(model), flat(resumed))
    job.check(steps=STEPS)
    resumed_job.check(steps=STEPS - 3)


def all_frozen(schedule: str, log: invariants.Log) -> None:
    frozen, trained = make_model(), make_model(1)
    frozen.requires_grad_(False)
    idle = Job(frozen, adam(frozen), schedule=schedule)
    busy = Job(trained, adam(trained), schedule=schedule)
    mark = log.mark
    for step in range(3):
        idle.optimizer.zero_grad()
        busy.optimizer.zero_grad()
        features, targets = invariants.parts_of_step(step, [xo.rank()])[0][1:]
        nn.functional.mse_loss(trained(features) + frozen(features), targets).backward()
        idle.optimizer.step()
    assert not log.since(mark, idle.optimizer)
    assert torch.equal(flat(frozen), flat(make_model()))
    idle.check(steps=3)
    busy.optimizer.zero_grad()
    busy.check(steps=0)


def frozen_in_every_way() -> None:
    log = invariants.start()
    for schedule in ("overlapped", "priority"):
        for all_given in (True, False):
            freeze_wrap_broadcast_step(schedule, all_given, log)
        save_and_go_on(schedule)
        all_frozen(schedule, log)


def test_frozen_parameters_stay_and_cost_nothing() -> None:
    run_ranks(frozen_in_every_way, 2)
