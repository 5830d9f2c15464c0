"""Situation 30: the optimizer state of one rank is given to all, whatever it is made of.

Adam's plain-number step, an optimizer without state, ``None``, strings and numpy numbers each broke code that takes
everything for a tensor. Tried here with every class in ``torch.optim``, fresh and after three steps that only rank 0
took, with rank 1 holding no state: all ranks then hold the same, of the same types, and train on alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import batch, make_model

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
Build = Callable[[nn.Module], torch.optim.Optimizer]


def every_class() -> dict[str, Build]:
    """Each optimizer of ``torch.optim`` that can be trained in double precision on dense gradients with peers."""
    builds: dict[str, Build] = {}
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name)
        if not isinstance(kind, type) or name in ("Optimizer", "LBFGS", "SparseAdam"):
            continue
        if name == "Muon":
            builds[name] = lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)
        else:
            builds[name] = lambda model, kind=kind: kind(model.parameters(), lr=0.01)
    builds["SGD, momentum"] = lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    builds["Adam, amsgrad, two groups"] = lambda model: torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters()}], amsgrad=True
    )
    builds["AdamW, tensor rate"] = lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    builds["SGD, other kinds"] = with_other_kinds
    return builds


def with_other_kinds(model: nn.Module) -> torch.optim.Optimizer:
    """Strings, ``None``, numpy numbers, tuples and flags where others expect tensors."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.param_groups[0].update(
        tag=f"from rank {xo.rank()}",
        nothing=None,
        number=np.float64(xo.rank() + 0.5),
        pair=(xo.rank(), None),
        flag=True,
    )
    optimizer.state[model[0].weight] = {"note": f"rank {xo.rank()}", "none": None, "count": np.int64(xo.rank())}
    return optimizer


def one_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    features, targets = batch(rank, step)
    nn.functional.mse_loss(model(features), targets).backward()
    optimizer.step()


def described(value: Any) -> Any:
    """``value`` with the type of everything in it, comparable between ranks."""
    if isinstance(value, Tensor):
        numbers = value.detach().double().flatten().tolist()
        return "tensor", str(value.dtype), tuple(value.shape), value.stride(), str(value.device), numbers
    if isinstance(value, dict):
        return "dict", {key: described(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [described(entry) for entry in value]
    return type(value).__name__, value


def tried(name: str, build: Build, trained: bool) -> None:
    model = make_model()
    if trained and xo.rank() == 0:
        bare = build(model)
        for step in range(3):
            one_step(model, bare, 0, step)
        optimizer = xo.DistributedOptimizer(bare, list(model.named_parameters()))
    else:
        optimizer = xo.DistributedOptimizer(build(model), list(model.named_parameters()))
    before = described(optimizer.state_dict())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    after = described(optimizer.state_dict())
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True)), f"{name}: stepped"
    if xo.rank() == 0:
        assert after == before, f"{name}: the root's own state changed"
    invariants.require_same(f"{name}: state", after)
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(2):
        one_step(model, optimizer, xo.rank(), 3 + step)
    invariants.require_same(f"{name}: parameters", invariants.digests(model))
    invariants.require_same(f"{name}: state after training on", described(optimizer.state_dict()))


def every_kind() -> list[str]:
    xo.init()
    builds = every_class()
    for name, build in builds.items():
        for trained in (False, True):
            tried(name, build, trained)
    return list(builds)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_class_fresh_and_trained(launcher: str) -> None:
    for names in run_ranks(every_kind, launcher=launcher, env={"CROSSOVER_TIMEOUT": "20"}):
        assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "NAdam", "SGD, other kinds"} <= set(names)


def sparse_state() -> None:
    xo.init()
    table = nn.Embedding(6, 3, sparse=True).double()
    xo.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer: Any = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    if xo.rank() == 0:
        table(torch.tensor([0, 2])).sum().backward()
        optimizer.step()
    optimizer = xo.DistributedOptimizer(optimizer, table.named_parameters())
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    xo.broadcast_parameters(table.state_dict(), root_rank=0)
    for rows in ([1, 2], [3], [5, 5]):
        optimizer.zero_grad()
        table(torch.tensor(rows) if xo.rank() == 0 else torch.tensor([4])).sum().backward()
        optimizer.step()
    invariants.require_same("state", described(optimizer.state_dict()))
    invariants.require_same("parameters", invariants.digests(table))


def lbfgs_alone() -> None:
    xo.init()
    model = make_model()
    optimizer = xo.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), model.named_parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        features, targets = batch(0, 0)
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    before = described(optimizer.state_dict())
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    assert described(optimizer.state_dict()) == before


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sparse_adam(launcher: str) -> None:
    run_ranks(sparse_state, launcher=launcher, env={"CROSSOVER_TIMEOUT": "20"})


def test_lbfgs_where_it_is_allowed() -> None:
    run_ranks(lbfgs_alone, 1, launcher="none")
