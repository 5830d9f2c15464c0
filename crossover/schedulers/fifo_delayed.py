"""DeFT without its knapsacks, the ablation: everything is sent first come first served, one update late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from crossover.buckets import Bucket
from crossover.schedulers.delayed import DelayedSchedule
from crossover.schedulers.travel import FixedTravel


class FifoDelayed(DelayedSchedule):
    """Every ``merged`` steps what has accumulated so far is sent, all at once, and applied ``merged`` steps later.

    Nothing is measured or planned: the number of steps that are merged is fixed, buckets are sent in the order in which
    they became ready, over one link. The first steps are synchronous. With a gate it is parameters that travel, when
    the gate says so, under ``merged`` steps.

    Across ranks: equal parameters after each step. Evaluate and save within ``optimizer.flushed()``.

    Args:
        merged: steps whose gradients travel together; about the coverage rate, rounded up.
        warmup_steps: synchronous steps at the start.
        merge: what becomes of several steps: see :class:`~crossover.schedulers.delayed.DelayedSchedule`.
        compensation: strength of the correction of late gradients, 0 for none.
        grad_scaler: the training loop's ``GradScaler``; found by itself in the synchronous steps.
        before_flushed_step: called with the parameters before each update that ``flush()`` applies.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = xo.DistributedOptimizer(optimizer, schedule=xo.schedulers.FifoDelayed(merged=2))
    """

    def __init__(
        self,
        merged: int = 1,
        warmup_steps: int = 1,
        merge: str = "gain",
        compensation: float = 0.0,
        grad_scaler: Any = None,
        before_flushed_step: Callable[[list[Tensor]], object] | None = None,
    ) -> None:
        super().__init__(merge, compensation, grad_scaler, before_flushed_step)
        for name, value in (("merged", merged), ("warmup_steps", warmup_steps)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: is {value!r}; it has to be a whole number of 1 or more")
        self.merged = merged
        self.warmup_steps = warmup_steps
        self.passes = 0

    def travel(self) -> FixedTravel:
        """See :meth:`DelayedSchedule.travel`: under ``merged`` steps, after ``warmup_steps`` that wait."""
        return FixedTravel(self.merged, self.warmup_steps)

    def ready(self, bucket: Bucket) -> None:
        """Send it at once if it is to be applied in this step."""
        if self._synchronous:
            self.generations.send(self.reduction.communicator, self.generations.pieces[bucket.index], fresh=True)

    @property
    def _synchronous(self) -> bool:
        return self.passes < self.warmup_steps or self._adopted_from is not None

    def counters(self) -> dict[str, Any]:
        """Steps taken as well."""
        return {**super().counters(), "passes": self.passes}

    def load_counters(self, counters: dict[str, Any], kept: bool) -> None:
        """See :meth:`DelayedSchedule.load_counters`."""
        super().load_counters(counters, kept)
        self.passes = counters["passes"]

    def finish(self) -> None:
        """Apply what was sent when the last generation closed; close and send what has accumulated since."""
        if self._synchronous:
            self.passes += self._adopted_from is None
            self.end_step(close=True, apply=1)
            return
        if self.passes == self.warmup_steps:
            self.loss_scale.require_known()
            if not self.suits:
                raise ValueError(
                    "schedule: FifoDelayed needs a step() for each averaged backward pass; freeze parameters that a "
                    "loss does not train, or run its backward() within optimizer.no_sync()"
                )
        self.passes += 1
        generations = self.generations
        close = generations.accumulating.steps + 1 >= self.merged
        self.end_step(close, apply=int(close and generations.current is not None))
        if close:
            generations.send_rest(fresh=False)
