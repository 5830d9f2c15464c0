"""Crossover's own systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

import crossover as xo
from crossover.auto import Auto
from crossover.deft import DeFT
from crossover.deft.pilot import Decision
from crossover.schedulers import Overlapped, Priority, Schedule
from crossover.selsync import Gate, Periodic, SelSync

from ..workloads import Workload
from . import horovod
from .system import MakeOptimizer, Prepare, Settings, System, Training
from .torch_ddp import AVERAGING_PERIOD, bucket_sizes

SELDOM = 0.3
"""SelSync's delta with DeFT where another job fills the gaps between averages: the paper's for SelSync by itself."""
LOOKS_EVERY = 4
"""Steps between the votes of the SelSync that does not look at each."""
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
    compression: Any = xo.Compression.none,
) -> Training:
    """The default schedule, on the backend of whatever launched the ranks; buckets are sized by the search DDP gets."""
    sizes: dict[str, Any] = {"compression": compression}
    if bucket_cap_mb is not None:
        sizes |= {"bucket_cap_mb": bucket_cap_mb, "first_bucket_cap_mb": bucket_cap_mb}
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


def _told(training: Training, tell: Callable[[], dict[str, Any]]) -> Training:
    """The same, with facts that are known when training ends."""

    def finish() -> None:
        training.facts.update(tell())
        training.finish()

    return replace(training, finish=finish)


def last_plan(decisions: Sequence[Decision]) -> str:
    """What was decided last about the plan; warnings may have followed."""
    plans = [decision for decision in decisions if decision.action.startswith(("delayed", "synchronous"))]
    return str((plans or decisions)[-1]) if decisions else "none"


def deft(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    preserved: bool = True,
    compression: Any = xo.Compression.none,
) -> Training:
    """DeFT, measured in its last synchronous steps: 25, or an eighth of a shorter training; rates rise for a third.

    With its Preserver, or with the plan that hides all communication, however many steps that merges.
    """
    warmup = min(25, max(8, horizon // 8))
    schedule = DeFT(
        warmup_steps=warmup,
        profile_steps=max(5, warmup // 2),
        ramp_updates=min(100, horizon // 3),
        capacity=None if preserved else (1, 1),
    )
    facts: dict[str, Any] = {"warmup": warmup}
    training = _prepared(model, make_optimizer, workload, schedule, {"compression": compression}, facts)
    return _told(training, lambda: {"decision": last_plan(schedule.decisions)})


def auto(model: nn.Module, make_optimizer: MakeOptimizer, workload: Workload, horizon: int) -> Training:
    """Chooses by itself after 25 plain steps, or a sixteenth of a shorter training; a trial of DeFT comes on top."""
    warmup = min(25, max(4, horizon // 16))
    schedule = Auto(warmup_steps=warmup, profile_steps=max(2, warmup // 4), ramp_updates=min(25, max(8, horizon // 8)))
    facts: dict[str, Any] = {"warmup": warmup}
    training = _prepared(model, make_optimizer, workload, schedule, {}, facts)
    return _told(training, lambda: {"choice": schedule.choice, "decision": last_plan(schedule.decisions)})


def _gated(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    gate: Gate,
    schedule: Schedule | None = None,
    compression: Any = xo.Compression.none,
    **facts: Any,
) -> Training:
    """With local steps; evaluations see the average of all ranks' parameters."""
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = xo.DistributedOptimizer(
        make_optimizer(model.parameters()),
        model.named_parameters(),
        gate=gate,
        schedule=schedule,
        compression=compression,
    )

    def finish() -> None:
        optimizer.flush()
        facts["lssr"] = round(gate.lssr, 3)

    return Training(model, optimizer, optimizer, workload.loss, finish, facts)


def selsync(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    delta: float = 0.3,
    every: int = 1,
    compression: Any = xo.Compression.none,
) -> Training:
    """SelSync with the paper's delta, and its 25 steps of warm-up or a fortieth of a shorter training.

    In a training of usual length 25 steps are far below a fortieth. It looks at each step, or at every so many only.
    """
    warmup = min(25, max(4, horizon // 40))
    gate = SelSync(delta, warmup_steps=warmup, every=every, buffers=model)
    facts: dict[str, Any] = {"delta": delta, "every": every, "warmup": warmup}
    return _gated(model, make_optimizer, workload, gate, compression=compression, **facts)


def both(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    delta: float = 0.0,
    compression: Any = xo.Compression.none,
) -> Training:
    """SelSync whose averages travel under the next steps: with delta 0 one after the other, as many as a link carries.

    With a threshold fewer leave: less work for the core, and gaps for a job that takes turns with this one.

    Its warm-up is longer than SelSync's, a sixteenth of a short training: averages that land late while rates rise can
    throw training back (from 82 to 57 % of the digits in the comparison's VGG with half precision).
    """
    warmup = min(25, max(4, horizon // 16))
    gate = SelSync(delta, warmup_steps=warmup, buffers=model)
    schedule = DeFT(warmup_steps=warmup, profile_steps=max(2, warmup // 2))
    return _gated(model, make_optimizer, workload, gate, schedule, compression, delta=delta, warmup=warmup)


def periodic(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    every: int = AVERAGING_PERIOD,
    compression: Any = xo.Compression.none,
) -> Training:
    """Local SGD with the period of post-local SGD here, and a tenth of training as warm-up instead of half."""
    warmup = horizon // 10
    gate = Periodic(every, warmup, buffers=model)
    return _gated(model, make_optimizer, workload, gate, compression=compression, every=every, warmup=warmup)


def _narrow(name: str, label: str, prepare: Prepare, tuned_as: str = "") -> System:
    """What is shared travels in half precision: gradients, or with a gate the distance from the last average."""
    half = partial(prepare, compression=xo.Compression.fp16)
    return System(f"{name}_fp16", f"{label}, fp16", half, exact=False, tuned_as=tuned_as, emulated=True)


SYSTEMS = (
    System("crossover", "Crossover, Overlapped", overlapped, tuned_as="ddp", emulated=True),
    System("crossover_selsync", "Crossover, SelSync", selsync, exact=False, emulated=True),
    System("crossover_periodic", "Crossover, local SGD", periodic, exact=False, emulated=True),
    System("crossover_deft", "Crossover, DeFT", deft, exact=False, emulated=True),
    System(
        "crossover_deft_off",
        "Crossover, DeFT, Preserver off",
        partial(deft, preserved=False),
        exact=False,
        emulated=True,
    ),
    System("crossover_both", "Crossover, SelSync + DeFT", both, exact=False, emulated=True),
    System(
        "crossover_both_seldom",
        f"Crossover, SelSync at {SELDOM:g} + DeFT",
        partial(both, delta=SELDOM),
        exact=False,
        emulated=True,
    ),
    System("crossover_auto", "Crossover, auto", auto, exact=False, emulated=True),
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
    _narrow("crossover", "Crossover, Overlapped", overlapped, tuned_as="ddp"),
    _narrow("crossover_selsync", "Crossover, SelSync", selsync),
    _narrow(
        f"crossover_selsync_every_{LOOKS_EVERY}",
        f"Crossover, SelSync, every {LOOKS_EVERY}",
        partial(selsync, every=LOOKS_EVERY),
    ),
    _narrow("crossover_periodic", "Crossover, local SGD", periodic),
    _narrow("crossover_deft", "Crossover, DeFT", deft),
    _narrow("crossover_both", "Crossover, SelSync + DeFT", both),
    _narrow("crossover_both_seldom", f"Crossover, SelSync at {SELDOM:g} + DeFT", partial(both, delta=SELDOM)),
)
