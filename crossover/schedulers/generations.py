"""Generations of gradients, and the memory they lie in.

A *generation* holds the gradients of one or more consecutive steps, summed before they are sent. Each bucket has two
memories: its own, in which a generation accumulates, and that of its *twin*, which holds the *current* generation,
closed and on its way. When the current one is complete the two are swapped: what is due lies in the bucket then, and is
overwritten by the next backward pass, by when it has been applied. So no more than two are ever needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from crossover.buckets import Bucket
from crossover.reduction import Reduction
from crossover.schedulers.transfer import Arrived, Link, Transfer


class Remark(Protocol):
    """What a schedule wants to know of a generation when it is complete."""

    def wait(self) -> None:
        """Have it."""


@dataclass(slots=True)
class Generation:
    """Gradients that travel together.

    Attributes:
        number: of all generations so far; equal on all ranks.
        steps: how many were merged.
        scale: what the loss was multiplied with.
        transfers: those that have been started, by ``(bucket, start)``.
        remarks: what is known of it.
        void: not to be applied when it is complete.
        combined: made of two that were complete at the same time.
        late: not complete when it was closed, so applied to other weights than it was made with.
    """

    number: int = 0
    steps: int = 0
    scale: float = 1.0
    transfers: dict[tuple[int, int], Transfer | Arrived] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    void: bool = False
    combined: bool = False
    late: bool = False

    def wait(self) -> None:
        """Wait for every transfer, in the order in which they were started."""
        for transfer in self.transfers.values():
            transfer.wait()
        for remark in self.remarks:
            remark.wait()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a bucket's buffer: elements ``start`` to ``stop``. What is sent as one."""

    bucket: int
    start: int
    stop: int


class Generations:
    """The generations of one optimizer. Knows neither plans nor steps of the optimizer.

    Across ranks: all call the same methods in the same order.

    Args:
        reduction: how they are combined over ranks.
        buckets: in which gradients arrive.

    Attributes:
        pieces: what is sent as one, in the order in which it becomes ready.
        twins: the second memories; none before they are needed.
        current: closed and on its way, if there is one.
        accumulating: takes the gradients of the steps from now on.
    """

    def __init__(self, reduction: Reduction, buckets: Sequence[Bucket] = ()) -> None:
        self.reduction = reduction
        self.buckets = tuple(buckets)
        self.pieces = [Piece(bucket.index, 0, bucket.buffer.numel()) for bucket in self.buckets]
        self.twins: list[Bucket] = []
        self.current: Generation | None = None
        self.accumulating = Generation()

    def begin(self) -> Generation:
        """Begin the next generation; returns the one that has accumulated so far."""
        before = self.accumulating
        self.accumulating = Generation(before.number + 1, scale=before.scale)
        return before

    @property
    def parameters(self) -> list[Tensor]:
        """All that have a place in a bucket."""
        return [slot.parameter for bucket in self.buckets for slot in bucket.slots]

    def make_twins(self) -> None:
        """Have the second memory of each bucket."""
        if not self.twins:
            self.twins = [bucket.twin() for bucket in self.buckets]

    def swap(self) -> None:
        """Exchange what lies in the buckets with what lies in their twins."""
        self.make_twins()
        for bucket, twin in zip(self.buckets, self.twins, strict=True):
            bucket.swap(twin)

    def add(self, accumulates: bool) -> None:
        """Whether the next gradients are added to what is in the buckets, or overwrite it."""
        for bucket in self.buckets:
            bucket.adds = accumulates

    @torch.no_grad()
    def rescale_to(self, scale: float) -> None:
        """The gradients to come are made with this factor on the loss: bring those that there are to it."""
        if self.accumulating.steps and scale != self.accumulating.scale:
            for bucket in self.buckets:
                bucket.gradients.mul_(scale / self.accumulating.scale)
        self.accumulating.scale = scale

    def send(self, link: Link, piece: Piece, fresh: bool, timed: bool = False) -> None:
        """Start a piece's all-reduce: of the generation that closes in this step if ``fresh``, else of the current."""
        generation = self.accumulating if fresh else self.current
        assert generation is not None
        bucket = (self.buckets if fresh else self.twins)[piece.bucket]
        # Two generations may be on their way, and names tell them apart: ranks need not have waited for equally much.
        name = f"{bucket.name}.{piece.start}.{generation.number % 2}"
        transfer = Transfer(self.reduction, link, bucket, (piece.start, piece.stop), name, timed)
        generation.transfers[piece.bucket, piece.start] = transfer

    def send_rest(self, fresh: bool) -> None:
        """Start over the first link what of that generation has not been started."""
        generation = self.accumulating if fresh else self.current
        assert generation is not None
        for piece in self.pieces:
            if (piece.bucket, piece.start) not in generation.transfers:
                self.send(self.reduction.communicator, piece, fresh)

    def close(self, apply: int) -> Generation | None:
        """Close the generation that accumulates. Waits for what is complete then, and leaves it in the buckets.

        Args:
            apply: generations that are complete, 0 to 2; two become one.
        """
        closed = self.begin()
        current, self.current = self.current, None
        self.add(accumulates=False)
        if apply > int(current is not None):
            closed.wait()
            return closed if current is None else self._together(current, closed)
        assert apply == int(current is not None), "a plan applies what is complete"
        self.current = closed
        closed.late = True
        if current is not None:
            current.wait()
        self.swap()
        return current

    @torch.no_grad()
    def _together(self, current: Generation, closed: Generation) -> Generation:
        current.wait()
        for bucket, twin in zip(self.buckets, self.twins, strict=True):
            if current.scale != closed.scale:
                twin.gradients.mul_(closed.scale / current.scale)
            twin.tail[2:] = 0  # whether all ranks stepped is asked of one pass, for it differs from pass to pass
            bucket.buffer.add_(twin.buffer)
            bucket.missing = sorted({*bucket.missing, *twin.missing})
        return Generation(
            closed.number,
            current.steps + closed.steps,
            closed.scale,
            {**current.transfers, **closed.transfers},
            void=current.void or closed.void,
            combined=True,
            late=True,
        )

    @property
    def on_host(self) -> bool:
        """Whether looking at a value makes nobody wait."""
        return not self.buckets or self.buckets[-1].device.type == "cpu"

    def absent(self) -> Tensor:
        """How often a rank only stood in for the steps of the generation in the buckets; on their device."""
        return self.buckets[-1].absent.clone() if self.buckets else torch.zeros(())

    def settle(self) -> None:
        """Wait for what has been started."""
        for generation in (self.current, self.accumulating):
            if generation is not None:
                generation.wait()

    def discard(self) -> int:
        """Let nothing that is on its way be applied, though it goes on; returns how many generations that are."""
        found = [g for g in (self.current, self.accumulating) if g is not None and g.steps]
        for generation in found:
            generation.void = True
        return len(found)
