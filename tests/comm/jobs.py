"""Functions that ranks run in several tests."""

from __future__ import annotations

import pytest
import torch

from crossover import runtime
from crossover.comm import Communicator

BOTH = [pytest.param("torch", id="torch"), pytest.param("horovod", id="horovod", marks=pytest.mark.horovod)]


def joined() -> Communicator:
    """Initialise and return the communicator of all ranks."""
    runtime.init()
    return runtime.context().communicator


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on every rank, whose sums every dtype holds exactly."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + rank * 3) % 5
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers + rank).double()).to(dtype).view(shape)
    return numbers.to(dtype).view(shape)
