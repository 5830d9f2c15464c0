"""Takes the turn before the first kernel of a forward pass, whatever model runs it."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from crossover.sync.client import STALL_S, Turn

NO_BACKWARD = -1


def in_backward() -> bool:
    """Whether the calling thread is within a backward pass, as when activation checkpointing runs a layer again."""
    return int(torch._C._current_graph_task_id()) != NO_BACKWARD


class ForwardWatch:
    """Watches the outermost calls of all modules that have a parameter on the device.

    Outermost, since a model may compute before its first layer; all modules, since an averaged copy or a teacher
    computes on the same device. An evaluation, which no backward pass follows, takes a turn for each batch.

    Args:
        turn: to take.
        device: of the parameters.

    Attributes:
        forwarded: whether a forward pass was made since the last backward pass.
    """

    def __init__(self, turn: Turn, device: torch.device) -> None:
        self.forwarded = False
        self._turn = turn
        self._device = device
        self._local = threading.local()
        self._handles: list[RemovableHandle] = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        depth = self._local.depth = getattr(self._local, "depth", 0) + 1
        if depth != 1 or in_backward():
            return
        self._local.concerned = self._concerns(module)
        if self._local.concerned:
            self._turn.take()
            if self.forwarded:  # and no backward pass came: others may be waiting for long
                self._turn.offer()
            self._local.began = time.monotonic()

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        depth = self._local.depth = max(getattr(self._local, "depth", 0) - 1, 0)
        if depth or in_backward() or not getattr(self._local, "concerned", False):
            return
        self._local.concerned = False
        if torch.is_grad_enabled() and module.training:
            self.forwarded = True
            # The loss follows, and takes hardly longer than the model.
            self._turn.rest(max(STALL_S, time.monotonic() - self._local.began))
        else:
            self._turn.rest()

    def _concerns(self, module: torch.nn.Module) -> bool:
        first: Tensor | None = next(module.parameters(), None)
        return first is not None and first.device == self._device
