"""The modes of a gate: open in every step, shut in every step, or by a script that mixes both.

    train(Situation(...), "gate-mixed")

runs a situation on this rank with the library, and beside it, in the same process and with bare optimizers, what all
ranks have to come to: each does the same by itself, and where the script says so they take the average of their
parameters, in the late mode two steps later. With two ranks both are equal bit for bit after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.selsync.local_steps import Scripted, average_in_place
from tests.training import make_model, sgd

MODES: dict[str, list[list[int]]] = {
    "gate-open": [[0]],
    "gate-shut": [[]],
    "gate-mixed": [[], [1], [], [0, 1], []],
}
LATE = "gate-late"
LATE_SCRIPT: list[list[int]] = [[], [1], [], [], [0]]  # asked for when none is on its way
STEPS_UNDER_WAY = 2
Loop = Callable[[nn.Module, Any, int, int], None]


@dataclass(frozen=True)
class Situation:
    """What a script does, told once for the library and for the reference.

    Attributes:
        loop: one step, with model, optimizer, rank and number of the step.
        build: makes the optimizer.
        model: makes the model.
        options: for ``DistributedOptimizer``.
        steps: how many.
        hidden: whether steps that are not the user's are taken too.
    """

    loop: Loop
    build: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    model: Callable[[], nn.Module] = make_model
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    hidden: bool = False


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def script_of(mode: str) -> list[list[int]]:
    """Which ranks want to share in each step."""
    return LATE_SCRIPT if mode == LATE else MODES[mode]


def options_of(mode: str) -> dict[str, Any]:
    """What the mode asks of ``DistributedOptimizer`` beside its gate."""
    return {"schedule": xo.schedulers.FifoDelayed(merged=STEPS_UNDER_WAY)} if mode == LATE else {}


def expected(situation: Situation, mode: str) -> list[list[list[Tensor]]]:
    """For each step and rank the parameters, worked out without the library."""
    models = [situation.model() for _ in range(xo.size())]
    optimizers = [situation.build(model) for model in models]
    after, script = [], script_of(mode)
    on_way: list[list[Tensor]] = []
    for step in range(situation.steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            situation.loop(model, optimizer, rank, step)
        if on_way and script[(step - STEPS_UNDER_WAY) % len(script)]:
            land(models, on_way)
            on_way = []
        if script[step % len(script)] and mode == LATE:
            on_way = [parameters(model) for model in models]
        elif script[step % len(script)]:
            average_in_place([list(model.parameters()) for model in models])
        after.append([parameters(model) for model in models])
    return after


@torch.no_grad()
def land(models: Sequence[nn.Module], sent: list[list[Tensor]]) -> None:
    """Add what the average of what was sent is away from it to the parameters as they are now."""
    averages = [[tensor.clone() for tensor in tensors] for tensors in sent]
    average_in_place(averages)
    for model, average, snapshot in zip(models, averages, sent, strict=True):
        for parameter, mean, then in zip(model.parameters(), average, snapshot, strict=True):
            parameter.add_(mean - then)


def train(situation: Situation, mode: str, name: str = "") -> Scripted:
    """Run it with the library, and require every step to be as expected. Collective."""
    wanted = expected(situation, mode)
    gate = Scripted(script_of(mode))
    model = situation.model()
    job = invariants.Job(model, situation.build(model), gate=gate, **situation.options, **options_of(mode))
    for step in range(situation.steps):
        situation.loop(model, job.optimizer, xo.rank(), step)
        for number, (found, value) in enumerate(zip(model.parameters(), wanted[step][xo.rank()], strict=True)):
            assert torch.equal(found, value), f"{name}, {mode}: parameter {number} differs after step {step}"
    assert gate.steps == situation.steps
    job.check(steps=job.steps if situation.hidden else situation.steps)
    return gate
