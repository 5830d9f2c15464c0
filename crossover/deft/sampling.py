"""Squared gradient norms and losses of some generations, summed over ranks: what the preserver estimates from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossover.buckets import Bucket
from crossover.comm.communicator import Communicator, Work


@dataclass(frozen=True, slots=True)
class Sampled:
    """What all ranks said of one generation, equal on all of them.

    Attributes:
        small_squared: mean over ranks of the squared norm of a rank's own mean gradient.
        loss: mean over the ranks that observed one; ``None`` if none did.
    """

    small_squared: float
    loss: float | None


class Sample:
    """One generation's own numbers, on their way to all ranks.

    Args:
        device: where the buckets are.
    """

    def __init__(self, device: torch.device) -> None:
        # squared norm, sum of losses, ranks with a loss
        self._numbers = torch.zeros(3, dtype=torch.float64, device=device)
        self._work: Work | None = None

    @torch.no_grad()
    def add(self, bucket: Bucket) -> None:
        """Take a bucket that holds this rank's own gradients, before it is sent."""
        norm = torch.linalg.vector_norm(bucket.gradients)
        self._numbers[0] += (norm.double() * norm.double()).to(self._numbers.device)

    def send(self, communicator: Communicator, factor: float, loss: float | None, name: str) -> None:
        """Start summing over ranks; ``factor`` turns the norm of the buckets into that of the mean gradient."""
        self._numbers[0] *= factor * factor
        if loss is not None:
            self._numbers[1], self._numbers[2] = loss, 1.0
        self._work = communicator.all_reduce(self._numbers, name=name)

    def result(self, size: int) -> Sampled:
        """What all said, after :meth:`wait`."""
        squared, loss, count = self._numbers.tolist()
        return Sampled(squared / size, loss / count if count else None)

    def wait(self) -> None:
        """Have the sums over ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def numbers(self) -> list[float]:
        """The sums over ranks, for a checkpoint."""
        values: list[float] = self._numbers.tolist()
        return values

    @classmethod
    def of(cls, numbers: Sequence[float], device: torch.device) -> Sample:
        """One that was complete when it was saved."""
        sample = cls(device)
        sample._numbers.copy_(torch.tensor(numbers, dtype=torch.float64))
        return sample


def squared_norm(buckets: Sequence[Bucket], factor: float) -> float:
    """Of the gradients in the buckets, each multiplied by ``factor``."""
    norms: list[Tensor] = [torch.linalg.vector_norm(bucket.gradients).double() for bucket in buckets]
    return sum(norm**2 for norm in torch.stack(norms).tolist()) * factor * factor if norms else math.nan
