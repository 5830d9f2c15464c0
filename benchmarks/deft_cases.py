"""The ways to train that :mod:`benchmarks.deft_accuracy` compares, at a coverage rate that is emulated by a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import crossover as xo
from crossover.bucket_plan import Item, plan_buckets
from crossover.deft import BucketTimes, DeFT, Profile, synchronous_plan
from crossover.deft.partition import spans
from crossover.deft.plan import Plan, mean_duration
from crossover.schedulers import FifoDelayed, Schedule

from . import local_steps, peers
from .peers import Training
from .workloads import Workload

PIECES = 40
PIECE_US = 100_000
SECOND_LINK = 5 / 3
"""Its times, beside a fast link of 500 Mbit/s: 300 Mbit/s."""

# -- an emulated coverage rate -----------------------------------------------------------------------------------------


def piece_bytes(model: nn.Module) -> int:
    """Size at which buckets are closed, for about ``PIECES`` of them."""
    return max(sum(p.numel() * p.element_size() for p in model.parameters()) // PIECES, 1)


def emulated(model: nn.Module, cr: float, links: int = 1) -> Profile:
    """A profile of equal buckets on a link that takes ``cr`` times the computing for all of them, to a whole bucket.

    Equal, as if large tensors had been cut: of a measured profile the library does that.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    items = [Item(p.numel() * p.element_size(), None) for p in parameters]
    size = piece_bytes(model)
    buckets = plan_buckets(items, range(len(items) - 1, -1, -1), size, size)
    count = len(buckets)
    window = math.ceil(count / cr)  # buckets that travel under a step's computing
    forward = window // 3
    rows = ((PIECE_US,) * count, (round(PIECE_US * SECOND_LINK),) * count)
    nbytes = tuple(sum(items[index].nbytes for index in bucket) for bucket in reversed(buckets))
    # a little more, as planning rounds computing down to whole ticks
    parts = [round(1.01 * PIECE_US * part) for part in (forward, window - forward)]
    times = [tuple(stop - start for start, stop in spans(part, count)) for part in parts]
    return Profile(times[0], times[1], 0, rows[:links], nbytes, ("fast", "slow")[:links], 2)


def synchronous_step(model: nn.Module, cr: float) -> float:
    """A step in which everything is waited for, in units of its computing."""
    times = emulated(model, cr).times()
    return mean_duration(synchronous_plan(times.buckets), times) / times.compute


# -- systems -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        label: for tables.
        kind: ``"ddp"``, ``"deft"`` or ``"fifo"``.
        options: of the schedule.
        momentum: of SGD, if not the workload's; the learning rate keeps ``rate / (1 - momentum)``.
        links: of the profile.
    """

    label: str
    kind: str = "deft"
    options: Mapping[str, Any] = field(default_factory=dict)
    momentum: float | None = None
    links: int = 1


OFF = {"capacity": (1, 1)}
MAIN = {
    "ddp": Case("DDP", "ddp"),
    "deft": Case("DeFT"),
    "off": Case("DeFT, Preserver off", options=OFF),
    "fifo": Case("FIFO, one update late", "fifo"),
}
ABLATIONS = {
    "no_delay": Case("no delay (waits for all)", options={**OFF, "sync_wait_us": 10**9}),
    "no_merging": Case("no merging (waits for the rest)", options={**OFF, "most_merged": 1}),
    "two_links": Case("two links", options=OFF, links=2),
    "mean": Case("merge: mean", options={**OFF, "merge": "mean"}),
    "sum": Case("merge: sum", options={**OFF, "merge": "sum"}),
    "plain_momentum": Case("plain momentum", options={**OFF, "spike_compensation": False}),
    "no_ramp": Case("no ramp of the learning rate", options={**OFF, "ramp_updates": 0}),
    "momentum_0": Case("momentum 0", options=OFF, momentum=0.0),
    "ddp_momentum_0": Case("DDP, momentum 0", "ddp", momentum=0.0),
}
CASES = MAIN | ABLATIONS


def schedule_for(case: Case, model: nn.Module, cr: float, steps: int) -> Schedule:
    """The schedule of a case that is not DDP; an eighth of training is synchronous."""
    warmup = max(steps // 8, 3)
    if case.kind == "fifo":
        return FifoDelayed(merged=math.ceil(cr), warmup_steps=warmup, **case.options)
    options = {"ramp_updates": steps // 3, "profile_steps": 2, **case.options}
    second = "lo" if case.links > 1 else None
    profile = emulated(model, cr, case.links)
    return DeFT(profile, warmup_steps=warmup, bucket_bytes=piece_bytes(model), second_link=second, **options)


def optimizer_for(case: Case, workload: Workload, parameters: Any) -> torch.optim.Optimizer:
    """The workload's own, with the momentum of the case."""
    optimizer = workload.optimizer(parameters)
    if case.momentum is None:
        return optimizer
    for group in optimizer.param_groups:
        group["lr"] *= (1.0 - case.momentum) / (1.0 - group["momentum"])
        group["momentum"] = case.momentum
    return optimizer


# -- on the ranks ------------------------------------------------------------------------------------------------------


def prepared(
    case: Case, model: nn.Module, workload: Workload, cr: float, steps: int
) -> tuple[Training, Schedule | None]:
    """A case, ready to train. Collective."""
    make_optimizer = partial(optimizer_for, case, workload)
    if case.kind == "ddp":
        return peers.get("ddp").prepare(model, make_optimizer, workload, steps), None
    schedule = schedule_for(case, model, cr, steps)
    optimizer: Any = xo.DistributedOptimizer(
        make_optimizer(model.parameters()), model.named_parameters(), schedule=schedule
    )
    return Training(model, optimizer, optimizer, workload.loss, optimizer.flush), schedule


def train(case: Case, workload: Workload, cr: float, steps: int) -> dict[str, Any]:
    """Train, and evaluate what comes out. Collective."""
    model = workload.model()
    training, schedule = prepared(case, model, workload, cr, steps)
    scheduler = workload.scheduler(training.scheduled, steps)
    clock = Clock(emulated(model, cr, case.links).times())
    for step in range(steps):
        training(*workload.batch(xo.rank(), step, xo.size()))
        scheduler.step()
        clock.step(case, schedule)
    updates = steps if schedule is None else getattr(schedule, "updates", steps)
    training.finish()
    answer = {**local_steps.evaluate(workload, model), "updates": updates / steps, "step": clock.total / steps}
    decisions = schedule.decisions if isinstance(schedule, DeFT) else []
    return {**answer, "decisions": [str(decision) for decision in decisions]}


class Clock:
    """Adds up what steps would take by their plans, in units of a step's computing."""

    def __init__(self, times: BucketTimes) -> None:
        self.total = 0.0
        self._times = times
        self._synchronous = mean_duration(synchronous_plan(times.buckets), times)
        self._known: dict[str, float] = {}

    def step(self, case: Case, schedule: Schedule | None) -> None:
        """A step has been taken."""
        ticks = self._synchronous
        if isinstance(schedule, DeFT) and schedule.course.plan is not None:
            ticks = self._of(schedule.course.plan)
        elif isinstance(schedule, FifoDelayed) and schedule.passes > schedule.warmup_steps:
            ticks = max(self._times.compute, sum(self._times.reduce[0]) / schedule.merged)
        self.total += ticks / self._times.compute

    def _of(self, plan: Plan) -> float:
        key = plan.digest()
        if key not in self._known:
            self._known[key] = mean_duration(plan, self._times)
        return self._known[key]
