"""One bucket's all-reduce: scaling, compression on the wire, and what it cost."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from crossover import telemetry
from crossover.buckets import Bucket
from crossover.comm.communicator import Communicator, Work
from crossover.errors import RankMismatchError
from crossover.telemetry import timeline


class Compressor(Protocol):
    """How a tensor travels: any class with these two static methods, as in Horovod."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and what :meth:`decompress` needs."""

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The reduced tensor in its first dtype."""


@dataclass(slots=True)
class Traffic:
    """What communication cost since the last step.

    Attributes:
        nbytes: payload handed to collectives.
        collectives: how many were started.
        communication_s: seconds from start to known completion, summed over collectives.
        exposed_s: seconds the training thread waited.
        hidden_s: seconds of ``communication_s`` in which the training thread waited for none; known with telemetry on.
        unseen: collectives that a device waited for and not the host, which knows nothing of their times.
    """

    nbytes: int = 0
    collectives: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    unseen: int = 0


class Waits:
    """When the training thread waited, as far back as collectives in flight need it. Times in nanoseconds."""

    KEPT = 4096

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._totals: list[int] = [0]

    def add(self, start: int, end: int) -> None:
        """Book a wait that came after all those before."""
        if len(self._ends) == 2 * self.KEPT:
            del self._ends[: self.KEPT], self._totals[: self.KEPT]
        self._ends.append(end)
        self._totals.append(self._totals[-1] + end - start)

    def total(self, until: int) -> int:
        """Nanoseconds waited before ``until``, counted from an arbitrary time."""
        place = bisect.bisect_left(self._ends, until)
        if place == len(self._ends):
            return self._totals[-1]
        return max(self._totals[place], self._totals[place + 1] - (self._ends[place] - until))


@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors before and after the sum over ranks.

    An average divides *before* the sum, so that low precision does not overflow as ranks are added; where ranks have
    joined early, the factor after the sum turns it into the average over the ranks that took part.
    """

    before: float
    after: float
    average: bool


def scaling_for(average: bool, size: int, predivide: float) -> Scaling:
    """The factors for an average or a sum over ``size`` ranks; ``predivide`` splits the division as Horovod does."""
    if not average:
        return Scaling(1.0, 1.0, average=False)
    if predivide == 1.0:
        return Scaling(1.0 / size, 1.0, average=True)
    return Scaling(1.0 / predivide, predivide / size, average=True)


class PendingReduction:
    """A gathered bucket of which parts, or all, are on their way."""

    __slots__ = ("_parts", "_reduction", "bucket")

    def __init__(self, reduction: Reduction, bucket: Bucket) -> None:
        self.bucket = bucket
        self._reduction = reduction
        self._parts: list[tuple[Tensor, Tensor, Any, Work, int, list[int]]] = []

    def send(self, start: int = 0, stop: int | None = None) -> None:
        """Start the all-reduce of elements ``start`` to ``stop`` of the buffer. Same order of calls on every rank."""
        part = self.bucket.buffer if stop is None else self.bucket.buffer[start:stop]
        reduction = self._reduction
        wire, context = part, None
        if reduction.compression is not None:
            wire, context = reduction.compression.compress(part)
        started = time.perf_counter_ns()
        work = reduction.communicator.all_reduce(wire, name=f"{reduction.name}.{self.bucket.name}.{start}")
        reduction.traffic.nbytes += wire.numel() * wire.element_size()
        reduction.traffic.collectives += 1
        completed: list[int] = []
        if telemetry.active() is not None:
            work.when_completed(completed.append)
        self._parts.append((part, wire, context, work, started, completed))

    def wait(self) -> None:
        """Leave the reduced gradients in the bucket's buffer. All of it has been sent."""
        for part, wire, context, work, started, completed in self._parts:
            before = time.perf_counter_ns()
            work.wait()
            after = time.perf_counter_ns()
            end = completed[0] if completed else after
            self._reduction.account(self.bucket.name, (started, end), (before, after), work.holds_host)
            if self._reduction.compression is not None:
                part.copy_(self._reduction.compression.decompress(wire, context))
        self._parts.clear()
        self._reduction.rescale(self.bucket)


@dataclass(slots=True)
class Reduction:
    """The way gradients of one optimizer are combined over ranks.

    Attributes:
        communicator: the ranks that take part.
        scaling: factors around the sum.
        compression: how buckets travel.
        name: prefix of the collectives' names.
        traffic: cost since :meth:`take_traffic` was last called.
        waits: when the training thread waited for these collectives.
        others_grew: another rank has parameters without a bucket and this one does not. Only noticed in buckets on the
            CPU: asking a device would make the host wait.
    """

    communicator: Communicator
    scaling: Scaling
    compression: type[Compressor] | None = None
    name: str = "gradients"
    traffic: Traffic = field(default_factory=Traffic)
    others_grew: bool = False
    waits: Waits = field(default_factory=Waits)

    def wire_width(self, dtype: torch.dtype, device: torch.device) -> int:
        """Bytes that an element of a tensor takes on its way."""
        one = torch.zeros(1, dtype=dtype, device=device)
        wire = one if self.compression is None else self.compression.compress(one)[0]
        return self.communicator.carried_as(wire.dtype).itemsize

    def launch(self, bucket: Bucket) -> PendingReduction:
        """Start the all-reduce of a gathered bucket. Same order of calls on every rank."""
        pending = PendingReduction(self, bucket)
        pending.send()
        return pending

    @torch.no_grad()
    def rescale(self, bucket: Bucket, steps: int = 1, factor: float = 1.0) -> None:
        """Apply to a reduced bucket what scaling is left.

        Args:
            bucket: summed over ranks, and over ``steps`` passes, of which the mean is taken.
            steps: number of those passes.
            factor: multiplied with besides.
        """
        factor *= self.scaling.after
        if steps > 1 and not self.scaling.average:
            factor /= steps
        if bucket.device.type == "cpu":
            absent, growing, stepped, idle = bucket.tail.tolist()
            if growing and not bucket.announces:
                self.others_grew = True
            if stepped and idle:
                raise self._skipped_step(bucket)
            if (absent or steps > 1) and self.scaling.average:
                factor *= self.communicator.size / max(self.communicator.size * steps - absent, 1)
        elif self.scaling.average:
            # asking the device would make the host wait; the factor is 1 unless ranks have joined or passes were merged
            parts = (self.communicator.size * steps - bucket.absent).clamp_(min=1)
            bucket.gradients.mul_(self.communicator.size / parts)
        if factor != 1.0:
            bucket.gradients.mul_(factor)

    def _skipped_step(self, bucket: Bucket) -> RankMismatchError:
        """The error for ranks of which some stepped and some did not. Collective: all have seen the same numbers."""
        stepped = self.communicator.all_gather_object(bucket.stepped, name=f"{self.name}.stepped")
        ranks = self.communicator.ranks
        idle = ", ".join(str(rank) for rank, did in zip(ranks, stepped, strict=True) if did is False)
        return RankMismatchError(
            f"step(): rank {idle} did not call it after the last averaged backward pass, and the other ranks did, so "
            "ranks hold different parameters now; decide by values that are equal on all ranks, such as the averaged "
            "gradients, or by crossover.allreduce of each rank's own"
        )

    def account(self, name: str, travelled: tuple[int, int], waited: tuple[int, int], seen: bool = True) -> None:
        """Book one collective: when it travelled and when it was waited for, ``perf_counter`` nanoseconds.

        Args:
            name: of it.
            travelled: from start to completion.
            waited: by the training thread.
            seen: whether the host knows these times.
        """
        if not seen:
            self.traffic.unseen += 1
            return
        self.traffic.communication_s += (travelled[1] - travelled[0]) * 1e-9
        self.traffic.exposed_s += (waited[1] - waited[0]) * 1e-9
        if telemetry.active() is not None:
            self.waits.add(*waited)
            under_waits = self.waits.total(travelled[1]) - self.waits.total(travelled[0])
            self.traffic.hidden_s += max(travelled[1] - travelled[0] - under_waits, 0) * 1e-9
        if (writer := timeline.active()) is not None:
            writer.span("communication", name, *travelled)
            writer.span("exposed", name, *waited)

    def take_traffic(self) -> Traffic:
        """The cost so far; counting starts again at nothing."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic
