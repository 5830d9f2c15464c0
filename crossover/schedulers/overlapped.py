"""Each bucket is all-reduced as soon as it fills; backward ends when all have arrived. This is what DDP does."""

from __future__ import annotations

from crossover.buckets import Bucket
from crossover.reduction import PendingReduction
from crossover.schedulers.schedule import Schedule


class Overlapped(Schedule):
    """The default schedule: synchronous, communication hidden under the rest of backward.

    Across ranks: after each shared backward pass every ``p.grad`` holds the same bits on every rank.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = xo.DistributedOptimizer(optimizer, schedule=xo.schedulers.Overlapped())
    """

    def __init__(self) -> None:
        self._pending: list[PendingReduction] = []

    def detach(self) -> None:
        """See :meth:`Schedule.detach`."""
        super().detach()
        self._pending.clear()

    def ready(self, bucket: Bucket) -> None:
        """Send the bucket at once."""
        self._pending.append(self.reduction.launch(bucket))

    def finish(self) -> None:
        """Wait for every bucket, in the order in which they were sent."""
        pending, self._pending = self._pending, []
        for reduction in pending:
            reduction.wait()
            reduction.bucket.scatter()
