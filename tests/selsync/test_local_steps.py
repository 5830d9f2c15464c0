"""Local steps and averages: equal to what is worked out by hand, and to DDP where every step is shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.selsync.local_steps import Scripted, by_hand, grouped_sgd, several, train
from tests.training import RECIPES, alone, flat, make_model, with_crossover, with_ddp

STEPS = 12
MIXED: list[list[int]] = [[], [1], [], [], [0, 1], [], []]
SHARED = [bool(MIXED[step % len(MIXED)]) for step in range(STEPS)]
LINEAR = ("sgd with momentum", "accumulation 3", "zeroed in place")
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def always_shared(ddp: bool) -> dict[str, tuple[Tensor, Tensor | None]]:
    xo.init()
    results = {}
    for name in LINEAR:
        recipe = RECIPES[name]
        options = {"gate": "selsync:0"}
        ours = with_crossover(replace(recipe, options=options), 40)
        results[name] = (ours, with_ddp(recipe, 40) if ddp else None)
    return results


@pytest.mark.parametrize(
    ("size", "launcher"), [(2, "torch"), (3, "torch"), pytest.param(2, "horovod", marks=pytest.mark.horovod)]
)
def test_with_a_delta_of_zero_sgd_follows_ddp(size: int, launcher: str) -> None:
    ranks = run_ranks(always_shared, size, launcher == "torch", launcher=launcher, timeout=100)
    for name in LINEAR:
        reference = alone(RECIPES[name], list(range(size)), 40)
        for rank in ranks:
            ours, ddp = rank[name]
            assert torch.equal(ours, ranks[0][name][0]), f"{name}: ranks differ"
            assert (ours - reference).abs().max() < 1e-12, name
            assert ddp is None or (ours - ddp).abs().max() < 1e-12, name


def scripted(groups: int, passes: int, options: dict[str, Any]) -> tuple[list[Tensor], int, int, Tensor]:
    """Parameters after each step, the number of averages, of steps that were counted as shared, and of all flushed."""
    log = invariants.start()
    model, gate = make_model(), Scripted(MIXED, **options)
    optimizer: Any = xo.DistributedOptimizer(
        grouped_sgd(groups)(model), model.named_parameters(), gate=gate, backward_passes_per_step=passes
    )
    after = []
    for step in range(STEPS):
        train(model, optimizer, range(step, step + 1), passes)
        after.append(flat(model).clone())
    assert not log.open
    averages = sum("average" in entry.name for entry in log.collectives)
    optimizer.flush()
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()
    assert gate.local_steps == SHARED.count(False)
    return after, averages, gate.shared_steps, flat(model)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_parameters_are_those_worked_out_by_hand(launcher: str) -> None:
    calls = [(groups, passes, {}) for groups, passes in ((1, 1), (2, 1), (5, 1), (1, 3))]
    results = run_ranks(several, 2, scripted, calls, launcher=launcher)
    for (groups, passes, _), *ranks in zip(calls, *results, strict=True):
        for step in range(STEPS):
            expected = by_hand(grouped_sgd(groups), SHARED[: step + 1], passes=passes)
            for rank, (after, averages, shared, _) in enumerate(ranks):
                assert torch.equal(after[step], expected[rank]), f"{groups} groups, {passes} passes, step {step}"
                assert averages == shared == SHARED.count(True)
            assert torch.equal(ranks[0][0][step], ranks[1][0][step]) == SHARED[step]


def looked_at_seldom(steps: int) -> tuple[Tensor, int, int]:
    """Parameters at the end, and how many votes and averages there were."""
    log = invariants.start()
    model, gate = make_model(), xo.selsync.SelSync(0.0, warmup_steps=2, every=3)
    optimizer: Any = xo.DistributedOptimizer(grouped_sgd(2)(model), model.named_parameters(), gate=gate)
    train(model, optimizer, range(steps))
    invariants.require_same_collectives()
    counts = [sum(word in entry.name for entry in log.collectives) for word in ("vote", "average")]
    return flat(model), counts[0], counts[1]


def test_between_looks_steps_are_local_and_nothing_is_sent() -> None:
    shared = [step < 2 or (step - 2) % 3 == 0 for step in range(10)]
    expected = by_hand(grouped_sgd(2), shared)
    for rank, (parameters, votes, averages) in enumerate(run_ranks(looked_at_seldom, 2, len(shared))):
        assert torch.equal(parameters, expected[rank])
        assert averages == shared.count(True)
        assert votes == 2 * averages  # one on the step, one by which ranks make sure that all have stepped


def test_optimizer_state_is_averaged_where_asked() -> None:
    ranks = run_ranks(scripted, 2, 2, 1, {"optimizer_state": "average"})
    expected = by_hand(grouped_sgd(2), SHARED, state=True)
    assert [torch.equal(after[-1], expected[rank]) for rank, (after, *_) in enumerate(ranks)] == [True, True]
    assert not torch.equal(expected[0], by_hand(grouped_sgd(2), SHARED)[0])


def test_gradients_are_averaged_where_asked() -> None:
    ranks = run_ranks(scripted, 2, 2, 3, {"average": "gradients"})
    expected = by_hand(grouped_sgd(2), SHARED, passes=3, average="gradients")
    for rank, (after, averages, shared, flushed) in enumerate(ranks):
        assert (after[-1] - expected[rank]).abs().max() < 1e-12
        assert averages == 0
        assert shared == SHARED.count(True)
        assert (flushed - (expected[0] + expected[1]) / 2).abs().max() < 1e-12
