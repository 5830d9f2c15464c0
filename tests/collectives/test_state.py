"""Parameters and optimizer state from one rank to all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover import runtime
from tests.collectives.launchers import TWO_RANKS
from tests.harness import run_ranks


def _zoo(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    drawn = torch.randn(2, 3, 4, 5, generator=generator)
    return {
        "weight": drawn.clone(),
        "channels_last": drawn.to(memory_format=torch.channels_last),
        "transposed": drawn[0, 0].t(),
        "strided": drawn[:, ::2],
        "shared": torch.full((1,), float(rank)).expand(4),
        "scalar": torch.tensor(float(rank)),
        "steps": torch.tensor(rank),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor([rank == 0, True]),
        "half": drawn.half(),
        "brain": drawn.bfloat16(),
        "spectrum": torch.view_as_complex(drawn[..., :4].reshape(-1, 2).contiguous()),
        "bytes": torch.full((3,), rank, dtype=torch.uint8),
        "shorts": torch.full((3,), rank - 1, dtype=torch.int16),
        "nan": torch.tensor([math.nan, -0.0, math.inf]) * (1 if rank == 0 else 0),
        "large": torch.full((300_000,), float(rank)),
    }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _counted(count: list[int]) -> Callable[[], None]:
    """Count the collectives that the job's communicator is asked for; returns what undoes it."""
    communicator = runtime.context().communicator
    kinds = ("all_reduce", "broadcast", "all_gather")

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return call(*args, **kwargs)

        return counted

    for kind in kinds:
        setattr(communicator, kind, counting(getattr(communicator, kind)))

    def undo() -> None:
        for kind in kinds:
            delattr(communicator, kind)

    return undo


def _parameters() -> None:
    xo.init()
    rank = xo.rank()
    mine, expected = _zoo(rank), _zoo(1)
    strides = {name: tensor.stride() for name, tensor in mine.items()}
    if rank == 0:
        mine = dict(reversed(mine.items()))
    xo.broadcast_parameters(mine, root_rank=1)
    for name, tensor in mine.items():
        assert torch.equal(_bits(tensor), _bits(expected[name])), name
        assert tensor.stride() == strides[name]
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.fill_(rank)
        model[1].running_mean.fill_(rank)
        model[1].num_batches_tracked.fill_(rank + 5)
    version = model[0].weight
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    assert model[0].weight is version
    assert model[0].weight.unique().tolist() == [0.0]
    assert model[1].num_batches_tracked.item() == 5
    named, plain = model.named_parameters, model.parameters
    for given in (named(), list(named()), plain(), list(plain())):
        with torch.no_grad():
            model[0].weight.fill_(rank)
        xo.broadcast_parameters(given, root_rank=1)
        assert model[0].weight.unique().tolist() == [1.0]
    count = [0]
    undo = _counted(count)
    many = [torch.full((10,), float(rank)) for _ in range(3000)]
    xo.broadcast_parameters(many, root_rank=1)
    undo()
    assert all(tensor[9] == 1 for tensor in many)
    assert count[0] <= 4, "thousands of tensors take few collectives"
    for given, words in (({"a": torch.ones(2), "b": 3}, "'b'"), (5, "params"), ([torch.ones(2).to_sparse()], "sparse")):
        with pytest.raises(ValueError, match=words):
            xo.broadcast_parameters(given, root_rank=0)
    with pytest.raises(xo.RankMismatchError, match=r"rank 1: .*float32\(3,\)"):
        xo.broadcast_parameters({"a": torch.ones(2 + rank)}, root_rank=0)
    xo.barrier()
    xo.shutdown()


@pytest.mark.parametrize(("launcher", "size"), TWO_RANKS)
def test_parameters(launcher: str, size: int) -> None:
    run_ranks(_parameters, size, launcher=launcher, timeout=60)


def _optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    found = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return [kind for kind in found if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]


def _model() -> nn.ParameterList:
    generator = torch.Generator().manual_seed(7)
    return nn.ParameterList([torch.randn(4, 3, generator=generator), torch.randn(3, 2, generator=generator)])


def _made(kind: type[torch.optim.Optimizer], model: nn.ParameterList, rank: int) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.01 * (rank + 1)}
    if kind is torch.optim.LBFGS:
        return kind(model.parameters(), **options, max_iter=2)
    if kind is torch.optim.SGD:
        options["momentum"] = 0.9
    return kind([{"params": [model[0]]}, {"params": [model[1]], "lr": 0.5}], **options)


def _step(optimizer: torch.optim.Optimizer, model: nn.ParameterList, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if isinstance(optimizer, torch.optim.SparseAdam):
            parameter.grad = parameter.grad.to_sparse(1)
    optimizer.step(lambda: torch.tensor(1.0)) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _one_optimizer(kind: type[torch.optim.Optimizer], steps: tuple[int, int]) -> None:
    rank = xo.rank()
    model, reference_model = _model(), _model()
    optimizer, reference = _made(kind, model, rank), _made(kind, reference_model, 0)
    for number in range(steps[rank]):
        _step(optimizer, model, number + 10 * rank)
    for number in range(steps[0]):
        _step(reference, reference_model, number)
    before = [parameter.detach().clone() for parameter in model]
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    label = f"{kind.__name__} after {steps}"
    mine, theirs = optimizer.state_dict(), reference.state_dict()
    assert _equal(mine, theirs), (label, mine, theirs)
    assert all(torch.equal(b, p) for b, p in zip(before, model, strict=True)), f"{label}: parameters moved"
    # what was received is usable, and leads on to the same place
    with torch.no_grad():
        for parameter, expected in zip(model, reference_model, strict=True):
            parameter.copy_(expected)
    _step(optimizer, model, 99)
    _step(reference, reference_model, 99)
    assert all(torch.equal(m, r) for m, r in zip(model, reference_model, strict=True)), label


def _odd_values() -> None:
    rank = xo.rank()
    parameter = nn.Parameter(torch.ones(2))
    options = {"mode": "fast", "note": None, "count": np.int64(3), "factor": np.float32(0.5), "betas": (0.1, [2, "x"])}
    optimizer = torch.optim.SGD([parameter], lr=0.1)  # stateless
    rate = torch.tensor(0.3 if rank == 0 else 0.4)
    if rank == 0:
        optimizer.param_groups[0].update(options, rate=rate)
        optimizer.state[parameter] = {"name": "momentum", "pair": (1, torch.ones(2)), "numpy": np.arange(3)}
        optimizer.state["global"] = {"k": 1}
    else:
        optimizer.param_groups[0].update(lr=9.0, rate=rate, extra=1)
        optimizer.state[parameter] = {"stale": torch.ones(1)}
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.1
    assert "extra" not in group
    for key, value in options.items():
        assert group[key] == value
        assert type(group[key]) is type(value)
    assert group["rate"] is rate, "a tensor option is overwritten in place"
    assert rate.item() == pytest.approx(0.3)
    assert list(optimizer.state) == [parameter, "global"]
    state = optimizer.state[parameter]
    assert list(state) == ["name", "pair", "numpy"]
    assert state["name"] == "momentum"
    assert state["pair"][1].tolist() == [1, 1]
    assert state["numpy"].tolist() == [0, 1, 2]


def _wrapped() -> None:
    rank = xo.rank()
    model = nn.Linear(2, 2)
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = xo.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1)), named_parameters=model.named_parameters()
    )
    xo.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state
    model(torch.ones(3, 2) * (rank + 1)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict()["state"])
    if rank == 1:
        optimizer.state.clear()
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    assert _equal(optimizer.state_dict()["state"], saved)


def _optimizers() -> None:
    xo.init()
    rank = xo.rank()
    for kind in _optimizer_classes():
        for steps in ((0, 0), (3, 3), (3, 0), (0, 3), (2, 1)):
            _one_optimizer(kind, steps)
    _odd_values()
    _wrapped()
    uneven = torch.optim.SGD([nn.Parameter(torch.ones(2 + rank))], lr=0.1)
    with pytest.raises(xo.RankMismatchError, match=r"rank 1: .*\(3,\)"):
        xo.broadcast_optimizer_state(uneven, root_rank=0)
    with pytest.raises(ValueError, match="optimizer: is a Linear"):
        xo.broadcast_optimizer_state(nn.Linear(1, 1), root_rank=0)
    xo.barrier()
    xo.shutdown()


@pytest.mark.parametrize(("launcher", "size"), TWO_RANKS)
def test_optimizer_state(launcher: str, size: int) -> None:
    run_ranks(_optimizers, size, launcher=launcher, timeout=150)


def test_every_optimizer_of_torch_is_tried() -> None:
    assert {"SGD", "Adam", "AdamW", "LBFGS", "SparseAdam"} <= {kind.__name__ for kind in _optimizer_classes()}
