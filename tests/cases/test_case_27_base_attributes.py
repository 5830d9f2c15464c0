"""Situation 27: code of others uses what every ``torch.optim.Optimizer`` has.

Wrappers that skip the base constructor lack the hook registries or ``state``. Ours keeps the object: everything is
there, and each hook fires once for each ``step()`` of the user and never for one of ours.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import batch, flat, make_model, sgd

STEPS = 4


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    features, targets = batch(xo.rank(), step)
    nn.functional.mse_loss(model(features), targets).backward()
    optimizer.step()


def hooked(schedule: str) -> tuple[Counter[str], Counter[str], str]:
    """How often each hook of the optimizer fired before flush(), how often afterwards, and ``repr``."""
    xo.init()
    model = make_model()
    optimizer: Any = sgd(model)
    fired: Counter[str] = Counter()

    def note(name: str) -> Any:
        return lambda *_: fired.update([name])

    optimizer.register_step_pre_hook(note("step pre, before wrapping"))
    optimizer.register_step_post_hook(note("step post, before wrapping"))
    assert xo.DistributedOptimizer(optimizer, model.named_parameters(), schedule=schedule) is optimizer
    optimizer.register_step_pre_hook(note("step pre"))
    optimizer.register_step_post_hook(note("step post"))
    optimizer.register_state_dict_pre_hook(note("state dict pre"))
    optimizer.register_state_dict_post_hook(note("state dict post"))
    optimizer.register_load_state_dict_pre_hook(note("load pre"))
    optimizer.register_load_state_dict_post_hook(note("load post"))
    everywhere = register_optimizer_step_post_hook(note("step post, of all optimizers"))
    for step in range(STEPS):
        one_step(model, optimizer, step)
    before_flush = Counter(fired)
    optimizer.flush()
    invariants.require_same("parameters", invariants.digests(model))
    optimizer.load_state_dict(optimizer.state_dict())
    everywhere.remove()
    return before_flush, fired, repr(optimizer)


@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
def test_hooks_fire_once_a_step(schedule: str) -> None:
    steps = dict.fromkeys(
        (
            *("step pre, before wrapping", "step post, before wrapping"),
            *("step pre", "step post", "step post, of all optimizers"),
        ),
        STEPS,
    )
    states = dict.fromkeys(("state dict pre", "state dict post", "load pre", "load post"), 1)
    for before_flush, fired, text in run_ranks(hooked, 2, schedule):
        assert before_flush == steps
        assert fired == {**steps, **states}
        assert text == repr(sgd(make_model()))


def attributes() -> None:
    xo.init()
    model = make_model()
    bare = sgd(make_model())
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    assert type(optimizer) is torch.optim.SGD
    assert isinstance(optimizer, torch.optim.Optimizer)
    missing = {name for name in dir(bare) if not hasattr(optimizer, name)}
    assert missing == set()
    assert optimizer.defaults == bare.defaults
    assert not optimizer.state
    for step in range(2):
        one_step(model, optimizer, step)
    assert set(optimizer.state) == set(model.parameters())
    assert callable(optimizer.profile_hook_step(lambda self: None))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(model, optimizer, 2)
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())
    copies_are_bare(model, optimizer)


def copies_are_bare(model: nn.Module, optimizer: Any) -> None:
    """A copy is an optimizer by itself: it holds parameters of its own and starts no collective."""
    pair_model, pair_optimizer = copy.deepcopy((model, optimizer))
    _, revived = pickle.loads(pickle.dumps((model, optimizer)))
    for other in (pair_optimizer, revived):
        assert type(other) is torch.optim.SGD
        assert not hasattr(other, "flush")
    if xo.rank() == 0:  # the other rank would be waited for if this shared anything
        before = flat(pair_model).clone()
        one_step(pair_model, pair_optimizer, 9)
        assert not torch.equal(flat(pair_model), before)
    one_step(model, optimizer, 3)
    invariants.require_same("parameters", invariants.digests(model))


def test_everything_of_the_base_class_is_there() -> None:
    run_ranks(attributes, env={"CROSSOVER_TIMEOUT": "10"})


def unwrapped_and_reloaded() -> None:
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
    for step in range(3):
        one_step(model, optimizer, step)
    saved = optimizer.state_dict()
    bare_model = make_model()
    bare: Any = torch.optim.Adam(bare_model.parameters(), lr=1.0)
    assert saved.keys() == bare.state_dict().keys()
    bare.load_state_dict(saved)
    again: Any = xo.DistributedOptimizer(torch.optim.Adam(make_model().parameters()))
    again.load_state_dict(bare.state_dict())
    assert again.param_groups[0]["lr"] == 0.01
    for mine, theirs in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_state_goes_to_a_bare_optimizer_and_back() -> None:
    run_ranks(unwrapped_and_reloaded)
