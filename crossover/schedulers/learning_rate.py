"""A learning rate that holds for one step of the user's optimizer."""

from __future__ import annotations

from typing import Any

import torch


class LearningRateGain:
    """Multiplies the learning rate of every parameter group, and puts back exactly what it was.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> gain = LearningRateGain()
        >>> gain.apply(optimizer, 2.0)
        >>> optimizer.param_groups[0]["lr"]
        0.2
        >>> gain.restore()
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """

    def __init__(self) -> None:
        self._saved: list[tuple[dict[str, Any], Any, Any]] = []

    def apply(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply until :meth:`restore`. A learning rate that is a tensor stays the same tensor."""
        self.restore()
        if factor == 1.0:
            return
        seen: set[int] = set()
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                if id(rate) not in seen:
                    self._saved.append((group, rate, rate.clone()))
                    rate.mul_(factor)
                seen.add(id(rate))
            elif rate is not None:
                group["lr"] = rate * factor
                self._saved.append((group, rate, group["lr"]))

    def restore(self) -> None:
        """Put the learning rates back; one that was set to something else in the meantime stays."""
        for group, rate, other in self._saved:
            if isinstance(rate, torch.Tensor):
                rate.copy_(other)
            elif group["lr"] == other:
                group["lr"] = rate
        self._saved.clear()
