"""Turns for a loop that uses torch's ``DistributedDataParallel``: given back before the wait at the end of backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from crossover.sync.loops import turns_of_process

_log = logging.getLogger("crossover.sync")
CommHook = Callable[[Any, GradBucket], Future[Tensor]]


def share_ddp(model: DistributedDataParallel, hook: CommHook | None = None, state: object = None) -> None:
    """Give the turn back when the last gradient has been computed, which DDP itself tells only to a communication hook.

    DDP takes one hook: pass yours here. Gradients are the same bits as without.

    Args:
        model: not used yet.
        hook: how buckets are reduced; default: the average over all ranks, as DDP does by itself.
        state: for ``hook``; by default its process group, the model's own.

    Raises:
        RuntimeError: the model has a hook already.

    Example::

        model = DistributedDataParallel(net, broadcast_buffers=False)
        xo.sync.share_ddp(model)
        for batch, target in loader:
            with xo.sync.turn():
                optimizer.zero_grad()
                loss_fn(model(batch), target).backward()
            optimizer.step()
    """
    inner: CommHook = hook or allreduce_hook
    group = model.process_group if state is None and hook is None else state
    if model.broadcast_buffers and next(model.module.buffers(), None) is not None:
        _log.warning(
            "DistributedDataParallel broadcasts buffers before each forward pass, which waits for other ranks while "
            "the turn is held; pass broadcast_buffers=False if the model allows it"
        )

    def reduce(_: object, bucket: GradBucket) -> Future[Tensor]:
        if bucket.is_last():
            for turn in turns_of_process():
                turn.rest()
        return inner(group, bucket)

    reduce.__annotations__.clear()  # DDP compares them with classes, and they are text here
    model.register_comm_hook(None, reduce)
