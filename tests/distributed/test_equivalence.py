"""Design invariant 2: the plain path equals DDP and one process on the joined batch; invariant 3: one rank changes
nothing."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

import crossover as xo
from tests.harness import run_ranks
from tests.training import RECIPES, Recipe, alone, sgd, with_crossover, with_ddp

STEPS = 50
TOLERANCE = 1e-12


def train_all(
    compare_with_ddp: bool, options: dict[str, object]
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    xo.init()
    results = {}
    for name, recipe in RECIPES.items():
        if options.get("schedule") == "priority" and recipe.clip is not None:
            continue
        ours = with_crossover(replace(recipe, options=options), STEPS)
        results[name] = (ours, with_ddp(recipe, STEPS) if compare_with_ddp else None)
    return results


def check(results: list[dict[str, tuple[torch.Tensor, torch.Tensor | None]]]) -> None:
    for name in results[0]:
        reference = alone(RECIPES[name], list(range(len(results))), STEPS)
        ours, ddp = results[0][name]
        assert (ours - reference).abs().max() < TOLERANCE, name
        assert ddp is None or (ours - ddp).abs().max() < TOLERANCE, name
        for other in results[1:]:
            assert torch.equal(other[name][0], ours), f"{name}: ranks differ"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_equals_ddp_and_one_process(size: int, schedule: str) -> None:
    check(run_ranks(train_all, size, True, {"schedule": schedule}, timeout=180))


@pytest.mark.horovod
@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_equals_one_process_through_horovod(schedule: str) -> None:
    check(run_ranks(train_all, 2, False, {"schedule": schedule}, launcher="horovod", timeout=180))


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-4, "first_bucket_cap_mb": 1e-4},
        {"groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"bucket_cap_mb": 100.0, "first_bucket_cap_mb": 100.0},
    ],
    ids=["a bucket each", "two groups", "predivided", "one bucket"],
)
def test_options_that_must_not_matter(options: dict[str, object]) -> None:
    check(run_ranks(train_all, 2, False, options, timeout=120))


def train_alone(recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    xo.init()
    threads = threading.active_count()
    ours = with_crossover(recipe, STEPS)
    started = threading.active_count() - threads
    return ours, alone(recipe, [0], STEPS), started, torch.distributed.is_initialized()


@pytest.mark.parametrize("name", list(RECIPES))
def test_one_rank_is_the_bare_optimizer(name: str) -> None:
    [(ours, bare, threads, group)] = run_ranks(train_alone, 1, RECIPES[name], launcher="none")
    assert torch.equal(ours, bare)
    assert threads == 0
    assert not group


def sums() -> torch.Tensor:
    xo.init()
    return with_crossover(Recipe(sgd, options={"op": xo.Sum}), 1)


def test_sum_is_the_sum_of_gradients() -> None:
    first, second = run_ranks(sums, 2)
    assert torch.equal(first, second)
    average = alone(Recipe(sgd), [0, 1], 1)
    start = alone(Recipe(sgd), [0, 1], 0)
    decay = 0.05 * 1e-3 * start
    assert torch.allclose(first - start + decay, 2 * (average - start + decay), atol=1e-12)
