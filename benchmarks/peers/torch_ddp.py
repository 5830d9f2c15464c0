"""PyTorch's own: DistributedDataParallel, bare, with its compression hooks, and with post-local SGD.

Common to all: ``gradient_as_bucket_view=True``, which the documentation names as saving memory and a copy, and
``broadcast_buffers=False``, because no other system here sends BatchNorm's statistics at every step. The bucket size is
found by a short search on the spot, with the default among the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters_or_parameter_groups
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from ..workloads import Workload
from .system import MakeOptimizer, NotRunnable, Settings, System, Training

MEBIBYTE = 1 << 20
AVERAGING_PERIOD = 4
"""Steps between two averages of post-local SGD, as in the documentation's example."""


def bucket_sizes(workload: Workload) -> Sequence[Settings]:
    """The default, and a third and an eighth of the gradients."""
    whole = workload.gradient_bytes / MEBIBYTE
    return ({"bucket_cap_mb": None}, *({"bucket_cap_mb": round(whole / parts, 3)} for parts in (3, 8)))


def alone(model: nn.Module, make_optimizer: MakeOptimizer, workload: Workload, horizon: int) -> Training:
    """The same computing without any communication: ranks part at once."""
    optimizer = make_optimizer(model.parameters())
    return Training(model, optimizer, optimizer, workload.loss)


def _wrapped(model: nn.Module, bucket_cap_mb: float | None) -> tuple[DistributedDataParallel, dict[str, Any]]:
    wrapped = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    return wrapped, {"bucket_cap_mb": "default (25, first 1)" if bucket_cap_mb is None else bucket_cap_mb}


def ddp(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    bucket_cap_mb: float | None = None,
    hook: Any = None,
    state: Any = None,
) -> Training:
    """Bare DDP, or with a communication hook and its state."""
    wrapped, facts = _wrapped(model, bucket_cap_mb)
    if hook is not None:
        try:
            wrapped.register_comm_hook(state, hook)
        except TypeError as error:
            raise NotRunnable(f"torch refuses this hook here: {error}") from error
    optimizer = make_optimizer(model.parameters())
    return Training(wrapped, optimizer, optimizer, workload.loss, facts=facts)


ddp_fp16 = partial(ddp, hook=default_hooks.fp16_compress_hook)
ddp_bf16 = partial(ddp, hook=default_hooks.bf16_compress_hook)


def powersgd(
    model: nn.Module, make_optimizer: MakeOptimizer, workload: Workload, horizon: int, rank: int = 1
) -> Training:
    """PowerSGD with its defaults (error feedback, warm start); it starts after a tenth of training, as advised.

    Rank 1 is where the documentation says to start. All gradients are in one bucket: on Gloo the hook's callbacks block
    the two threads that its next all-reduces need, so that two buckets at once hang.
    """
    start = max(2, horizon // 10)
    one_bucket = math.ceil(sum(p.numel() * p.element_size() for p in model.parameters()) / MEBIBYTE)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    training = ddp(model, make_optimizer, workload, horizon, one_bucket, powerSGD_hook, state)
    training.facts.update(rank=rank, start=start)
    return training


def post_local_sgd(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    bucket_cap_mb: float | None = None,
) -> Training:
    """DDP for about the first half of training, then local steps with an average of parameters every 4 steps.

    Half of the steps and every 4th are the documentation's example. The start is shifted by at most 4 steps, so that
    averages fall on whole multiples of 4 steps. There is one rank a host, so the hook's subgroup is the rank alone.
    """
    start = max(AVERAGING_PERIOD, horizon // 2 // AVERAGING_PERIOD * AVERAGING_PERIOD) - 1
    wrapped, facts = _wrapped(model, bucket_cap_mb)
    subgroup, _ = dist.new_subgroups(group_size=1)
    wrapped.register_comm_hook(PostLocalSGDState(None, subgroup, start), post_localSGD_hook)
    averager = PeriodicModelAverager(period=AVERAGING_PERIOD, warmup_steps=start)
    local = make_optimizer(model.parameters())
    optimizer = PostLocalSGDOptimizer(optim=local, averager=averager)

    def finish() -> None:
        local_steps = averager.step - start
        if local_steps > 0 and local_steps % AVERAGING_PERIOD != 1:
            average_parameters_or_parameter_groups(iter(model.parameters()), averager.process_group)

    facts.update(start=start, period=AVERAGING_PERIOD)
    return Training(wrapped, optimizer, local, workload.loss, finish, facts)


def _tuned(name: str, label: str, prepare: Any, exact: bool = False) -> System:
    return System(name, label, prepare, exact=exact, candidates=bucket_sizes, tuned_as="ddp")


SYSTEMS = (
    System("alone", "no communication", alone, exact=False, emulated=True),
    _tuned("ddp", "DDP", ddp, exact=True),
    _tuned("ddp_fp16", "DDP, fp16 hook", ddp_fp16),
    _tuned("ddp_bf16", "DDP, bf16 hook", ddp_bf16),
    System("powersgd", "DDP, PowerSGD hook", powersgd, exact=False),
    _tuned("post_local_sgd", "DDP, post-local SGD", post_local_sgd),
)
