"""What a measured system is: how it is set up, and how one step of training runs on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..workloads import Workload

Settings = Mapping[str, Any]
"""Keyword arguments of a system's ``prepare``, such as ``{"bucket_cap_mb": 4.0}``."""

HORIZON = 8
"""For step times: a training so short that every system has left its starting phase within the warm-up."""


class NotRunnable(Exception):  # noqa: N818 - says what it is
    """A system cannot run here; the text is the reason, for the table."""


class Steps(Protocol):
    """The part of an optimizer's interface that a training loop calls."""

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


def nothing() -> None:
    """Nothing is in flight between the steps of a synchronous system."""


@dataclass
class Training:
    """A model that trains on one system. Call it with a batch, on every rank alike.

    Attributes:
        model: the module that forward runs through, wrapped or not.
        optimizer: whose ``zero_grad()`` and ``step()`` the loop calls.
        scheduled: the optimizer whose learning rate a scheduler sets.
        loss: of output and target.
        finish: lands all that is in flight, so that the parameters are those of the steps done. Collective.
        facts: choices that a reader has to know.
    """

    model: nn.Module
    optimizer: Steps
    scheduled: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[], None] = nothing
    facts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One step on this rank's batch; returns its loss. Collective."""
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return loss.detach()


MakeOptimizer = Callable[..., torch.optim.Optimizer]
Prepare = Callable[..., Training]
"""``prepare(model, make_optimizer, workload, horizon, **settings)``: the same model, optimizer and loss for every
system; ``horizon`` is the number of steps of the whole training, by which a starting phase is sized. Collective."""


def as_documented(workload: Workload) -> Sequence[Settings]:
    """No search: the one setting is what ``prepare`` has by default."""
    return ({},)


def everywhere() -> str | None:
    """Nothing keeps it from running."""
    return None


@dataclass(frozen=True)
class System:
    """One row of a table.

    Attributes:
        name: for the command line.
        label: for tables.
        prepare: sets it up; see :data:`Prepare`. May raise :class:`NotRunnable`, on all ranks alike.
        launcher: ``"torchrun"`` or ``"horovod"``: which starts its ranks.
        exact: whether its parameters equal DDP's, to rounding.
        candidates: settings that a short search tries on the spot, the documented one first.
        tuned_as: the system whose search decides, its own name by default: hooks take DDP's bucket size.
        emulated: whether all it sends passes Crossover's communicator, and so the emulated link.
        unavailable: why it cannot run on this machine, or ``None``.
    """

    name: str
    label: str
    prepare: Prepare
    launcher: str = "torchrun"
    exact: bool = True
    candidates: Callable[[Workload], Sequence[Settings]] = as_documented
    tuned_as: str = ""
    emulated: bool = False
    unavailable: Callable[[], str | None] = everywhere


_SYSTEMS: dict[str, System] = {}


def register(*systems: System) -> None:
    """Add systems to those that every script knows.

    Raises:
        ValueError: the name is taken.
    """
    for system in systems:
        if system.name in _SYSTEMS:
            raise ValueError(f"name: {system.name!r} is registered already; give each system a name of its own")
        _SYSTEMS[system.name] = system


def get(name: str) -> System:
    """A system by name.

    Raises:
        ValueError: no system of that name.
    """
    if name not in _SYSTEMS:
        raise ValueError(f"name: got {name!r}; give one of {', '.join(_SYSTEMS)}")
    return _SYSTEMS[name]


def names() -> tuple[str, ...]:
    """What :func:`get` knows, in the order of tables."""
    return tuple(_SYSTEMS)
