"""Steps that train nothing: ``torch.distributed.checkpoint`` takes one where optimizer state is missing.

It sets the learning rate and all gradients to zero, steps, and saves or loads what that made; on whichever ranks save,
so that nothing may be shared in it, and again and again for an optimizer that keeps no state.
"""

from __future__ import annotations

from typing import Any

import torch


class HiddenSteps:
    """Tells them from the user's steps of one optimizer, and takes back what they did.

    Attributes:
        running: whether the step that began last is one.
    """

    def __init__(self) -> None:
        self.running = False
        self._made: list[tuple[Any, dict[str, Any]]] = []

    def begin(self, optimizer: torch.optim.Optimizer, shared: bool) -> bool:
        """A step begins; ``shared``: gradients were averaged since the last one. Returns :attr:`running`."""
        self.running = not shared and not optimizer.state and _has_no_effect(optimizer)
        return self.running

    def take_back(self, optimizer: torch.optim.Optimizer, untrained: bool) -> None:
        """Undo the hidden step: on this rank alone Adam has counted, and momentum has taken up weight decay.

        The state stays for whoever had it made. If the optimizer is ``untrained``, it makes way for a fresh one at the
        first real step; else updates that are on their way will use it.
        """
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (key == "step" or value.shape == parameter.shape):
                    value.zero_()
                elif key == "step":
                    state[key] = 0
        self._made = list(optimizer.state.items()) if untrained else []

    def make_way(self, optimizer: torch.optim.Optimizer) -> None:
        """A real step begins: remove what hidden steps made, unless something has been loaded over it."""
        for parameter, state in self._made:
            if optimizer.state.get(parameter) is state:
                del optimizer.state[parameter]
        self._made.clear()


def is_plain(gradient: torch.Tensor | None) -> bool:
    """Whether it is a dense tensor whose values can be read."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided


def _has_no_effect(optimizer: torch.optim.Optimizer) -> bool:
    if any(float(group.get("lr", 1.0)) != 0.0 for group in optimizer.param_groups):
        return False
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return all(g is None or (is_plain(g) and not bool(g.any())) for g in gradients)
