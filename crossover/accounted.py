"""An all-reduce of something that is no bucket, with its cost booked like a bucket's."""

from __future__ import annotations

import time

from torch import Tensor

from crossover import telemetry
from crossover.comm.communicator import ReduceOp
from crossover.reduction import Reduction


class AccountedReduction:
    """One all-reduce on its way; bytes, travel and wait count towards the step's record.

    Args:
        reduction: whose ranks take part, and where costs are booked.
        tensor: reduced in place; contiguous.
        op: how.
        name: what the collective is called after the optimizer's own name.
    """

    def __init__(self, reduction: Reduction, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> None:
        self.tensor = tensor
        self._reduction = reduction
        self._name = name
        self._started = time.perf_counter_ns()
        self._work = reduction.communicator.all_reduce(tensor, op, name=f"{reduction.name}.{name}")
        self._completed: list[int] = []
        reduction.traffic.nbytes += tensor.numel() * tensor.element_size()
        reduction.traffic.collectives += 1
        if telemetry.active() is not None:
            self._work.when_completed(self._completed.append)

    def wait(self) -> Tensor:
        """The reduced tensor."""
        before = time.perf_counter_ns()
        self._work.wait()
        after = time.perf_counter_ns()
        end = self._completed[0] if self._completed else after
        self._reduction.account(self._name, (self._started, end), (before, after))
        return self.tensor
