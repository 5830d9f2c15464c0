"""Situation 35: the ranks do not start with the same weights.

Gradients are averaged all the same, and the ranks train different models without a word. Here the first shared
backward pass, which has to agree on the order of buckets anyway, compares checksums: every rank raises, naming the
parameter and what to call. So it does for a layer that is added or unfrozen later.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import adam, batch, flat, make_model, sgd


def one_step(model: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    optimizer.zero_grad()
    pairs = [batch(rank, step) for rank in ranks]
    features, targets = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
    nn.functional.mse_loss(model(features), targets).backward()
    optimizer.step()


def refused(model: nn.Module, optimizer: Any) -> str:
    with pytest.raises(xo.RankMismatchError) as caught:
        one_step(model, optimizer, 0, [xo.rank()])
    return str(caught.value)


def seeded_by_rank(schedule: str) -> tuple[list[str], torch.Tensor]:
    invariants.start()
    messages = []
    model = make_model(seed=xo.rank())
    messages.append(refused(model, xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=schedule)))
    model = make_model()
    if xo.rank() == 1:
        with torch.no_grad():  # one element, by one unit in the last place
            element = model[2].weight.view(-1)[5:6]
            element.copy_(torch.nextafter(element, element + 1))
    messages.append(refused(model, xo.DistributedOptimizer(adam(model), model.named_parameters(), schedule=schedule)))
    model = make_model(seed=xo.rank())
    optimizer = xo.DistributedOptimizer(adam(model), model.named_parameters(), schedule=schedule)
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(4):
        one_step(model, optimizer, step, [xo.rank()])
    optimizer.flush()
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()
    return messages, flat(model)


@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_every_rank_is_told_and_a_broadcast_mends_it(schedule: str) -> None:
    (first, ours), (second, theirs) = run_ranks(seeded_by_rank, 2, schedule, env={"CROSSOVER_TIMEOUT": "8"})
    assert first == second
    everything, one_element = first
    assert everything.startswith("parameter '0.weight': rank 1 started with other values than rank 0")
    assert "broadcast_parameters" in everything
    assert one_element.startswith("parameter '2.weight': rank 1")
    assert torch.equal(ours, theirs)
    model = make_model()
    optimizer = adam(model)
    for step in range(4):
        one_step(model, optimizer, step, [0, 1])
    assert (ours - flat(model)).abs().max() < 1e-12


def grown_later() -> list[str]:
    xo.init()
    messages = []
    for way in ("added", "unfrozen"):
        model = make_model()
        if way == "unfrozen":
            model[4].requires_grad_(False)
            if xo.rank() == 1:
                nn.init.ones_(model[4].weight)
        optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters())
        one_step(model, optimizer, 0, [xo.rank()])
        if way == "added":
            torch.manual_seed(xo.rank())
            model.append(nn.Linear(3, 3).double())
            optimizer.add_param_group({"params": model[5].parameters()})
        model.requires_grad_(True)
        messages.append(refused(model, optimizer))
    return messages


def test_a_layer_that_comes_later_is_compared_too() -> None:
    first, second = run_ranks(grown_later, env={"CROSSOVER_TIMEOUT": "8"})
    assert first == second
    assert "rank 1 started with other values" in first[0]
    assert first[1].startswith("parameter '4.weight'")
