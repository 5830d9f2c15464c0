"""What training with a gate and averages that land later has to give: worked out by hand in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.selsync.local_steps import MakeOptimizer, backward, one_thread
from tests.training import flat

OnWay = tuple[int, Tensor, list[Tensor]]


@dataclass
class Late:
    """What became of each step.

    Attributes:
        after: for each step, each rank's parameters.
        launched: counts of steps after which an average was launched.
        landed: counts of steps after which one landed.
        synchronous: counts of steps after which one was waited for.
        flushed: the parameters of all ranks after a flush at the end.
        buffers: each rank's buffers at the end, before the flush.
    """

    after: list[list[Tensor]] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    landed: list[int] = field(default_factory=list)
    synchronous: list[int] = field(default_factory=list)
    flushed: Tensor = field(default_factory=lambda: torch.zeros(0))
    buffers: list[list[Tensor]] = field(default_factory=list)


def late_by_hand(
    make: Callable[[], nn.Module],
    build: MakeOptimizer,
    script: Sequence[Sequence[int]],
    steps: int,
    size: int,
    *,
    under: int,
    warmup: int = 1,
    passes: int = 1,
    batches: Sequence[int] = (),
) -> Late:
    """Local steps; an average that a vote asks for is launched behind the step and lands ``under`` steps later.

    Args:
        make: makes the model.
        build: makes the optimizer.
        script: for each step the ranks that want to share; over again when it ends.
        steps: how many.
        size: ranks.
        under: steps under which an average travels.
        warmup: steps after which averages are waited for.
        passes: backward passes a step.
        batches: number of each step's batch; counted from 0 by default.
    """
    with one_thread():
        models = [make() for _ in range(size)]
        return _late_by_hand(models, build, script, batches or range(steps), under, warmup, passes)


def _late_by_hand(
    models: list[nn.Module],
    build: MakeOptimizer,
    script: Sequence[Sequence[int]],
    batches: Sequence[int],
    under: int,
    warmup: int,
    passes: int,
) -> Late:
    optimizers, late, on_way, wanted = [build(model) for model in models], Late(), None, False
    for step, number in enumerate(batches):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(model, rank, number, passes)
            optimizer.step()
            optimizer.zero_grad()
        wanted = wanted or bool(script[step % len(script)])
        if on_way is not None and on_way[0] == step + 1:
            _land(models, on_way)
            on_way = None
            late.landed.append(step + 1)
        if wanted and on_way is None:
            wanted = False
            if step < warmup:
                late.synchronous.append(step + 1)
                _set(models, [torch.stack([flat(model) for model in models]).mean(0)] * len(models))
                average_buffers(models)
            else:
                late.launched.append(step + 1)
                sent = [flat(model).clone() for model in models]
                on_way = (step + 1 + under, torch.stack(sent).mean(0), sent)
        late.after.append([flat(model).clone() for model in models])
    late.buffers = [[buffer.clone() for buffer in model.buffers()] for model in models]
    if on_way is not None:
        _land(models, on_way)
    late.flushed = torch.stack([flat(model) for model in models]).mean(0)
    return late


def _land(models: list[nn.Module], on_way: OnWay) -> None:
    _, average, sent = on_way
    _set(models, [flat(model) + average - snapshot for model, snapshot in zip(models, sent, strict=True)])
    average_buffers(models)


@torch.no_grad()
def _set(models: list[nn.Module], values: Sequence[Tensor]) -> None:
    for model, value in zip(models, values, strict=True):
        nn.utils.vector_to_parameters(value.clone(), model.parameters())


@torch.no_grad()
def average_buffers(models: list[nn.Module]) -> None:
    """Floating-point ones become their mean, whole numbers the largest."""
    for tensors in zip(*(list(model.buffers()) for model in models), strict=True):
        stacked = torch.stack(tensors)
        value = stacked.mean(0) if stacked.is_floating_point() else stacked.max(0).values
        for tensor in tensors:
            tensor.copy_(value)
