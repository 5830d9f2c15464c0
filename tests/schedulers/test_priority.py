"""The ByteScheduler baseline beyond equal parameters (tests/distributed/test_equivalence.py): what it refuses, when
it applies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import crossover as xo
from crossover.schedulers import Priority, schedule_of
from crossover.schedulers.deferred import DeferredGradient
from tests.harness import run_ranks
from tests.training import batch, make_model, sgd


@pytest.mark.parametrize("argument", ["partition_bytes", "credit_bytes", "fuse_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4MB"])
def test_sizes_are_checked(argument, value):
    with pytest.raises(ValueError, match=argument):
        Priority(**{argument: value})


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"schedule.*overlapped"):
        schedule_of("fastest")


def test_mark_may_be_cleared_but_not_read():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = DeferredGradient(parameter, "layer.weight")
    torch.optim.SGD([parameter], lr=0.1).zero_grad(set_to_none=False)
    with pytest.raises(ValueError, match=r"layer\.weight.*Overlapped"):
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)


def backward(model: nn.Module, step: int) -> None:
    features, targets = batch(xo.rank(), step)
    nn.functional.mse_loss(model(features), targets).backward()


def updates_land_before_the_layer_runs() -> dict[str, object]:
    xo.init()
    model = make_model()
    schedule = Priority(partition_bytes=256, fuse_bytes=64)
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=schedule)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model, 0)
    optimizer.step()
    unchanged = all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))
    seen: list[bool] = []
    model[4].register_forward_pre_hook(lambda *_: seen.append(torch.equal(model[4].weight, start[4])))
    backward(model, 1)
    before_drop = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()  # the second average is thrown away
    backward(model, 2)
    kept = all(torch.equal(p, s) for p, s in zip(model.parameters(), before_drop, strict=True))
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipping = ""
    except ValueError as error:
        clipping = str(error)
    optimizer.step()
    optimizer.flush()
    return {"unchanged": unchanged, "stale in forward": seen[0], "kept": kept, "clipping": clipping}


def test_updates_land_before_the_layer_runs() -> None:
    for result in run_ranks(updates_land_before_the_layer_runs, 2):
        assert result["unchanged"], "step() itself changes nothing"
        assert not result["stale in forward"], "the layer saw its update"
        assert result["kept"], "an average that no step() asked for is dropped"
        assert "Overlapped" in str(result["clipping"])


class Borrower(nn.Module):
    """Uses a weight without calling the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.owner = nn.Linear(7, 3).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.owner.weight.t()


class Neighbours(Borrower):
    """The same, with a module that is called and whose parameters share a bucket with the borrowed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(3, 3).double()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.called(super().forward(features))


def borrows(kind: type[nn.Module]) -> None:
    xo.init()
    model = kind()
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule="priority")
    for step in range(2):
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("kind", [Borrower, Neighbours])
def test_weight_used_without_its_module_is_named(kind: type[nn.Module]) -> None:
    for outcome in run_ranks(borrows, 2, kind, expect_failure=True):
        assert outcome.error == "ValueError"
        assert "owner.weight" in outcome.message or "owner.bias" in outcome.message
