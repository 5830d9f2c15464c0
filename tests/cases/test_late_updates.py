"""Situations 1, 2, 3, 7, 12, 14, 16, 20 and 25 with updates that come late.

What a step applies is what ``p.grad`` holds when ``backward()`` has returned, so whatever stands between the two works
as it does without a delay: clipping, ``GradScaler``, logging, frozen parameters. What is different is said in each
test.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover.schedulers.delayed import DelayedSchedule
from tests.cases import invariants
from tests.cases.late import KINDS, SMALL, WARMUP, decisions, digest, make_schedule
from tests.deft.reference import Delayed, adam, momentum
from tests.harness import run_ranks
from tests.training import batch, make_model

STEPS = 14
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def job_of(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> invariants.Job:
    given = {name: options.pop(name) for name in ("grad_scaler", "before_flushed_step") if name in options}
    return invariants.Job(model, optimizer, schedule=make_schedule(kind, **given), **SMALL, **options)


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    features, targets = batch(xo.rank(), step, part)
    return nn.functional.mse_loss(model(features), targets)


def clipped(kind: str) -> tuple[Tensor, list[float]]:
    """1: the norm is that of the gradient that is applied, equal on all ranks."""
    model = make_model()
    job = job_of(kind, model, momentum(model))
    norms = []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        loss_of(model, step).backward()
        due = [parameter.grad is not None for parameter in model.parameters()]
        assert all(due) or not any(due), "everything is due or nothing"
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.4)))
        job.optimizer.step()
    before = digest(model).clone()
    job.check(steps=STEPS)
    return before, norms


def clipped_in_all() -> dict[str, tuple[Tensor, list[float]]]:
    invariants.start()
    return {kind: clipped(kind) for kind in KINDS}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_clipping_sees_what_is_applied(launcher: str) -> None:
    results = run_ranks(clipped_in_all, 2, launcher=launcher)
    for kind in KINDS:
        reference = Delayed(momentum, [0, 1], gain=lambda steps: 1.0, clip=0.4)
        for step, decision in enumerate(decisions(kind, STEPS)):
            reference.step(step, decision)
        for weights, norms in (result[kind] for result in results):
            torch.testing.assert_close(weights, reference.result(), rtol=0, atol=1e-12)
            assert norms == results[0][kind][1]
            applies = [bool(decision.apply) for decision in decisions(kind, STEPS)]
            assert [norm > 0 for norm in norms] == applies, "nothing is due in the other steps"


OVERFLOWS = (5, 9)


class Skipping(Delayed):
    """Leaves out the generations that hold one of these steps."""

    def step(self, step: int, decision: Any) -> None:
        self.bad: list[Any] = getattr(self, "bad", [])
        if step in OVERFLOWS:
            self.bad.append(self.accumulating)
        super().step(step, decision)

    def update(self, generation: list[list[Tensor]], clip: bool = True, late: bool = False) -> None:
        if not any(generation is bad for bad in self.bad):
            super().update(generation, clip)


def scaled(kind: str, named: bool) -> tuple[Tensor, list[float]]:
    """2, 3: an overflow is seen, and the scale halved, where the generation that holds it is due; that one is left out.

    The scale with which a generation was made travels with it, also over a change of scale.
    """
    model = make_model()
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    job = job_of(kind, model, adam(model), **({"grad_scaler": scaler} if named else {}))
    scales = []
    for step in range(STEPS):
        job.optimizer.zero_grad()
        handle = None
        if step in OVERFLOWS and xo.rank() == 1:
            handle = model[2].weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
        scaler.scale(loss_of(model, step)).backward()
        if handle is not None:
            handle.remove()
        scaler.unscale_(job.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(job.optimizer)
        scaler.update()
        scales.append(float(scaler.get_scale()))
    job.optimizer.flush()
    invariants.require_same("scales", scales)
    invariants.require_same("parameters", invariants.digests(model))
    return digest(model), scales


def scaled_in_all() -> dict[str, tuple[Tensor, list[float]]]:
    invariants.start()
    return {f"{kind} {named}": scaled(kind, named) for kind in KINDS for named in (True, False)}


def test_overflow_is_left_out_where_it_is_due() -> None:
    results = run_ranks(scaled_in_all, 2)
    for kind in KINDS:
        reference = Skipping(adam, [0, 1], gain=lambda steps: 1.0)
        for step, decision in enumerate(decisions(kind, STEPS)):
            reference.step(step, decision)
        reference.flush()
        for named in (True, False):
            weights, scales = results[0][f"{kind} {named}"]
            torch.testing.assert_close(weights, reference.result(), rtol=0, atol=1e-12)
            assert sum(after < before for before, after in itertools.pairwise(scales)) == len(OVERFLOWS)
            assert max(scales) > 1024.0, "the scale grew as well"


def unknown_scaler() -> None:
    xo.init()
    model = make_model()
    scaler = torch.amp.GradScaler("cpu")
    job = job_of("fifo", model, adam(model))
    for step in range(WARMUP + 1):
        job.optimizer.zero_grad()
        loss_of(model, step).backward()
        job.optimizer.step()
    assert scaler is not None


def test_a_scaler_that_may_be_meant_has_to_be_named() -> None:
    for outcome in run_ranks(unknown_scaler, 2, expect_failure=True):
        assert outcome.error == "ValueError", outcome.describe()
        assert "grad_scaler" in outcome.message


def accumulated(kind: str) -> tuple[Tensor, Tensor]:
    """7: a step of three passes, the last of an epoch of two; both ways of accumulating are equal."""
    results = []
    for counted in (True, False):
        model = make_model()
        job = job_of(kind, model, momentum(model), backward_passes_per_step=3 if counted else 1)
        for step in range(STEPS):
            parts = 2 if step % 5 == 4 else 3
            for part in range(parts):
                if counted or part == parts - 1:
                    loss_of(model, step, part).backward()
                else:
                    with job.optimizer.no_sync():
                        loss_of(model, step, part).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.check(steps=STEPS)
        results.append(digest(model))
    return results[0], results[1]


def accumulated_in_all() -> dict[str, tuple[Tensor, Tensor]]:
    invariants.start()
    return {kind: accumulated(kind) for kind in KINDS}


def test_accumulation() -> None:
    for result in run_ranks(accumulated_in_all, 2):
        for kind, (counted, by_hand) in result.items():
            assert torch.equal(counted, by_hand), kind


class Branches(nn.Module):
    """The second layer is used by no rank, the third by rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(7, 3).double()
        self.unused = nn.Linear(7, 3).double()
        self.on_one = nn.Linear(7, 3).double()

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.used(features)
        return result + self.on_one(features) if xo.rank() == 0 else result


def without_gradients() -> None:
    """16: no gradient anywhere is no update; none on one rank counts as zero. 12: frozen parameters stay."""
    invariants.start()
    for kind in ("fifo", "fifo merging"):
        model = Branches()
        model.used.bias.requires_grad_(False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        job = job_of(kind, model, momentum(model))
        for step in range(STEPS):
            job.optimizer.zero_grad()
            loss_of(model, step).backward()
            job.optimizer.step()
        job.check(steps=STEPS)
        for name, value in model.state_dict().items():
            stays = name.startswith("unused") or name == "used.bias"
            assert torch.equal(value, before[name]) == stays, name


def test_parameters_without_gradients() -> None:
    run_ranks(without_gradients, 2)


def unfrozen(kind: str) -> Tensor:
    """14: parameters that come later are averaged from their first backward pass on; what was on its way is applied."""
    model = make_model()
    model[2].requires_grad_(False)
    job = job_of(kind, model, momentum(model))
    for step in range(STEPS):
        if step == 7:
            model[2].requires_grad_(True)
        job.optimizer.zero_grad()
        loss_of(model, step).backward()
        job.optimizer.step()
    job.check(steps=STEPS)
    return digest(model)


def unfrozen_in_all() -> None:
    invariants.start()
    before = digest(make_model()[2])
    for kind in KINDS:
        model = unfrozen(kind)
        assert before.numel() < model.numel()


def test_parameters_that_come_later() -> None:
    run_ranks(unfrozen_in_all, 2)


def rates(kind: str) -> Tensor:
    """25: an update has the rate of the step in which it is applied; a merged one has its gain once."""
    model = make_model()
    job = job_of(kind, model, torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = invariants.engine_of(job.optimizer).schedule
    assert isinstance(schedule, DelayedSchedule)
    schedule.merge = "gain"
    seen: list[float] = []
    job.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    for step in range(STEPS):
        loss_of(model, step).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**step, rel=1e-12)
        scheduler.step()
    job.check(steps=STEPS)
    return digest(model)


def rates_in_all() -> dict[str, Tensor]:
    invariants.start()
    return {kind: rates(kind) for kind in KINDS}


def test_learning_rates() -> None:
    results = run_ranks(rates_in_all, 2)
    for kind in KINDS:
        reference = Delayed(
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1), [0, 1], gain=lambda steps: steps**0.5
        )
        for step, decision in enumerate(decisions(kind, STEPS)):
            reference.optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step
            reference.step(step, decision)
        reference.optimizer.param_groups[0]["lr"] = 0.1 * 0.9**STEPS
        reference.flush()
        for result in results:
            torch.testing.assert_close(result[kind], reference.result(), rtol=0, atol=1e-12)
