"""Situation 15: parameters without names, names that collide, and errors that nobody can read.

Where collectives are matched by the parameters' names, two groups without names or two models that both have a
``layer.weight`` end in a duplicate-name error, or in a shutdown that hides it. With us names are for messages only:
without them everything works, and two optimizers may use the same ones. What cannot be meant is refused when
wrapping, and where ranks truly differ each of them is told the first name that is missing, or both shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from crossover.attachment import Attachment
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import adamw_three_groups, flat, make_model, sgd

STEPS = 4


def train(models: list[nn.Module], optimizers: list[Any], ranks: list[int]) -> None:
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _, features, targets in invariants.parts_of_step(step, ranks):
            prediction = torch.stack([model(features) for model in models]).sum(0)
            (nn.functional.mse_loss(prediction, targets) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()


def groups_without_names(schedule: str) -> None:
    model, alone = make_model(), make_model()
    job = Job(model, adamw_three_groups(model), named_parameters=None, schedule=schedule, **SMALL_BUCKETS)
    train([model], [job.optimizer], [xo.rank()])
    job.check(steps=STEPS)
    train([alone], [adamw_three_groups(alone)], list(range(xo.size())))
    invariants.require_close("parameters", flat(model), flat(alone))
    slots = [slot for bucket in invariants.engine_of(job.optimizer).buckets for slot in bucket.slots]
    assert sorted(slot.name for slot in slots) == [f"parameter {number}" for number in range(6)]


def two_models_with_equal_names(schedule: str) -> None:
    models, alone = [make_model(0), make_model(1)], [make_model(0), make_model(1)]
    jobs = [Job(model, sgd(model), schedule=schedule, **SMALL_BUCKETS) for model in models]
    train(models, [job.optimizer for job in jobs], [xo.rank()])
    for job in jobs:
        job.check(steps=STEPS)
    train(alone, [sgd(model) for model in alone], list(range(xo.size())))
    for model, other in zip(models, alone, strict=True):
        invariants.require_close("parameters", flat(model), flat(other))


def what_works() -> None:
    invariants.start()
    for schedule in ("overlapped", "priority"):
        groups_without_names(schedule)
        two_models_with_equal_names(schedule)


def test_names_are_not_needed_and_may_be_used_twice() -> None:
    run_ranks(what_works, 2)


def refused(optimizer: torch.optim.Optimizer, named: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        xo.DistributedOptimizer(optimizer, named_parameters=named)
    assert Attachment.of(optimizer) is None


def what_cannot_be_meant() -> None:
    first, second = make_model(0), make_model(1)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    pairs = [*first.named_parameters(), *second.named_parameters()]
    refused(both, pairs, r"'0\.weight' names two parameters.*prefix")
    refused(both, first.named_parameters(), r"6 of the optimizer's 12.*number 6 of shape \(40, 7\)")
    walked = first.named_parameters()
    Job(first, sgd(first), named_parameters=walked)
    refused(sgd(first), walked, r"generator can be walked only once")
    refused(sgd(first), [name for name, _ in first.named_parameters()], r"pair \(name, parameter\)")
    prefixed = [(f"{n}.{name}", p) for n, m in enumerate((first, second)) for name, p in m.named_parameters()]
    job = Job(second, torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1), named_parameters=prefixed)
    job.check(steps=0)


def other_width() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 31), nn.GELU(), nn.Linear(31, 3)).double()


def one_layer_less() -> nn.Module:
    return nn.Sequential(*list(make_model())[:-1])


def other_dtype() -> nn.Module:
    return make_model().float()


def other_order() -> nn.Module:
    model = make_model()
    return nn.ModuleDict({name: model[int(name)] for name in ("4", "2", "0")})


DIFFERENCES: list[tuple[Callable[[], nn.Module], str]] = [
    (other_width, r"rank 0 has 2\.weight \(30, 40\).* where rank 1 has 2\.weight \(31, 40\)"),
    (one_layer_less, r"rank 0 has 4\.weight \(3, 30\).* where rank 1 has nothing of that name"),
    (other_dtype, r"rank 0 has 0\.weight .*float64 where rank 1 has 0\.weight .*float32"),
    (other_order, r"rank 0 has 0\.weight .* as number 0 where rank 1 has 4\.weight"),
]


def true_mismatch() -> None:
    for build, words in DIFFERENCES:
        model = make_model() if xo.rank() == 0 else build()
        with pytest.raises(xo.RankMismatchError, match=words):
            xo.DistributedOptimizer(sgd(model), model.named_parameters())
    model = make_model()
    given = [p for name, p in model.named_parameters() if xo.rank() or name != "0.weight"]
    with pytest.raises(xo.RankMismatchError, match=r"rank 0 has nothing of that name where rank 1 has 0\.weight"):
        xo.DistributedOptimizer(torch.optim.SGD(given, lr=0.1), model.named_parameters())
    with pytest.raises(xo.RankMismatchError, match=r"rank 0 has backward_passes_per_step=1 where rank 1 has .*=2"):
        xo.DistributedOptimizer(sgd(model), model.named_parameters(), backward_passes_per_step=1 + xo.rank())
    invariants.require_same_collectives()


def every_refusal() -> None:
    invariants.start()
    what_cannot_be_meant()
    true_mismatch()


def test_what_cannot_be_meant_and_what_differs_is_told_by_name_and_shape() -> None:
    run_ranks(every_refusal, 2)
