"""Gates: whether this step's update is worth sharing.

Source: Tyagi and Swany, SelSync (arXiv 2307.07950), Algorithm 1: step locally, always; if any rank finds its update
significant, all ranks take the average of their parameters. The quorum, the bound on local steps, forced sharing at
drops of the learning rate, and the treatment of buffers and optimizer state are ours: the paper is silent on them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from crossover.selsync.local_gradients import LocalGradients
from crossover.selsync.smoothing import votes_needed

CHECKED_EVERY = 64
"""Steps after which ranks vote at the latest, so that one that has left, joined or fallen behind is noticed."""


class Gate(ABC):
    """Decides step by step whether ranks share. A gate of your own says in :meth:`opinion` what this rank thinks.

    One small all-reduce a step carries all ranks' opinions beside the optimizer's step, so every rank takes the same
    decision. Between two shared steps each rank trains by itself, and replicas differ: evaluate and save within
    ``optimizer.flushed()``. One gate object serves one optimizer; with one rank it is ignored. With a schedule of late
    updates an average travels while ranks train on, and lands some steps later: see
    :mod:`crossover.selsync.late_synchronizer`.

    Args:
        average: what sharing averages: ``"parameters"`` after the step, which makes ranks equal again, or
            ``"gradients"`` before it, which does not undo earlier drift and delays the step by the vote.
        optimizer_state: with parameters, ``"local"`` leaves momentum and the like to each rank, ``"average"``
            averages what all ranks have of it too.
        buffers: the model, or those of its buffers that are averaged with the parameters, such as BatchNorm's
            statistics; whole numbers become the largest of all ranks. Without it they stay each rank's own.
        quorum: share of the ranks that has to vote for sharing; ``None``: one rank is enough, as in the paper.
        max_local_steps: share after so many local steps in a row whatever the votes.
        lr_drop: share when a learning rate falls to this fraction of what it was at the vote before, or below;
            ``None``: never.
        grad_scaler: the ``GradScaler`` in use, if any. Its scale is taken out of the significance, and an infinity on
            one rank makes every rank skip, so that the scale stays the same everywhere; ``backward()`` waits for the
            vote then.

    Attributes:
        local_steps: steps that were not shared.
        shared_steps: steps that were.
        since_shared: local steps since ranks were last made equal.
        apart: whether replicas may differ.
        owed: whether a shared step was skipped and the next one is shared for it.
        reads_norm: whether :meth:`opinion` wants the gradients' norm, which is then taken as they arrive.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import crossover as xo
        >>> class Rising(xo.selsync.Gate):
        ...     '''Share when the gradient is longer than in the step before.'''
        ...     last = 0.0
        ...     def opinion(self, gradients):
        ...         before, self.last = self.last, float(gradients.squared_norm())
        ...         return self.last > before
        >>> gate = Rising(max_local_steps=16)
    """

    reads_norm: bool = True

    def __init__(
        self,
        *,
        average: Literal["parameters", "gradients"] = "parameters",
        optimizer_state: Literal["local", "average"] = "local",
        buffers: nn.Module | Iterable[Tensor] = (),
        quorum: float | None = None,
        max_local_steps: int | None = None,
        lr_drop: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        _check_choice("average", average, ("parameters", "gradients"))
        _check_choice("optimizer_state", optimizer_state, ("local", "average"))
        if max_local_steps is not None:
            check_count("max_local_steps", max_local_steps, 1, " or None")
        if lr_drop is not None and not 0 < lr_drop < 1:
            raise ValueError(f"lr_drop: is {lr_drop!r}; it has to lie between 0 and 1, or be None")
        votes_needed(quorum, 1)
        self.average = average
        self.optimizer_state = optimizer_state
        self._buffers = buffers if isinstance(buffers, nn.Module) else _checked_buffers(buffers)
        self.quorum = quorum
        self.max_local_steps = max_local_steps
        self.lr_drop = lr_drop
        self.grad_scaler = grad_scaler
        self.local_steps = 0
        self.shared_steps = 0
        self.since_shared = 0
        self.apart = False
        self.owed = False
        self._learning_rates: list[float] = []
        self._owner: weakref.ref[torch.optim.Optimizer] | None = None

    @abstractmethod
    def opinion(self, gradients: LocalGradients) -> Tensor | bool:
        """Whether this rank wants to share; called at the end of the backward pass that a step will use.

        Args:
            gradients: this rank's own, scaled by ``grad_scaler`` if there is one, unclipped. Not to be changed.

        Returns:
            A bool, or to spare the device a wait, an integer tensor of one element, 0 or 1.
        """

    def asks(self) -> bool:
        """Whether opinions are asked for in this step: only by what is equal on all ranks, such as the counters.

        A gate that knows the answer beforehand spares ranks the vote, and the wait for the slowest of them.
        """
        return True

    def settings(self) -> dict[str, Any]:
        """What has to be equal on all ranks, for comparing and for messages. A gate with more settings adds them."""
        return {
            "average": self.average,
            "optimizer_state": self.optimizer_state,
            "buffers": [(tuple(buffer.shape), str(buffer.dtype)) for buffer in self.buffers],
            "quorum": self.quorum,
            "max_local_steps": self.max_local_steps,
            "lr_drop": self.lr_drop,
            "grad_scaler": self.grad_scaler is not None,
        }

    def facts(self) -> dict[str, float | int | str | bool]:
        """What a gate of its own wants in this step's record. Called with telemetry on, after the vote."""
        return {}

    @property
    def buffers(self) -> list[Tensor]:
        """Those averaged with the parameters, as the model has them now."""
        return list(self._buffers.buffers()) if isinstance(self._buffers, nn.Module) else list(self._buffers)

    @property
    def steps(self) -> int:
        """Steps so far, local or shared; equal on all ranks."""
        return self.local_steps + self.shared_steps

    @property
    def lssr(self) -> float:
        """Local steps as a share of all steps so far (the paper's equation 4); 0 before the first."""
        return self.local_steps / self.steps if self.steps else 0.0

    @property
    def scales(self) -> bool:
        """Whether a ``GradScaler`` is at work."""
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    # -- driven by the optimizer -------------------------------------------------------------------------------------

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Belong to ``optimizer``.

        Raises:
            ValueError: this object serves another one.
        """
        owner = None if self._owner is None else self._owner()
        if owner is not None and owner is not optimizer:
            raise ValueError(
                f"gate: this {type(self).__name__} already serves another optimizer; give each one of its own"
            )
        self._owner = weakref.ref(optimizer)

    def votes_now(self) -> bool:
        """Whether ranks vote in this step; the same on all of them."""
        late = self.max_local_steps is not None and self.since_shared >= self.max_local_steps
        return self.scales or late or self.owed or self.steps % CHECKED_EVERY == 0 or self._looks()

    def _looks(self) -> bool:
        """Whether there is something to look at in this step: this rank's gradients, or the learning rates."""
        return self.lr_drop is not None or self.asks()

    def rule_asks(self, learning_rates: Sequence[float]) -> bool:
        """Whether this step has to be shared whatever the opinions; once a vote, with the rates of all groups."""
        before, self._learning_rates = self._learning_rates, list(learning_rates)
        dropped = self.lr_drop is not None and any(
            now <= self.lr_drop * then for now, then in zip(self._learning_rates, before, strict=False) if then > 0
        )
        late = self.max_local_steps is not None and self.since_shared >= self.max_local_steps
        return dropped or late or self.owed

    def count(self, shared: bool) -> None:
        """A step was taken."""
        self.owed = False
        self.local_steps += not shared
        self.shared_steps += shared
        self.since_shared = 0 if shared else self.since_shared + 1
        # gradients that are averaged leave the distance between ranks as it is
        self.apart = not shared or (self.apart and self.average == "gradients")

    def state_dict(self) -> dict[str, Any]:
        """Counters. Never communicates."""
        return {
            "local_steps": self.local_steps,
            "shared_steps": self.shared_steps,
            "since_shared": self.since_shared,
            "apart": self.apart,
            "owed": self.owed,
            "learning_rates": list(self._learning_rates),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ValueError: ``state`` is no such dictionary.
        """
        missing = {"local_steps", "shared_steps", "since_shared", "apart", "owed", "learning_rates"} - state.keys()
        if missing:
            raise ValueError(f"state: lacks {sorted(missing)}; give what state_dict() of a gate returned")
        self.local_steps = int(state["local_steps"])
        self.shared_steps = int(state["shared_steps"])
        self.since_shared = int(state["since_shared"])
        self.apart = bool(state["apart"])
        self.owed = bool(state["owed"])
        self._learning_rates = [float(rate) for rate in state["learning_rates"]]

    def agree(self, states: Sequence[dict[str, Any]]) -> None:
        """Whoever has taken fewer steps goes on from the state of one with most.

        So a job goes on by rule where rank 0 alone was given a checkpoint, or ranks have come.

        Args:
            states: every rank's :meth:`state_dict`, in rank order.
        """
        furthest = max(states, key=_steps_of)
        if self.steps < _steps_of(furthest):
            self.load_state_dict(furthest)


def _steps_of(state: dict[str, Any]) -> int:
    return int(state["local_steps"] + state["shared_steps"])


def check_count(name: str, value: object, least: int, or_else: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: is {value!r}; it has to be a whole number of {least} or more{or_else}")


def _check_choice(name: str, value: object, allowed: tuple[str, str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: is {value!r}; use {allowed[0]!r} or {allowed[1]!r}")


def _checked_buffers(buffers: Iterable[Tensor]) -> list[Tensor]:
    listed = list(buffers)
    wrong = next((entry for entry in listed if not isinstance(entry, Tensor)), None)
    if wrong is not None:
        raise ValueError(f"buffers: holds a {type(wrong).__name__}; give the model, or model.buffers()")
    return listed
