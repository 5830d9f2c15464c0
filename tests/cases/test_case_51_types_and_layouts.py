"""Situation 51: parameters that are not dense float32 tensors in the usual order.

Flat buckets of one type meet tensors that are none of that: errors, silent copies, imaginary parts lost, updates left
out. One model here holds double, single and half precision, complex numbers, a channels-last convolution with a 1x1
kernel, a transposed weight, a sparse embedding that one rank alone uses, a scalar and a parameter of no elements.
Each follows the reference and keeps its strides; no bucket mixes types; what cannot be reduced is refused by name
when the optimizer is wrapped.
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

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
ENV = {"CROSSOVER_TIMEOUT": "10"}
STEPS = 4


class Zoo(nn.Module):
    """Parameters of many kinds; each adds a term of its own to the loss."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fine = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        self.plain = nn.Parameter(torch.randn(4, 3))
        self.brain = nn.Parameter(torch.randn(4, 2).bfloat16())
        self.halved = nn.Parameter(torch.randn(3).half())
        self.phased = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.conv = nn.Conv2d(4, 6, 1).to(memory_format=torch.channels_last)
        self.wide_conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.table = nn.Embedding(7, 3, sparse=sparse)

    def forward(self, seed: int, uses_table: bool) -> Tensor:
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        image = noise(2, 4, 5, 5).to(memory_format=torch.channels_last)
        terms = [
            (self.fine * noise(5, 3).double()).square().sum(),
            (self.plain * noise(4, 3)).square().sum(),
            (self.brain.float() * noise(4, 2)).square().sum(),
            (self.halved.float() * noise(3)).square().sum(),
            (self.phased * torch.complex(noise(3, 2), noise(3, 2)) + 1j).abs().square().sum(),
            self.conv(image).square().mean(),
            self.wide_conv(image[:, :2].contiguous(memory_format=torch.channels_last)).square().mean(),
            (self.transposed * noise(5, 3)).square().sum(),
            (self.scalar * noise(1)).square().sum(),
            self.empty.sum(),
        ]
        if uses_table:
            rows = torch.randint(0, 7, (3,), generator=generator)
            terms.append((self.table(rows) * noise(3, 3)).square().sum())
        return torch.stack([term.double().reshape(()) for term in terms]).sum()


Build = Callable[[Zoo], list[torch.optim.Optimizer]]


def sgd(model: Zoo) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.01)]


def sgd_with_momentum(model: Zoo) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]


def adam(model: Zoo) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=0.01)]


def adam_and_sparse_adam(model: Zoo) -> list[torch.optim.Optimizer]:
    dense = [parameter for name, parameter in model.named_parameters() if name != "table.weight"]
    return [torch.optim.Adam(dense, lr=0.01), torch.optim.SparseAdam(model.table.parameters(), lr=0.01)]


RECIPES: dict[str, tuple[Build, bool, dict[str, Any]]] = {
    "sgd": (sgd, True, {}),
    "sgd, small buckets": (sgd, True, {"bucket_cap_mb": 1e-5, "first_bucket_cap_mb": 1e-5}),
    "sgd, sparse as dense": (sgd, True, {"sparse_as_dense": True}),
    "sgd, dense": (sgd, False, {}),
    "sgd with momentum, dense": (sgd_with_momentum, False, {}),
    "adam, dense": (adam, False, {}),
    "adam and SparseAdam": (adam_and_sparse_adam, True, {}),
}


def uses_table(name: str, rank: int) -> bool:
    """Rank 0 alone, but for an optimizer that has no other parameter: on each rank it has to take part."""
    return rank == 0 or name == "adam and SparseAdam"


def seed_of(rank: int, step: int) -> int:
    return 100 * step + rank


def alone(name: str) -> Zoo:
    build, sparse, _ = RECIPES[name]
    model = Zoo(sparse)
    optimizers = build(model)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in (0, 1):
            (model(seed_of(rank, step), uses_table(name, rank)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


def layout(model: Zoo) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, parameter.dtype, parameter.stride()) for name, parameter in model.named_parameters()]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.float16: 4e-3}.get(dtype, 1e-5)


def trained(name: str) -> None:
    build, sparse, options = RECIPES[name]
    model = Zoo(sparse)
    strides = layout(model)
    if xo.rank() == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    names = [(label, parameter) for label, parameter in model.named_parameters()]
    optimizers: list[Any] = [
        xo.DistributedOptimizer(optimizer, named_parameters=names, **options) for optimizer in build(model)
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(seed_of(xo.rank(), step), uses_table(name, xo.rank())).backward()
        for label, parameter in model.named_parameters():
            assert parameter.grad is not None, label
            assert parameter.grad.dtype == parameter.dtype
            if parameter.grad.layout is torch.strided:
                assert parameter.grad.stride() == parameter.stride(), f"{label}: {parameter.grad.stride()}"
        for optimizer in optimizers:
            optimizer.step()
    assert layout(model) == strides
    reference = dict(alone(name).named_parameters())
    for label, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter,
            reference[label],
            rtol=0,
            atol=tolerance(parameter.dtype),
            msg=lambda text, n=label: f"{n}: {text}",
        )
        assert not parameter.numel() or not torch.equal(parameter, dict(Zoo(sparse).named_parameters())[label]), label
    invariants.require_same("parameters", invariants.digests(model))
    for optimizer in optimizers:
        for bucket in invariants.engine_of(optimizer).buckets:
            assert len({slot.parameter.dtype for slot in bucket.slots}) == 1


def every_recipe() -> None:
    invariants.start()
    for name in RECIPES:
        trained(name)
    invariants.require_same_collectives()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_parameter_follows_the_reference_and_keeps_its_strides(launcher: str) -> None:
    run_ranks(every_recipe, launcher=launcher, env=ENV)


def priority_and_compression() -> None:
    """The Priority schedule, and half precision on the wire, which only rounds what it carries."""
    invariants.start()
    for options in ({"schedule": "priority"}, {"compression": xo.Compression.bf16}):
        model = Zoo(sparse=False)
        optimizer: Any = xo.DistributedOptimizer(sgd(model)[0], model.named_parameters(), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(seed_of(xo.rank(), step), xo.rank() == 0).backward()
            optimizer.step()
        optimizer.flush()
        invariants.require_same("parameters", invariants.digests(model))
        reference = dict(alone("sgd, dense").named_parameters())
        for label, parameter in model.named_parameters():
            slack = 1e-9 if "schedule" in options else 2e-2
            atol = max(tolerance(parameter.dtype), slack)
            torch.testing.assert_close(
                parameter, reference[label], rtol=0, atol=atol, msg=lambda text, n=label: f"{n}: {text}"
            )


def test_with_priority_and_on_a_narrow_wire() -> None:
    run_ranks(priority_and_compression, env=ENV)


class Float8(nn.Module):
    """One parameter of a type that no backend reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.zeros(2))
        self.tiny = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))


def refused_at_wrap_time() -> list[str]:
    xo.init()
    messages = []
    model = Float8()
    with pytest.raises(ValueError, match="'tiny'") as caught:
        xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    messages.append(str(caught.value))
    table = nn.Embedding(3, 2, sparse=True)
    meta = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="'weight'") as caught:
        xo.DistributedOptimizer(torch.optim.SGD(meta.parameters(), lr=0.1), meta.named_parameters())
    messages.append(str(caught.value))
    optimizer: Any = xo.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    xo.broadcast_parameters(table.state_dict(), root_rank=0)
    table(torch.tensor([xo.rank()])).sum().backward()
    optimizer.step()
    return messages


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_cannot_be_reduced_is_refused_by_name(launcher: str) -> None:
    first, second = run_ranks(refused_at_wrap_time, launcher=launcher, env=ENV)
    assert first == second
    assert "float8" in first[0]
    assert "cast" in first[0]
    assert "meta" in first[1]


def an_optimizer_without_gradients_on_one_rank() -> None:
    xo.init()
    model = Zoo(sparse=True)
    names = list(model.named_parameters())
    optimizers: list[Any] = [xo.DistributedOptimizer(optimizer, names) for optimizer in adam_and_sparse_adam(model)]
    model(0, xo.rank() == 0).backward()
    for optimizer in optimizers:
        optimizer.step()


def test_an_optimizer_that_one_rank_does_not_use_is_named() -> None:
    env = {"CROSSOVER_TIMEOUT": "5"}
    outcomes = run_ranks(an_optimizer_without_gradients_on_one_rank, env=env, expect_failure=True, timeout=60)
    for outcome in outcomes:
        assert outcome.error == "CommunicationError", outcome.describe()
        assert outcome.exit_code == 1
    assert "'table.weight'" in outcomes[0].message, outcomes[0].message


def fewer_elements_than_ranks() -> None:
    """Buckets smaller than the number of ranks, and parameters of no elements at the end of a group."""
    xo.init()
    model = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(()))])
    optimizer: Any = xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), bucket_cap_mb=1e-9)
    for _ in range(2):
        optimizer.zero_grad()
        sum((parameter.sum() * (xo.rank() + 1) for parameter in model), torch.zeros(())).backward()
        optimizer.step()
    assert [parameter.sum().item() for parameter in model] == [1 - 2 * 2, 0, 1 - 2 * 2]


def test_buckets_smaller_than_the_number_of_ranks() -> None:
    run_ranks(fewer_elements_than_ranks, 3, env=ENV)
