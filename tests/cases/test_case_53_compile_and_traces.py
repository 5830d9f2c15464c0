"""Situation 53: the model is compiled, and one wants to see what happens.

A compiled backward pass delivers all gradients at its end, so that communication is no longer hidden under it; hooks
that were added too late are ignored; compilation starts anew after each ``zero_grad()``. And traces are unreadable
after a kill, without bound, or full of names that say nothing. Here a compiled model trains like the reference,
whether it was compiled before the optimizer was wrapped or afterwards, with at most one compilation after warm-up;
overlap that is lost shows in the records; a trace opens after a kill and says which bucket each collective carried.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover import telemetry
from crossover.reduction import Waits
from crossover.telemetry import StepRecord, timeline
from crossover.telemetry.run import load_run
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import batch, flat, make_model, sgd

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
STEPS = 20
WARM_UP = 6


def loss_of(model: Any, ranks: list[int], step: int) -> Tensor:
    pairs = [batch(rank, step) for rank in ranks]
    features, targets = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
    return nn.functional.mse_loss(model(features), targets)


def alone() -> Tensor:
    model = make_model()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, [0, 1], step).backward()
        optimizer.step()
    return flat(model)


def compiled(backend: str, schedule: str, compile_first: bool, set_to_none: bool) -> tuple[Tensor, int]:
    """The parameters, and how often something was compiled after warm-up."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = make_model()
    fast = torch.compile(model, backend=backend) if compile_first else None
    job = invariants.Job(model, sgd(model), schedule=schedule, **invariants.SMALL_BUCKETS)
    fast = fast or torch.compile(model, backend=backend)
    warm = 0
    for step in range(STEPS):
        if step == WARM_UP:
            warm = counters["stats"]["unique_graphs"]
            assert warm > 0
        job.optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(fast, [xo.rank()], step).backward()
        job.optimizer.step()
    job.check(steps=STEPS)
    return flat(model), counters["stats"]["unique_graphs"] - warm


def every_way(backend: str, schedules: tuple[str, ...]) -> dict[str, tuple[Tensor, int]]:
    invariants.start()
    return {
        f"{schedule}, compiled {'before' if first else 'after'} wrapping": compiled(backend, schedule, first, first)
        for schedule in schedules
        for first in (True, False)
    }


def check(results: list[dict[str, tuple[Tensor, int]]]) -> None:
    reference = alone()
    for result in results:
        for name, (trained, compilations) in result.items():
            assert (trained - reference).abs().max() < 1e-12, name
            assert compilations <= 1, f"{name}: compiled {compilations} times after warm-up"


def test_a_compiled_model_trains_like_the_reference() -> None:
    check(run_ranks(every_way, 2, "aot_eager", ("overlapped", "priority"), timeout=120))


@pytest.mark.horovod
def test_a_compiled_model_trains_like_the_reference_through_horovod() -> None:
    check(run_ranks(every_way, 2, "aot_eager", ("overlapped",), launcher="horovod", timeout=120))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler here")
def test_a_model_compiled_by_inductor_trains_like_the_reference() -> None:
    check(run_ranks(every_way, 2, "inductor", ("overlapped",), timeout=200))


@torch.library.custom_op("crossover_tests::slow_in_backward", mutates_args=())
def slow_in_backward(values: Tensor, seconds: float) -> Tensor:
    """Passes values on; its backward takes ``seconds``, within a compiled graph too."""
    return values.clone()


@torch.library.custom_op("crossover_tests::slowly", mutates_args=())
def slowly(values: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return values.clone()


@slow_in_backward.register_fake
def _(values: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(values)


@slowly.register_fake
def _(values: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(values)


def _remember(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.seconds = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return slowly(gradient, ctx.seconds), None


slow_in_backward.register_autograd(_backward, setup_context=_remember)


class SlowBelow(nn.Module):
    """Two layers; in backward the lower one comes a tenth of a second after the upper one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lower = nn.Linear(200, 200)
        self.upper = nn.Linear(200, 200)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.lower(values)
        return self.upper(slow_in_backward(hidden, 0.1))


def overlap(is_compiled: bool) -> tuple[float, float]:
    """Seconds of communication, and seconds of it under computing, over some steps on an emulated link."""
    xo.init()
    records: list[StepRecord] = []
    recorder = telemetry.start()
    model = SlowBelow()
    optimizer: Any = xo.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        model.named_parameters(),
        bucket_cap_mb=0.1,
        first_bucket_cap_mb=0.1,
    )
    fast = torch.compile(model, backend="aot_eager") if is_compiled else model
    for step in range(8):
        optimizer.zero_grad()
        fast(torch.ones(4, 200) * (step + 1)).square().mean().backward()
        optimizer.step()
    records = list(recorder)[3:]
    telemetry.stop()
    return sum(record.communication_s for record in records), sum(record.hidden_s for record in records)


def test_lost_overlap_shows_in_the_records() -> None:
    env = {"CROSSOVER_EMULATED_LINK": "40mbit,1ms"}
    hidden = {}
    for is_compiled in (False, True):
        shares = [under / total for total, under in run_ranks(overlap, 2, is_compiled, env=env)]
        hidden[is_compiled] = min(shares)
    assert hidden[False] > 0.3, "the upper layer travels while the lower one is computed"
    assert hidden[True] < 0.15, "nothing travels before the compiled backward has ended"


def test_what_counts_as_hidden() -> None:
    """Two collectives that are waited for one after the other hide nothing under each other."""
    waits = Waits()
    waits.add(100, 130)
    waits.add(130, 160)
    waits.add(200, 210)
    assert [waits.total(time) for time in (0, 100, 110, 130, 145, 160, 180, 205, 300)] == [
        *(0, 0, 10, 30, 45, 60, 60, 65, 70)
    ]
    for _ in range(3 * Waits.KEPT):
        waits.add(1000, 1001)
    assert waits.total(2000) - waits.total(1000) <= 3 * Waits.KEPT


def traced_until_killed(steps: int) -> None:
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), **invariants.SMALL_BUCKETS)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, [xo.rank()], step % 7).backward()
        optimizer.step()
    time.sleep(1)  # four times the interval at which events are written
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_trace_opens_after_a_kill_and_its_names_can_be_read(launcher: str, tmp_path: Path) -> None:
    steps = 300
    env = {"CROSSOVER_TIMELINE": str(tmp_path / "timeline"), "CROSSOVER_RECORDS": str(tmp_path / "records")}
    for folder in env.values():
        Path(folder).mkdir()
    outcomes = run_ranks(traced_until_killed, 2, steps, launcher=launcher, env=env, expect_failure=True, timeout=90)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    files = sorted((tmp_path / "timeline").iterdir())
    assert len(files) == 2
    for path in files:
        events = json.loads(path.read_text() + "]")
        spans = [event for event in events if event["ph"] == "X"]
        names = {event["name"] for event in spans}
        assert {"bucket0", "bucket1"} <= names
        assert all(re.fullmatch(r"[A-Za-z][\w .\[\],]*", name) for name in names), names
        assert len(spans) >= 2 * (steps - 1)
        assert path.stat().st_size < 64 << 20
    for records in load_run(tmp_path / "records").records.values():
        assert [record.step for record in records] == list(range(steps))
        assert all(record.collectives and record.bytes_sent for record in records)


def bounded(folder: Path) -> int:
    xo.init()
    timeline.start(folder, xo.rank(), max_bytes=32 << 10)
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), **invariants.SMALL_BUCKETS)
    for step in range(100):
        optimizer.zero_grad()
        loss_of(model, [xo.rank()], step % 7).backward()
        optimizer.step()
    timeline.stop()
    return max(path.stat().st_size for path in folder.iterdir())


def test_a_trace_stays_within_its_bound(tmp_path: Path) -> None:
    assert all(16 << 10 < size <= 32 << 10 for size in run_ranks(bounded, 2, tmp_path))


def names_of_collectives() -> list[str]:
    log = invariants.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        xo.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer: Any = xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        xo.broadcast_optimizer_state(optimizer, root_rank=0)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([xo.rank()])).sum().backward()
            optimizer.step()
        xo.allreduce(torch.ones(2), name="loss")
        xo.barrier()
    spans = {event.key for event in profile.key_averages() if event.key.startswith("crossover::")}
    assert {f"crossover::{entry.name}" for entry in log.collectives} == spans
    return [entry.name for entry in log.collectives]


def test_every_collective_has_a_name_that_says_what_it_carries() -> None:
    first, second = run_ranks(names_of_collectives)
    assert first == second
    for part in ("optimizer0.bucket0.0", "optimizer0.sparse.0.weight", "optimizer0.agree", "broadcast_optimizer_state"):
        assert any(part in name for name in first), f"{part} not in {first}"
    assert any("loss" in name for name in first)
    assert not any("noname" in name for name in first)
