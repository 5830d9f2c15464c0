"""Horovod's own optimizer, as its documentation sets it up, with the defaults of ``horovodrun``.

Its ``broadcast_optimizer_state`` is left out: on a fresh optimizer it takes a real step, which moves AdamW's
parameters, and fresh states are equal anyway.
"""

from __future__ import annotations

import importlib
import os

from torch import nn

from ..workloads import Workload
from .system import MakeOptimizer, System, Training


def unavailable() -> str | None:
    """Why ``horovod.torch`` cannot be used here, or ``None``."""
    try:
        importlib.import_module("horovod.torch")
    except Exception as error:  # a build for another torch fails in several ways, not all of them ImportError
        return f"horovod.torch cannot be imported ({type(error).__name__}); make horovod builds it"
    return None


def horovod(model: nn.Module, make_optimizer: MakeOptimizer, workload: Workload, horizon: int) -> Training:
    """``hvd.DistributedOptimizer``, tensors fused by Horovod's background thread."""
    hvd = importlib.import_module("horovod.torch")
    if not hvd.is_initialized():
        hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(make_optimizer(model.parameters()), named_parameters=model.named_parameters())
    facts = {
        "fusion_threshold": os.environ.get("HOROVOD_FUSION_THRESHOLD", "default"),
        "cycle_time": os.environ.get("HOROVOD_CYCLE_TIME", "default"),
    }
    return Training(model, optimizer, optimizer, workload.loss, facts=facts)


SYSTEMS = (System("horovod", "Horovod", horovod, launcher="horovod", unavailable=unavailable),)
