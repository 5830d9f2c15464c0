"""Every subset of gate, schedule and sharing: what has to hold of a job holds of each of them.

All ranks start the same collectives in the same order, hold the same parameters bit for bit after ``flush()`` with
nothing on its way, and count each step once. Turns change nothing but timing: the bits are those without.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crossover.attachment import Attachment
from crossover.schedulers.delayed import DelayedSchedule
from tests.cases import invariants
from tests.cases.late import SMALL, make_schedule
from tests.harness import run_ranks
from tests.selsync.late_steps import late_by_hand
from tests.selsync.local_steps import Scripted, several, train
from tests.sync.conftest import end
from tests.sync.jobs import rivals, tally
from tests.training import RECIPES, alone, flat, make_model, sgd

# Horovod joins tensors that happen to be ready together, and the order of a sum over three ranks depends on it.
UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}
Subset = tuple[bool, bool, bool]
SUBSETS: list[Subset] = list(itertools.product((False, True), repeat=3))
STEPS = 12
SCRIPT: list[list[int]] = [[], [1], [], [0], []]
JOBS = [
    (2, "torch"),
    (3, "torch"),
    pytest.param(2, "horovod", marks=pytest.mark.horovod),
    pytest.param(3, "horovod", marks=pytest.mark.horovod),
]


def name_of(subset: Subset) -> str:
    return " + ".join(itertools.compress(("gate", "DeFT", "sharing"), subset)) or "plain"


def go_through(gated: bool, delayed: bool, shared: bool) -> tuple[Tensor, int]:
    """Parameters of a flushed training with this subset, and how many turns it took."""
    log = invariants.start()
    model = make_model()
    gate = Scripted(SCRIPT) if gated else None
    options: dict[str, Any] = {"gate": gate, **SMALL}
    options["schedule"] = make_schedule("deft merging") if delayed else "overlapped"
    options["sharing"] = "timeshare:job=a" if shared else None
    job = invariants.Job(model, sgd(model), **options)
    train(model, job.optimizer, range(STEPS))
    attachment, engine = Attachment.of(job.optimizer), invariants.engine_of(job.optimizer)
    assert attachment is not None
    assert attachment.steps == job.steps == engine.shares == STEPS
    if gate is not None:
        require_counted(gate, engine.exchange, delayed)
    elif delayed:
        assert isinstance(engine.schedule, DelayedSchedule)
        assert 0 < engine.schedule.updates < STEPS
    turns = tally().turns
    job.check(steps=STEPS)
    assert not log.open
    return flat(model), turns


def require_counted(gate: Scripted, exchange: Any, delayed: bool) -> None:
    assert gate.steps == STEPS
    assert 0 < gate.shared_steps < STEPS
    invariants.require_same("counters", (gate.local_steps, gate.shared_steps, gate.since_shared))
    if delayed:
        late = exchange._synchronizer.late
        assert late.launched > 1
        invariants.require_same("averages", (late.launched, late.dropped))


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="xo-", dir="/tmp") as folder:
        yield Path(folder)
        for lock in Path(folder).glob("*.lock"):
            end(lock)


@pytest.mark.parametrize(("size", "launcher"), JOBS)
def test_every_subset(run_dir: Path, size: int, launcher: str) -> None:
    env = {"CROSSOVER_RUN_DIR": str(run_dir), "CROSSOVER_HOST": "here", "CROSSOVER_TIMEOUT": "30", **UNFUSED}
    with rivals(run_dir, *(f"cpu{number}" for number in range(size))):
        ranks = run_ranks(several, size, go_through, SUBSETS, launcher=launcher, env=env, timeout=120)
    results = [dict(zip(SUBSETS, results, strict=True)) for results in ranks]
    for subset in SUBSETS:
        gated, delayed, shared = subset
        for result in results:
            assert torch.equal(result[subset][0], results[0][subset][0]), f"{name_of(subset)}: ranks differ"
            without = result[gated, delayed, False][0]
            assert torch.equal(result[subset][0], without), f"{name_of(subset)}: turns changed bits"
            assert (result[subset][1] > 0) == shared, f"{name_of(subset)}: {result[subset][1]} turns"
    require_known(results[0], size)


def require_known(result: dict[Subset, tuple[Tensor, int]], size: int) -> None:
    """Plain training is that of one process on the joined batch; gate and DeFT give what is worked out by hand."""
    plain = alone(RECIPES["sgd with momentum"], list(range(size)), STEPS)
    assert (result[False, False, False][0] - plain).abs().max() < 1e-12
    late = late_by_hand(make_model, sgd, SCRIPT, STEPS, size, under=2, warmup=2)
    assert (result[True, True, False][0] - late.flushed).abs().max() < 1e-12
