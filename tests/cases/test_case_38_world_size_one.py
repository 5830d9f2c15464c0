"""Situation 38: a new user tries it alone first, with one process.

Every option has to train as the bare optimizer does, bit for bit, with a process group of one and without any, and
every method that is ours has to be there and do no harm.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import crossover as xo
from tests.harness import run_ranks
from tests.training import adamw_three_groups, batch, flat, make_model

STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "priority": {"schedule": "priority"},
    "sum": {"op": xo.Sum},
    "accumulation": {"backward_passes_per_step": 2},
    "half precision on the wire": {"compression": xo.Compression.fp16},
    "predivided": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "sparse as dense": {"sparse_as_dense": True},
    "tiny buckets": {"bucket_cap_mb": 1e-6, "first_bucket_cap_mb": 1e-6},
}


def backward(model: nn.Module, step: int) -> None:
    features, targets = batch(0, step)
    nn.functional.mse_loss(model(features), targets).backward()


def train(model: nn.Module, optimizer: Any, passes: int) -> Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            backward(model, step * passes + part)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return flat(model)


def train_with_all_our_methods(model: nn.Module, optimizer: Any) -> Tensor:
    """The same training with every method of ours called where a script might."""
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer.set_backward_passes_per_step(1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with optimizer.no_sync():
            backward(model, step)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.flush()
    assert xo.join() == 0
    with optimizer.flushed():
        return flat(model)


def require_equal_to_bare(results: dict[str, Tensor]) -> None:
    """In the same process: the number of threads has an influence on rounding."""
    for name, trained in results.items():
        model = make_model()
        passes = OPTIONS.get(name, {}).get("backward_passes_per_step", 1)
        assert torch.equal(trained, train(model, adamw_three_groups(model), passes)), name


def every_option(own_group: bool) -> None:
    threads = threading.active_count()
    if own_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        threads = threading.active_count()
    xo.init()
    results: dict[str, Tensor] = {}
    for name, options in OPTIONS.items():
        model = make_model()
        optimizer = xo.DistributedOptimizer(adamw_three_groups(model), model.named_parameters(), **options)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        results[name] = train(model, optimizer, options.get("backward_passes_per_step", 1))
    model = make_model()
    optimizer = xo.DistributedOptimizer(adamw_three_groups(model), model.named_parameters())
    results["every method"] = train_with_all_our_methods(model, optimizer)
    model = make_model()
    optimizer = xo.DistributedOptimizer(adamw_three_groups(model), model.named_parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Running all_reduce on global rank")  # torch's, of a group of nobody
        with Join([optimizer]):
            results["within Join"] = train(model, optimizer, 1)
    assert threading.active_count() == threads
    assert dist.is_initialized() is own_group
    assert xo.size() == 1
    require_equal_to_bare(results)


@pytest.mark.parametrize("launcher", ["none", "torch"])
@pytest.mark.parametrize("own_group", [False, True], ids=["no group", "a group of one"])
def test_alone_equals_the_bare_optimizer_bit_for_bit(launcher: str, own_group: bool) -> None:
    run_ranks(every_option, 1, own_group, launcher=launcher)


def under_horovodrun() -> None:
    xo.init()
    results = {}
    for name, options in OPTIONS.items():
        model = make_model()
        optimizer = xo.DistributedOptimizer(adamw_three_groups(model), model.named_parameters(), **options)
        results[name] = train(model, optimizer, options.get("backward_passes_per_step", 1))
    require_equal_to_bare(results)


@pytest.mark.horovod
def test_alone_under_horovodrun() -> None:
    run_ranks(under_horovodrun, 1, launcher="horovod")


def wrong_arguments() -> list[str]:
    """What is wrong with peers is wrong alone: a mistake shows on the laptop, not on the cluster."""
    xo.init()
    messages = []
    for options in ({"op": xo.Max}, {"backward_passes_per_step": 0}, {"schedule": "fastest"}, {"bucket_cap_mb": -1}):
        model = make_model()
        with pytest.raises(ValueError, match=next(iter(options))) as caught:
            xo.DistributedOptimizer(adamw_three_groups(model), model.named_parameters(), **options)
        messages.append(str(caught.value))
    return messages


def test_a_wrong_argument_is_told_alone_too() -> None:
    assert len(run_ranks(wrong_arguments, 1, launcher="none")[0]) == 4
