"""The systems that ``benchmarks/imagenet.py`` compares: each wraps a model and makes its optimizer."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import crossover as xo

Options = argparse.Namespace
Pair = tuple[nn.Module, torch.optim.Optimizer]


def plain(model: nn.Module, options: Options) -> Pair:
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def ddp(model: nn.Module, options: Options) -> Pair:
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    return wrapped, plain(model, options)[1]


def ddp_fp16(model: nn.Module, options: Options) -> Pair:
    wrapped, optimizer = ddp(model, options)
    assert isinstance(wrapped, DistributedDataParallel)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped, optimizer


def overlapped(model: nn.Module, options: Options) -> Pair:
    return _crossover(model, options, "overlapped")


def priority(model: nn.Module, options: Options) -> Pair:
    return _crossover(model, options, "priority")


def _crossover(model: nn.Module, options: Options, schedule: str) -> Pair:
    optimizer = xo.DistributedOptimizer(
        plain(model, options)[1], model.named_parameters(), schedule=schedule, bucket_cap_mb=options.bucket_cap_mb
    )
    return model, optimizer


def horovod(model: nn.Module, options: Options) -> Pair:
    hvd = importlib.import_module("horovod.torch")
    return model, hvd.DistributedOptimizer(plain(model, options)[1], model.named_parameters())


@dataclass(frozen=True)
class System:
    """What is measured.

    Attributes:
        label: for the table.
        build: wraps a model and makes its optimizer.
        needs: the launcher whose library carries it, or ``None`` for any.
    """

    label: str
    build: Callable[[nn.Module, Options], Pair]
    needs: str | None = None


SYSTEMS = {
    "plain": System("no communication (the limit)", plain),
    "ddp": System("DDP", ddp, "torch"),
    "ddp-fp16": System("DDP, fp16 hook", ddp_fp16, "torch"),
    "overlapped": System("Crossover, Overlapped", overlapped),
    "priority": System("Crossover, Priority", priority),
    "horovod": System("Horovod", horovod, "horovod"),
}
