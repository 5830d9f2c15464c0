"""The training loss as the preserver sees it."""

from __future__ import annotations

import math


class LossWatch:
    """Follows the training loss as all ranks see it.

    Attributes:
        level: smoothed loss; ``None`` before the first.
        lowest: the smallest level so far.
    """

    SMOOTHING = 0.9

    def __init__(self) -> None:
        self.level: float | None = None
        self.lowest = math.inf
        self._changes: list[float] = []

    def add(self, loss: float, synchronous: bool) -> None:
        """Take the mean loss over ranks. Changes between synchronous updates feed the walk."""
        if not math.isfinite(loss):
            self.level = math.inf
            return
        before = self.level
        known = before is not None and math.isfinite(before)
        self.level = self.SMOOTHING * before + (1 - self.SMOOTHING) * loss if known and before is not None else loss
        self.lowest = min(self.lowest, self.level)
        if synchronous and known and before is not None:
            self._changes.append(self.level - before)
            del self._changes[:-500]

    def walk(self) -> tuple[float, float, float] | None:
        """Start, drift and deviation of a walk towards a floor at 0; ``None`` if it is not known or not going down."""
        if len(self._changes) < 20 or self.level is None or not math.isfinite(self.level):
            return None
        mean = sum(self._changes) / len(self._changes)
        spread = sum((change - mean) ** 2 for change in self._changes) / (len(self._changes) - 1)
        return (self.level, -mean, math.sqrt(spread)) if mean < 0 else None
