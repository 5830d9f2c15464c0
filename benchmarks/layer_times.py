"""How a workload's computing is shared out to its layers, measured here on one core by the library's own profiler."""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crossover.buckets import Bucket
from crossover.deft.measure import StepTimer

from . import workloads
from .workloads.measure import _one_core

STEPS = 12
WARM_UP_STEPS = 3
MEMORY_BYTES = 1 << 25


@dataclass(frozen=True)
class LayerTimes:
    """Of one step; a layer is a module that owns parameters, the input side first.

    Attributes:
        forward_us: of each layer.
        backward_us: the same.
        nbytes: of its gradients.
        load_s: making the batch.
        update_s: of all parameters.
        compressible: for rank-1 factors (PowerSGD): bytes on the wire for each byte of gradients.
    """

    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]
    nbytes: tuple[int, ...]
    load_s: float
    update_s: float
    compressible: float


@functools.lru_cache
def layer_times(name: str) -> LayerTimes:
    """Train a few steps of a workload here, on one core with one thread."""
    with _one_core():
        return _measured(name)


def _measured(name: str) -> LayerTimes:
    workload = workloads.get(name)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    buckets = _buckets(model)
    timer = StepTimer(buckets)
    left = [0] * len(buckets)
    for bucket in buckets:
        for slot in bucket.slots:
            slot.parameter.register_post_accumulate_grad_hook(_counter(timer, left, bucket.index))
    loads, updates = [], []
    for step in range(WARM_UP_STEPS + STEPS):
        if step == WARM_UP_STEPS:
            timer.start()
        left[:] = [len(bucket.slots) for bucket in buckets]
        timer.step_begins()
        began = time.perf_counter()
        inputs, targets = workload.batch(0, step)
        loads.append(time.perf_counter() - began)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        timer.backward_ended()
        began = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - began)
    forward, backward, _ = timer.result()
    timer.stop()
    nbytes = tuple(sum(s.parameter.numel() * s.parameter.element_size() for s in b.slots) for b in reversed(buckets))
    load_s, update_s = (statistics.median(times[WARM_UP_STEPS:]) for times in (loads, updates))
    return LayerTimes(forward, backward, nbytes, load_s, update_s, _rank_one_share(model))


def _counter(timer: StepTimer, left: list[int], index: int) -> object:
    def arrived(parameter: Tensor) -> None:
        left[index] -= 1
        if not left[index]:
            timer.bucket_ready(index)

    return arrived


def _buckets(model: nn.Module) -> list[Bucket]:
    seen: set[int] = set()
    layers = []
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None and p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        if own:
            layers.append(own)
    return [
        Bucket(index, [(number, f"{index}.{number}", p) for number, p in enumerate(own)])
        for index, own in enumerate(reversed(layers))
    ]


def _rank_one_share(model: nn.Module) -> float:
    """PowerSGD's rule: a matrix is sent as two factors where these are less than half of it."""
    whole = sent = 0
    for parameter in model.parameters():
        size = parameter.numel()
        rows = parameter.shape[0] if parameter.dim() > 1 else 1
        factors = rows + size // rows
        whole += size
        sent += factors if parameter.dim() > 1 and 2 * factors < size else size
    return sent / whole


@functools.lru_cache
def pass_s_per_byte() -> float:
    """Seconds for each byte of ``a += b`` on tensors larger than the cache, on one core."""
    with _one_core():
        a, b = torch.ones(MEMORY_BYTES // 4), torch.ones(MEMORY_BYTES // 4)
        times = []
        for _ in range(8):
            began = time.perf_counter()
            a.add_(b)
            times.append(time.perf_counter() - began)
    return statistics.median(times) / MEMORY_BYTES
