"""Situation 23: a script passes ``zero_grad(set_to_none=...)``, or a closure to ``step()``.

Wrappers lag behind torch's signatures, and a line search that calls its closure a different number of times on each
rank hangs the job. Ours has torch's own methods, runs the backward pass of a closure like any other, and refuses
LBFGS where there is more than one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import batch, flat, make_model, sgd

STEPS = 6


def loss_of(model: nn.Module, ranks: list[int], step: int) -> Tensor:
    pairs = [batch(rank, step) for rank in ranks]
    features, targets = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
    return nn.functional.mse_loss(model(features), targets)


def closure_for(model: nn.Module, optimizer: Any, clear: Callable[[Any], None], ranks: list[int], step: int) -> Any:
    def closure() -> Tensor:
        clear(optimizer)
        loss = loss_of(model, ranks, step)
        loss.backward()
        return loss

    return closure


CLEARINGS: list[Callable[[Any], None]] = [
    lambda optimizer: optimizer.zero_grad(),
    lambda optimizer: optimizer.zero_grad(set_to_none=True),
    lambda optimizer: optimizer.zero_grad(set_to_none=False),
    lambda optimizer: optimizer.zero_grad(False),
]


def train(
    wrap: Callable[[nn.Module, Any], Any], ranks: list[int], clear: Callable[[Any], None]
) -> tuple[Tensor, list[float]]:
    model = make_model()
    optimizer = wrap(model, sgd(model))
    losses = [
        float(optimizer.step(closure_for(model, optimizer, clear, ranks, step)).detach()) for step in range(STEPS)
    ]
    return flat(model), losses


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return xo.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def closures_with_sgd() -> list[tuple[Tensor, list[float]]]:
    log = invariants.start()
    results = [train(wrapped, [xo.rank()], clear) for clear in CLEARINGS]
    assert log.collectives
    invariants.require_same_collectives()
    return results


def test_a_closure_equals_the_reference_however_gradients_are_cleared() -> None:
    first, second = run_ranks(closures_with_sgd)
    for clear, (ours, my_losses), (theirs, their_losses) in zip(CLEARINGS, first, second, strict=True):
        reference, joint_losses = train(lambda model, optimizer: optimizer, [0, 1], clear)
        assert (ours - reference).abs().max() < 1e-12
        assert torch.equal(ours, theirs)
        means = torch.tensor([my_losses, their_losses], dtype=torch.float64).mean(0)
        assert torch.allclose(means, torch.tensor(joint_losses, dtype=torch.float64), atol=1e-12)


def other_arguments() -> dict[str, str]:
    xo.init()
    model = make_model()
    optimizer = wrapped(model, sgd(model))
    seen = {}
    with pytest.raises(TypeError) as caught:
        optimizer.zero_grad(set_to_nothing=True)
    seen["unknown keyword"] = str(caught.value)
    loss_of(model, [xo.rank()], 0).backward()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError) as caught_closure:
        scaler.step(optimizer, closure=lambda: None)
    seen["closure under a scaler"] = str(caught_closure.value)
    optimizer.zero_grad()
    idle = torch.amp.GradScaler("cpu", enabled=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        idle.step(optimizer, closure_for(model, optimizer, CLEARINGS[0], [xo.rank()], 0))
    invariants.require_same("parameters", invariants.digests(model))
    return seen


def test_what_torch_refuses_stays_torchs_own_refusal() -> None:
    for seen in run_ranks(other_arguments):
        assert "set_to_nothing" in seen["unknown keyword"]
        assert "closure" in seen["closure under a scaler"].lower()


def lbfgs() -> tuple[str, list[Tensor]]:
    xo.init()
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    message = ""
    if xo.size() > 1:
        with pytest.raises(ValueError, match="LBFGS") as caught:
            wrapped(model, optimizer)
        return str(caught.value), []
    results = []
    for wrap in (wrapped, lambda model, optimizer: optimizer):
        model = make_model()
        optimizer = wrap(model, torch.optim.LBFGS(model.parameters(), max_iter=4))
        for step in range(3):
            optimizer.step(closure_for(model, optimizer, CLEARINGS[0], [0], step))
        results.append(flat(model))
    return message, results


def test_lbfgs_is_refused_with_peers_and_untouched_alone() -> None:
    for message, _ in run_ranks(lbfgs):
        assert message.startswith("optimizer: LBFGS")
        assert "first-order optimizer" in message
    [(_, (ours, bare))] = run_ranks(lbfgs, 1, launcher="none")
    assert torch.equal(ours, bare)


def closure_under_priority() -> str:
    xo.init()
    model = make_model()
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule="priority")
    with pytest.raises(ValueError, match="is not there yet") as caught:
        optimizer.step(closure_for(model, optimizer, CLEARINGS[0], [xo.rank()], 0))
    return str(caught.value)


def test_priority_refuses_a_closure_by_name_of_the_parameter() -> None:
    for message in run_ranks(closure_under_priority):
        assert "gradient of '" in message
        assert "Overlapped" in message
