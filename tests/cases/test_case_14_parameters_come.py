"""Situation 14: parameters are unfrozen, or added to the optimizer, after it was wrapped.

Hooks that are only set at wrap time leave such a parameter alone: each rank trains it by itself, ranks drift apart,
and nobody says so. With us the next backward pass averages it like all others, whether a layer was unfrozen, all
layers were, or a group was added, also in the middle of an accumulation window. If ranks disagree about what there is
to train, all of them raise an error that names the parameter, in the same pass (with the Priority schedule in the
pass after it), instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import make_model

STEPS, UNFREEZE_AT, ADD_AT = 14, 5, 10
Change = Callable[["Growing", Any, int], None]


class Growing(nn.Module):
    """A trunk whose middle layer is frozen, and a head that the optimizer does not know at first."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = make_model()
        self.head = nn.Linear(3, 3).double()
        self.other_head = nn.Linear(3, 3).double()

    @property
    def middle(self) -> nn.Module:
        return self.trunk[2]

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.trunk(features)) + self.other_head(features[:, :3])


def optimizer_of(model: Growing) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.trunk.parameters(), lr=0.05, momentum=0.9)


def parameters(model: Growing) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def unfreeze_then_add(model: Growing, optimizer: Any, step: int) -> None:
    if step == UNFREEZE_AT:
        model.middle.requires_grad_(True)
    if step == ADD_AT:
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02})


def unfreeze_all(model: Growing, optimizer: Any, step: int) -> None:
    """Nothing can be trained at first, so that there is no hook that could notice anything."""
    model.trunk.requires_grad_(step >= UNFREEZE_AT)


def exchange_and_freeze(model: Growing, optimizer: Any, step: int) -> None:
    """A group goes and another comes; a layer is frozen again."""
    if step == UNFREEZE_AT:
        model.middle.requires_grad_(True)
        if hasattr(optimizer, "flush"):
            optimizer.flush()
        optimizer.param_groups.clear()
        optimizer.state.clear()
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02, "momentum": 0.5})
    if step == ADD_AT:
        optimizer.add_param_group({"params": list(model.middle.parameters())})
        model.head.weight.requires_grad_(False)


def freeze(model: Growing, change: Change) -> None:
    """As it is at the start."""
    model.trunk.requires_grad_(change is not unfreeze_all)
    model.middle.requires_grad_(False)


def train(model: Growing, optimizer: Any, change: Change, ranks: list[int], passes: int) -> None:
    freeze(model, change)
    for step in range(STEPS):
        change(model, optimizer, step)
        model.zero_grad()
        for part in range(passes):
            for _, features, targets in invariants.parts_of_step(step, ranks, part):
                loss = nn.functional.mse_loss(model(features), targets)
                (loss / len(ranks)).backward()
        optimizer.step()


def changes_on_all_ranks(
    schedule: str, change: Change, passes: int = 1, named: bool = True, frozen_before: bool = True
) -> None:
    model, alone = Growing(), Growing()
    alone.load_state_dict(model.state_dict())
    if frozen_before:
        freeze(model, change)
    options: dict[str, Any] = {} if named else {"named_parameters": None}
    job = Job(
        model, optimizer_of(model), schedule=schedule, backward_passes_per_step=passes, **SMALL_BUCKETS, **options
    )
    train(model, job.optimizer, change, [xo.rank()], passes)
    job.check(steps=STEPS)
    train(alone, optimizer_of(alone), change, list(range(xo.size())), passes)
    invariants.require_close(f"parameters, {schedule}, {change.__name__}", parameters(model), parameters(alone))


def agreeing_ranks() -> None:
    invariants.start()
    for schedule in ("overlapped", "priority"):
        changes_on_all_ranks(schedule, unfreeze_then_add)
        changes_on_all_ranks(schedule, unfreeze_then_add, frozen_before=False)
        changes_on_all_ranks(schedule, unfreeze_then_add, passes=2, named=False)
        changes_on_all_ranks(schedule, unfreeze_all)
        changes_on_all_ranks(schedule, exchange_and_freeze)


def test_what_comes_later_is_averaged_from_the_next_pass_on() -> None:
    run_ranks(agreeing_ranks, 2)


def unfreeze_on_one_rank(model: Growing, optimizer: Any, step: int) -> None:
    if step == UNFREEZE_AT and xo.rank() == 0:
        model.middle.requires_grad_(True)


def add_on_one_rank(model: Growing, optimizer: Any, step: int) -> None:
    if step == ADD_AT and xo.rank() == xo.size() - 1:
        optimizer.add_param_group({"params": list(model.head.parameters())})


def add_different_ones(model: Growing, optimizer: Any, step: int) -> None:
    if step == ADD_AT:
        head = model.head if xo.rank() == 0 else model.other_head
        optimizer.add_param_group({"params": list(head.parameters())})


def add_different_values(model: Growing, optimizer: Any, step: int) -> None:
    if step == ADD_AT:
        nn.init.constant_(model.head.weight, float(xo.rank()))
        optimizer.add_param_group({"params": list(model.head.parameters())})


def disagreement(schedule: str, change: Change, words: str, at: Sequence[int]) -> None:
    model = Growing()
    freeze(model, change)
    job = Job(model, optimizer_of(model), schedule=schedule, **SMALL_BUCKETS)
    reached: list[int] = []

    def noted(model: Growing, optimizer: Any, step: int) -> None:
        reached.append(step)
        change(model, optimizer, step)

    with pytest.raises(xo.RankMismatchError, match=words):
        train(model, job.optimizer, noted, [xo.rank()], 1)
    assert reached[-1] in at, f"noticed in step {reached[-1]}"
    invariants.require_same_collectives()


def disagreeing_ranks() -> None:
    invariants.start()
    for schedule in ("overlapped", "priority"):
        late = 0 if schedule == "overlapped" else 1
        disagreement(schedule, unfreeze_on_one_rank, r"trunk\.2\.weight \(30, 40\)", [UNFREEZE_AT, UNFREEZE_AT + late])
        disagreement(schedule, add_on_one_rank, r"head\.weight \(3, 3\)", [ADD_AT, ADD_AT + late])
        disagreement(schedule, add_different_ones, r"rank 0 has head\.weight.*nothing of that name", [ADD_AT])
        disagreement(schedule, add_different_values, r"head\.weight.*broadcast_parameters", [ADD_AT])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_are_told_the_parameter(size: int) -> None:
    run_ranks(disagreeing_ranks, size, env={"CROSSOVER_TIMEOUT": "20"})
