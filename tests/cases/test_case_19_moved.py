"""Situation 19: a parameter, its gradient, or the optimizer around it is exchanged after wrapping.

Hooks may sit on an autograd node, and gradients in memory, that are no longer the parameter's: after a model went to
another device or dtype and back, after ``set_`` or ``.data =``, or with another ``Parameter`` under the same name,
ranks then apply gradients of their own without a message. With us such a model is trained as one process would train
it; where averaging has to wait for ``step()``, because no hook is called any more or a gradient was set by hand, a
warning says so; and what cannot go on, a parameter of another dtype or shape, is an error that names it. An optimizer
is wrapped once at a time, and wrapping anew each epoch leaves nothing behind.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import make_model, sgd

STEPS = 8
Move = Callable[[nn.Module, Any], None]


def to_other_dtype_and_back(model: nn.Module, optimizer: Any) -> None:
    model.float()
    model.double()


def set_to_other_memory(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.set_(parameter.detach().clone())


def give_other_data(model: nn.Module, optimizer: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def give_gradients_other_data(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clone()


def exchange_in_the_model(model: nn.Module, optimizer: Any) -> None:
    """The optimizer is not told: neither the old parameter nor the new one is trained from here on."""
    layer = model[2]
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)


def exchange_in_the_optimizer_too(model: nn.Module, optimizer: Any) -> None:
    layer = model[2]
    old, new = layer.weight, nn.Parameter(layer.weight.detach() * 0.9)
    layer.weight = new
    if hasattr(optimizer, "flush"):
        optimizer.flush()
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    optimizer.state.pop(old, None)


def backward(model: nn.Module, step: int, ranks: list[int]) -> None:
    for _, features, targets in invariants.parts_of_step(step, ranks):
        (nn.functional.mse_loss(model(features), targets) / len(ranks)).backward()


def train(model: nn.Module, optimizer: Any, move: Move, ranks: list[int], set_to_none: bool, cleared: bool) -> None:
    """``move`` is done between steps with the gradients still there, or ``cleared`` before."""
    for step in range(STEPS):
        if step in (3, 5) and not cleared:
            move(model, optimizer)
        optimizer.zero_grad(set_to_none=set_to_none)
        if step in (3, 5) and cleared:
            move(model, optimizer)
        backward(model, step, ranks)
        optimizer.step()


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def moved(move: Move, schedule: str, set_to_none: bool, cleared: bool) -> None:
    model, alone = make_model(), make_model()
    job = Job(model, sgd(model), schedule=schedule, **SMALL_BUCKETS)

    def move_flushed(model: nn.Module, optimizer: Any) -> None:
        optimizer.flush()
        move(model, optimizer)

    train(model, job.optimizer, move_flushed, [xo.rank()], set_to_none, cleared)
    job.check(steps=STEPS)
    train(alone, sgd(alone), move, list(range(xo.size())), set_to_none, cleared)
    what = f"parameters after {move.__name__}, {schedule}, {set_to_none}, {cleared}"
    invariants.require_close(what, parameters(model), parameters(alone))


MOVES = [
    to_other_dtype_and_back,
    set_to_other_memory,
    give_other_data,
    give_gradients_other_data,
    exchange_in_the_model,
    exchange_in_the_optimizer_too,
]


def every_move() -> None:
    invariants.start()
    with invariants.warnings_of_the_library() as warnings:
        for move in MOVES:
            for cleared in (True, False):
                moved(move, "overlapped", True, cleared)
                moved(move, "overlapped", False, cleared)
            moved(move, "priority", True, cleared=True)
    assert not warnings, warnings


def test_a_model_that_was_moved_is_trained_on() -> None:
    run_ranks(every_move, 2)


def gradients_by_hand(model: nn.Module, step: int, ranks: list[int]) -> None:
    loss = sum(
        nn.functional.mse_loss(model(features), targets) / len(ranks)
        for _, features, targets in invariants.parts_of_step(step, ranks)
    )
    assert isinstance(loss, Tensor)
    wanted = list(model.parameters())
    for parameter, gradient in zip(wanted, torch.autograd.grad(loss, wanted), strict=True):
        parameter.grad = gradient


def compare_without_hooks(compute: Any, before: Callable[[nn.Module], None], warned: bool, schedule: str) -> None:
    model, alone = make_model(), make_model()
    job = Job(model, sgd(model), schedule=schedule, **SMALL_BUCKETS)
    with invariants.warnings_of_the_library() as warnings:
        for step in range(STEPS):
            job.optimizer.zero_grad()
            if step == 3:
                job.optimizer.flush()
                before(model)
            compute(model, step, [xo.rank()])
            job.optimizer.step()
    job.check(steps=STEPS)
    assert len(warnings) == (1 if warned and xo.rank() == 0 else 0), warnings
    for warning in warnings:
        assert "'0.weight'" in warning
        assert "clipping" in warning
    optimizer = sgd(alone)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 3:
            before(alone)
        compute(alone, step, list(range(xo.size())))
        optimizer.step()
    invariants.require_close(f"parameters, {schedule}", parameters(model), parameters(alone))


def swap(model: nn.Module) -> None:
    """Converts the model as torch can be told to: the tensors behind the parameters change places, hooks are lost."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.float()
    model.double()
    torch.__future__.set_swap_module_params_on_conversion(False)


def no_hook_is_called() -> None:
    invariants.start()
    for schedule in ("overlapped", "priority"):
        compare_without_hooks(gradients_by_hand, lambda model: None, True, schedule)
        compare_without_hooks(backward, swap, True, schedule)
        compare_without_hooks(backward, lambda model: None, False, schedule)


def test_gradients_that_no_hook_saw_are_averaged_in_step_with_a_warning() -> None:
    run_ranks(no_hook_is_called, 2)


def wider(model: nn.Module) -> None:
    model[4].weight.data = torch.ones(5, 30, dtype=torch.float64)
    model[4].bias.data = torch.ones(5, dtype=torch.float64)


def to_half(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def exchange_all(model: nn.Module) -> None:
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


def what_cannot_go_on() -> None:
    for change, words in ((wider, r"4\.(weight|bias).*\(5"), (to_half, r"\d\.(weight|bias).*float64.*bfloat16")):
        model = make_model()
        job = Job(model, sgd(model))
        backward(model, 0, [xo.rank()])
        job.optimizer.step()
        job.optimizer.zero_grad()
        change(model)
        features = invariants.parts_of_step(1, [xo.rank()])[0][1]
        with pytest.raises(ValueError, match=words):
            model(features.to(model[0].weight.dtype)).sum().backward()
    model = make_model()
    job = Job(model, sgd(model))
    exchange_all(model)
    with invariants.warnings_of_the_library() as warnings:
        for step in range(STEPS):
            backward(model, step, [xo.rank()])
            job.optimizer.step()
    assert len(warnings) == (1 if xo.rank() == 0 else 0), warnings
    assert all("load_state_dict(assign=True)" in warning for warning in warnings)
    job.check(steps=STEPS)
    with pytest.raises(ValueError, match="wrapped already"):
        xo.DistributedOptimizer(job.optimizer, model.named_parameters())
    job.check(steps=STEPS)


def left_over(model: nn.Module) -> dict[str, int]:
    return {
        "hooks": max(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()),
        "hooks on all modules": len(torch.nn.modules.module._global_forward_pre_hooks),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def wrap_fifty_times() -> None:
    invariants.start()
    model, alone = make_model(), make_model()
    seen = []
    for epoch in range(50):
        optimizers: list[Any] = [sgd(model), sgd(alone)]
        job = Job(model, optimizers[0], schedule="priority" if epoch % 2 else "overlapped")
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
        for trained, optimizer, ranks in ((model, optimizers[0], [xo.rank()]), (alone, optimizers[1], [0, 1])):
            optimizer.zero_grad()
            backward(trained, epoch, ranks)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        seen.append(left_over(model))
    job.check(steps=1)
    invariants.require_close("parameters", parameters(model), parameters(alone))
    for count, early in seen[5].items():
        assert seen[-1][count] <= early + 2, f"{count}: {[entry[count] for entry in seen]}"
    assert seen[-1]["hooks"] == 1
    del job, optimizers, optimizer, schedulers, scheduler
    gc.collect()
    assert left_over(model)["hooks"] == 0


def two_optimizers_of_one_parameter() -> None:
    """Both live on: the older one may only be used as long as the newer one averages all of its parameters."""
    model = make_model()
    older = Job(model, sgd(model))
    backward(model, 0, [xo.rank()])
    older.optimizer.step()
    newer = Job(model, torch.optim.Adam(model[2].parameters()), named_parameters=None)
    older.optimizer.zero_grad()
    backward(model, 1, [xo.rank()])
    newer.optimizer.step()
    with pytest.raises(ValueError, match=r"SGD .*reattach\(\)"):
        older.optimizer.step()
    older.optimizer.reattach()
    older.optimizer.zero_grad()
    backward(model, 2, [xo.rank()])
    older.optimizer.step()
    older.check(steps=2)
    covering = Job(model, torch.optim.Adam(model.parameters()))
    covering.optimizer.zero_grad()
    backward(model, 3, [xo.rank()])
    older.optimizer.step()
    covering.optimizer.step()
    covering.check(steps=1)
    alone = make_model()
    first, second, third = sgd(alone), torch.optim.Adam(alone[2].parameters()), torch.optim.Adam(alone.parameters())
    for step, stepped in enumerate([[first], [second], [first], [first, third]]):
        first.zero_grad()
        backward(alone, step, list(range(xo.size())))
        for optimizer in stepped:
            optimizer.step()
    invariants.require_close("parameters", parameters(model), parameters(alone))


def every_refusal() -> None:
    invariants.start()
    what_cannot_go_on()
    two_optimizers_of_one_parameter()


def test_what_cannot_go_on_is_named() -> None:
    run_ranks(every_refusal, 2)


def test_wrapping_anew_leaves_nothing_behind() -> None:
    run_ranks(wrap_fifty_times, 2)
