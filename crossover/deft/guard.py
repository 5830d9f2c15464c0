"""Feeds the preserver: which generations are sampled, and whether what they say ends the delay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from crossover.buckets import Bucket
from crossover.deft.pilot import Pilot
from crossover.deft.sampling import Sample, squared_norm
from crossover.reduction import Reduction
from crossover.schedulers.generations import Generation, Remark
from crossover.schedulers.loss_scale import LossScale

SAMPLE_EVERY = 10  # generations while updates come late
SAMPLED_STEPS = 40  # before a decision, of which every generation is sampled


class Guard:
    """Samples squared gradient norms and losses.

    Across ranks: all sample the same generations, and hear the same of them.

    Args:
        reduction: of the optimizer.
        loss_scale: what losses are multiplied with.
        pilot: to be fed.
        summed: merged steps are applied as their sum.
        device: where gradients are.
    """

    def __init__(
        self, reduction: Reduction, loss_scale: LossScale, pilot: Pilot, summed: bool, device: torch.device
    ) -> None:
        self._reduction = reduction
        self._loss_scale = loss_scale
        self._pilot = pilot
        self._summed = summed
        self._device = device
        self._sample: Sample | None = None
        self.loss: float | None = None
        self.closed = 0

    def begin(self, close: bool, delayed: bool, until_decision: int) -> None:
        """A step begins. Before a decision every generation is sampled; else of late ones every tenth.

        Args:
            close: a generation closes in it.
            delayed: updates come late.
            until_decision: steps until the next decision, negative if there is none.
        """
        soon = 0 <= until_decision <= SAMPLED_STEPS
        wanted = soon or (delayed and self.closed % SAMPLE_EVERY == 0)
        self._sample = Sample(self._device) if close and wanted else None

    def add(self, bucket: Bucket) -> None:
        """A bucket holds this rank's own gradients and has not been sent."""
        if self._sample is not None:
            self._sample.add(bucket)

    def send(self, generation: Generation) -> None:
        """All buckets are ready: tell the other ranks, with what was observed of the loss."""
        if self._sample is None:
            return
        factor = 1.0 / (self._reduction.scaling.before * (generation.steps + 1) * generation.scale)
        name = f"{self._reduction.name}.deft.sample.{generation.number % 2}"
        self._sample.send(self._reduction.communicator, factor, self.loss, name)
        generation.remarks.append(self._sample)
        self._sample = self.loss = None

    def look(self, due: Generation, buckets: Sequence[Bucket], delayed: bool) -> str | None:
        """A generation is due in the buckets: why the delay has to end, or ``None``."""
        if not due.remarks or due.combined:
            return None
        size, pilot = self._reduction.communicator.size, self._pilot
        sampled = cast(Sample, due.remarks[0]).result(size)
        summed = (due.steps if self._summed else 1) * (1 if self._reduction.scaling.average else size)
        squared = squared_norm(buckets, 1.0 / (self._loss_scale.current() * summed))
        pilot.noise.add(due.steps, sampled.small_squared, due.steps * size, squared)
        if sampled.loss is not None:
            pilot.loss.add(sampled.loss, synchronous=not delayed)
        if self._loss_scale.used and not math.isfinite(squared):
            return None  # the scaler's business
        return pilot.alarm(squared)

    def saved(self, generation: Generation) -> list[Any]:
        """The numbers of a generation's samples, for a checkpoint."""
        return [cast(Sample, remark).numbers() for remark in generation.remarks]

    def restored(self, saved: Sequence[Any]) -> list[Remark]:
        """Samples that are complete."""
        return [Sample.of(numbers, self._device) for numbers in saved]
