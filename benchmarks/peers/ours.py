"""Crossover's own systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import crossover as xo
from crossover.schedulers import Overlapped, Priority, Schedule

from ..workloads import Workload
from . import horovod
from .system import MakeOptimizer, Settings, System, Training
from .torch_ddp import bucket_sizes

SMALLEST_PIECE = 64 * 1024
FUSE_BYTES = 262_144


def piece_sizes(workload: Workload) -> Sequence[Settings]:
    """Sizes in proportion to the model as ByteScheduler's defaults are to ResNet-50, and other credits to search.

    A piece is 1 of its 25.6 million parameters, the credit 4 pieces; ByteScheduler tunes the credit at run time.
    """
    piece = max(SMALLEST_PIECE, workload.gradient_bytes // 25)
    return [{"partition_bytes": piece, "credit_bytes": credit * piece} for credit in (4, 1, 16)]


def _prepared(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    schedule: Schedule,
    sizes: dict[str, Any],
    facts: dict[str, Any],
) -> Training:
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = xo.DistributedOptimizer(
        make_optimizer(model.parameters()), model.named_parameters(), schedule=schedule, **sizes
    )
    return Training(model, optimizer, optimizer, workload.loss, optimizer.flush, facts)


def overlapped(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    bucket_cap_mb: float | None = None,
) -> Training:
    """The default schedule, on the backend of whatever launched the ranks; buckets are sized by the search DDP gets."""
    sizes = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb, "first_bucket_cap_mb": bucket_cap_mb}
    facts: dict[str, Any] = {"bucket_cap_mb": "default (25, first 1)" if bucket_cap_mb is None else bucket_cap_mb}
    return _prepared(model, make_optimizer, workload, Overlapped(), sizes, facts)


def priority(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    partition_bytes: int | None = None,
    credit_bytes: int | None = None,
) -> Training:
    """ByteScheduler's scheduling. Without sizes, those in proportion to the model."""
    proportion = piece_sizes(workload)[0]
    sizes = {
        "partition_bytes": partition_bytes or proportion["partition_bytes"],
        "credit_bytes": credit_bytes or proportion["credit_bytes"],
    }
    sizes["fuse_bytes"] = min(FUSE_BYTES, sizes["partition_bytes"])
    return _prepared(model, make_optimizer, workload, Priority(**sizes), {}, dict(sizes))


SYSTEMS = (
    System("crossover", "Crossover, Overlapped", overlapped, candidates=bucket_sizes, emulated=True),
    System("crossover_priority", "ByteScheduler (our Priority)", priority, candidates=piece_sizes, emulated=True),
    System(
        "crossover_horovod",
        "Crossover on Horovod",
        overlapped,
        launcher="horovod",
        candidates=bucket_sizes,
        emulated=True,
        unavailable=horovod.unavailable,
    ),
)
