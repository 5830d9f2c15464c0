"""Checkpoints: written so that a kill leaves the old one or the new one, read by rank 0 and sent to the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from evaluate import average_buffers
from recipe import Ema
from torch import Tensor, nn

import crossover as xo


@dataclass
class Position:
    """Where training is, and what it has brought so far.

    Attributes:
        epoch: the epoch that goes on, from 0.
        images: training images of this epoch that all ranks together have had.
        best_top1: the best so far.
        history: one entry for each finished epoch.
        totals: of this epoch: sum of losses, right answers, images; over all ranks.
    """

    epoch: int = 0
    images: int = 0
    best_top1: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


def write(state: Any, path: Path) -> None:
    """``torch.save`` to ``path``, in one piece whatever happens meanwhile, a loss of power included."""
    _write(lambda file: torch.save(state, file), path)


def write_text(text: str, path: Path) -> None:
    """Write ``text`` to ``path``, in one piece as :func:`write` does."""
    _write(lambda file: file.write(text.encode()), path)


def _write(fill: Callable[[BinaryIO], object], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on disk only then
    finally:
        os.close(folder)


@dataclass
class Trained:
    """What a checkpoint holds beside the position."""

    model: nn.Module
    optimizer: Any  # the user's optimizer with Crossover's methods
    scaler: torch.amp.GradScaler
    ema: Ema | None
    facts: dict[str, Any]  # what has to be the same when training goes on

    def save(self, paths: list[Path], position: Position) -> None:
        """Save on rank 0. Collective: updates in flight are applied and running statistics averaged first."""
        with self.optimizer.flushed():
            average_buffers(self.model)
            if self.ema is not None:
                average_buffers(self.ema.module)
            if xo.rank() == 0:
                state = {
                    "model": self.model.state_dict(),
                    "ema": None if self.ema is None else self.ema.module.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict(),
                    "position": vars(position),
                    "facts": self.facts,
                }
                for path in paths:
                    write(state, path)

    def restore(self, path: Path | None) -> Position:
        """Go on from rank 0's checkpoint, or start with rank 0's weights if there is none. Collective.

        Only rank 0 reads the file; the others need not have it.

        Raises:
            ValueError: on every rank, if rank 0 could not use the checkpoint.
        """
        problem: str | None = None
        position = Position()
        if xo.rank() == 0 and path is not None and path.exists():
            try:
                position = self._load(path)
            except Exception as error:  # any failure has to reach the ranks that wait below
                problem = f"{path}: cannot be resumed from: {error}"
        found: tuple[Position, dict[str, Any], str | None] = xo.broadcast_object(
            (position, self.scaler.state_dict(), problem), root_rank=0, name="restore"
        )
        position, scaler, problem = found
        if problem is not None:
            raise ValueError(problem)
        xo.broadcast_parameters(self.model.state_dict(), root_rank=0)
        xo.broadcast_optimizer_state(self.optimizer, root_rank=0)
        if self.ema is not None:
            xo.broadcast_parameters(self.ema.module.state_dict(), root_rank=0)
        self.scaler.load_state_dict(scaler)
        return position

    def _load(self, path: Path) -> Position:
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, value in self.facts.items():
            if state["facts"][name] != value:
                raise ValueError(
                    f"{name} was {state['facts'][name]!r} and is {value!r}; use the same, or another --out"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            # Switched on only now: the average starts from the weights that were saved.
            self.ema.module.load_state_dict(state["ema"] or state["model"])
        return Position(**state["position"])


def sum_over_ranks(totals: Tensor) -> list[float]:
    """The sums of all ranks. Collective."""
    return xo.allreduce(totals, op=xo.Sum, name="totals").tolist()
