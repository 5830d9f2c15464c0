"""A part of a bucket on its way over one of several links."""

from __future__ import annotations

import time
from typing import Protocol

from torch import Tensor

from crossover import telemetry
from crossover.buckets import Bucket
from crossover.comm.communicator import Work
from crossover.reduction import Reduction


class Link(Protocol):
    """What carries a transfer: a :class:`~crossover.comm.Communicator`, or what sums like one."""

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Start summing ``tensor`` over all ranks, in place."""


class Transfer:
    """One all-reduce that has been started, possibly in an earlier step than the one that waits for it.

    Attributes:
        link: what carries it.
        nbytes: what travels.
        started_ns: when it was started, ``perf_counter`` nanoseconds.
        completed_ns: when it was through: as the backend told, else when the wait for it ended; 0 before that.
    """

    __slots__ = (
        *("_context", "_name", "_part", "_reduction", "_told", "_wire", "_work"),
        *("completed_ns", "link", "nbytes", "started_ns"),
    )

    def __init__(
        self, reduction: Reduction, link: Link, bucket: Bucket, span: tuple[int, int], name: str, timed: bool
    ) -> None:
        """Send elements ``span[0]`` to ``span[1]`` of the buffer. Same order of calls on all ranks, for each link."""
        self.link = link
        self._reduction = reduction
        self._part = bucket.buffer[span[0] : span[1]]
        self._name = name
        self._wire, self._context = self._part, None
        if reduction.compression is not None:
            self._wire, self._context = reduction.compression.compress(self._part)
        self.nbytes = self._wire.numel() * self._wire.element_size()
        self.started_ns = time.perf_counter_ns()
        self.completed_ns = 0
        self._work: Work | None = link.all_reduce(self._wire, name=f"{reduction.name}.{self._name}")
        reduction.traffic.nbytes += self.nbytes
        reduction.traffic.collectives += 1
        self._told: list[int] = []
        if timed or telemetry.active() is not None:
            self._work.when_completed(self._told.append)

    def wait(self) -> None:
        """Leave the sum in the bucket's buffer; on a device, for what comes next on the current stream."""
        if self._work is None:
            return
        before = time.perf_counter_ns()
        self._work.wait()
        after, seen = time.perf_counter_ns(), self._work.holds_host
        self._work = None
        self.completed_ns = self._told[0] if self._told else after
        self._reduction.account(self._name, (self.started_ns, self.completed_ns), (before, after), seen)
        if self._reduction.compression is not None:
            self._part.copy_(self._reduction.compression.decompress(self._wire, self._context))

    @property
    def told(self) -> bool:
        """Whether the backend told when the transfer was through."""
        return bool(self._told)


class Arrived:
    """Stands for a transfer that was through before a checkpoint was written."""

    told = False

    def wait(self) -> None:
        """Nothing is left to wait for."""
