"""Data-parallel training for PyTorch that does not wait for the network.

``import crossover as xo`` in a new script; ``import crossover as hvd`` in one written for ``horovod.torch``.
"""

from __future__ import annotations

from typing import Any

from crossover import auto, collectives, deft, elastic, runtime, schedulers, selsync, sync, telemetry
from crossover.collectives import *  # noqa: F403
from crossover.errors import CommunicationError, RankMismatchError
from crossover.joining import join
from crossover.optimizer import DistributedOptimizer
from crossover.runtime import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__version__ = "0.1.0"

__all__ = [
    *collectives.__all__,
    "CommunicationError",
    "DistributedOptimizer",
    "RankMismatchError",
    "auto",
    "cross_rank",
    "cross_size",
    "deft",
    "elastic",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "runtime",
    "schedulers",
    "selsync",
    "shutdown",
    "size",
    "sync",
    "telemetry",
]


def __getattr__(name: str) -> Any:
    """Under ``horovodrun``, what we do not define ourselves comes from ``horovod.torch``."""
    if not name.startswith("_") and runtime.is_initialized() and runtime.context().launcher == "horovod":
        import horovod.torch

        if hasattr(horovod.torch, name):
            return getattr(horovod.torch, name)
    raise AttributeError(f"module 'crossover' has no attribute {name!r}")
