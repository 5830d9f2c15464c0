"""An all-reduce of something that is no bucket, with its cost booked like a bucket's."""

from __future__ import annotations

import time

from torch import Tensor

from crossover import telemetry
from crossover.comm.communicator import Communicator, ReduceOp
from crossover.reduction import Reduction


class AccountedReduction:
    """One all-reduce on its way; bytes, travel and wait count towards the step's record.

    Args:
        reduction: whose ranks take part, and where costs are booked.
        tensor: reduced in place; contiguous.
        op: how.
        name: what the collective is called after the optimizer's own name.
        link: what carries it: another communicator of the same ranks than the reduction's own, whose end is asked for.

    Attributes:
        tensor: what is reduced.
        started_ns: when it was started, ``perf_counter`` nanoseconds.
    """

    def __init__(
        self,
        reduction: Reduction,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        name: str,
        link: Communicator | None = None,
    ) -> None:
        self.tensor = tensor
        self._reduction = reduction
        self._name = name
        self.started_ns = time.perf_counter_ns()
        self._work = (link or reduction.communicator).all_reduce(tensor, op, name=f"{reduction.name}.{name}")
        self._completed: list[int] = []
        reduction.traffic.nbytes += tensor.numel() * tensor.element_size()
        reduction.traffic.collectives += 1
        if link is not None or telemetry.active() is not None:
            self._work.when_completed(self._completed.append)

    def wait(self) -> Tensor:
        """The reduced tensor."""
        before = time.perf_counter_ns()
        self._work.wait()
        after = time.perf_counter_ns()
        end = self._completed[0] if self._completed else after
        self._reduction.account(self._name, (self.started_ns, end), (before, after), self._work.holds_host)
        return self.tensor

    @property
    def completed_ns(self) -> int:
        """When it was through, ``perf_counter`` nanoseconds; 0 where the backend did not tell."""
        return self._completed[0] if self._completed else 0
