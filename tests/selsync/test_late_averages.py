"""A gate with late updates: equal to what is worked out by hand, on every path that a training takes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import crossover as xo
from crossover import telemetry
from crossover.deft import DeFT
from crossover.schedulers import FifoDelayed
from crossover.selsync.late_synchronizer import LateSynchronizer
from tests.cases import invariants
from tests.deft.profiles import random_profile
from tests.harness import run_ranks
from tests.selsync.late_steps import Late, late_by_hand
from tests.selsync.local_steps import Scripted, several, train
from tests.training import adam, batch, flat, make_model, sgd

ENV = {"CROSSOVER_TIMEOUT": "15"}
STEPS = 14
SCRIPTS: dict[str, list[list[int]]] = {
    "mixed": [[], [1], [], [], [0, 1], [], []],
    "always": [[0]],
    "while one travels": [[], [], [0], [1], [], [], [], [], []],
    "never": [[]],
}
BUILDERS = {"sgd": sgd, "adam": adam}
CASES = [
    ("always", "sgd", 1, 1),
    ("mixed", "sgd", 3, 1),
    ("while one travels", "sgd", 3, 1),
    ("always", "adam", 2, 1),
    ("mixed", "sgd", 2, 3),
    ("never", "sgd", 1, 1),
]
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
SIZES = [(2, "torch"), (3, "torch"), pytest.param(2, "horovod", marks=pytest.mark.horovod)]


def synchronizer_of(job: invariants.Job) -> LateSynchronizer:
    synchronizer = invariants.engine_of(job.optimizer).exchange._synchronizer
    assert isinstance(synchronizer, LateSynchronizer)
    return synchronizer


def require_as_expected(wanted: Late, rank: int, after: list[Tensor], flushed: Tensor | None = None) -> None:
    for step, (found, value) in enumerate(zip(after, wanted.after, strict=True)):
        gap = float((found - value[rank]).abs().max())
        assert gap < 1e-12, f"rank {rank} after step {step} is off by {gap}"
    assert flushed is None or (flushed - wanted.flushed).abs().max() < 1e-12


# -- parameters --------------------------------------------------------------------------------------------------------


def scripted(script: str, builder: str, under: int, passes: int) -> tuple[list[Tensor], Tensor]:
    """Parameters after each step, and of all flushed."""
    invariants.start()
    model, gate = make_model(), Scripted(SCRIPTS[script])
    options = {"gate": gate, "schedule": FifoDelayed(merged=under), "backward_passes_per_step": passes}
    job = invariants.Job(model, BUILDERS[builder](model), **options)
    after = []
    for step in range(STEPS):
        train(model, job.optimizer, range(step, step + 1), passes)
        after.append(flat(model).clone())
    assert gate.apart
    job.check(steps=STEPS)
    assert gate.steps == STEPS
    return after, flat(model)


@pytest.mark.parametrize(("size", "launcher"), SIZES)
def test_parameters_are_those_worked_out_by_hand(size: int, launcher: str) -> None:
    ranks = run_ranks(several, size, scripted, CASES, launcher=launcher, timeout=100)
    for number, (script, builder, under, passes) in enumerate(CASES):
        build = BUILDERS[builder]
        wanted = late_by_hand(make_model, build, SCRIPTS[script], STEPS, size, under=under, passes=passes)
        for rank, results in enumerate(ranks):
            require_as_expected(wanted, rank, *results[number])
            assert torch.equal(results[number][1], ranks[0][number][1])
        assert script == "never" or (wanted.launched and wanted.landed)


def test_the_reference_is_worth_its_name() -> None:
    """It launches, waits and lands when it should, and is another than one that ignores what travels."""
    late = late_by_hand(make_model, sgd, SCRIPTS["while one travels"], STEPS, 2, under=3)
    assert (late.synchronous, late.launched, late.landed) == ([], [3, 6, 12], [6, 9])
    always = late_by_hand(make_model, sgd, SCRIPTS["always"], 6, 2, under=2)
    assert (always.synchronous, always.launched, always.landed) == ([1], [2, 4, 6], [4, 6])
    sooner = late_by_hand(make_model, sgd, SCRIPTS["always"], 6, 2, under=1)
    assert (always.after[3][0] - sooner.after[3][0]).abs().max() > 1e-6


def normalised() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)).double()


def with_buffers() -> tuple[list[Tensor], list[Tensor]]:
    xo.init()
    model = normalised()
    gate = Scripted(SCRIPTS["mixed"], buffers=model)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), gate=gate, schedule=FifoDelayed(merged=2))
    after = []
    for step in range(9):
        train(model, optimizer, range(step, step + 1))
        after.append(flat(model).clone())
    return after, [buffer.clone() for buffer in model.buffers()]


def test_buffers_are_averaged_where_an_average_lands() -> None:
    """After the ninth step; averages land behind the fourth, seventh and ninth."""
    wanted = late_by_hand(normalised, sgd, SCRIPTS["mixed"], 9, 2, under=2)
    assert wanted.landed == [4, 7]
    ranks = run_ranks(with_buffers, 2, env=ENV)
    for rank, (after, buffers) in enumerate(ranks):
        require_as_expected(wanted, rank, after)
        for found, value in zip(buffers, wanted.buffers[rank], strict=True):
            assert (found - value).abs().max() < 1e-12
    assert not torch.equal(ranks[0][1][0], ranks[1][1][0]), "two steps after the last landing"


# -- when --------------------------------------------------------------------------------------------------------------


def recorded(kind: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What the records of all steps say, and what the schedule decided."""
    invariants.start()
    rows: list[dict[str, Any]] = []
    schedule: Any = FifoDelayed(merged=3)
    if kind == "given":
        schedule = DeFT(random_profile(11, 5, coverage=1.6), warmup_steps=2)
    elif kind == "measured":
        schedule = DeFT(warmup_steps=5, profile_steps=3, replan_steps=6)
    model = make_model()
    job = invariants.Job(model, sgd(model), gate=Scripted(SCRIPTS["always"]), schedule=schedule)
    telemetry.start(loggers=[rows.append])
    try:
        train(model, job.optimizer, range(STEPS))
    finally:
        telemetry.stop()
    invariants.require_same("steps under way", synchronizer_of(job).travel.steps)
    job.check(steps=STEPS)
    return rows, [decision.action for decision in getattr(schedule, "decisions", [])]


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row.get(f"crossover/{name}") for row in rows]


def test_records_say_what_was_launched_and_what_landed() -> None:
    [(fixed, _), (given, planned), (measured, decisions)], _ = run_ranks(
        several, 2, recorded, [("fixed",), ("given",), ("measured",)], env=ENV
    )
    assert column(fixed, "landed_from") == [None] * 4 + [2, None, None] + [5, None, None] + [8, None, None, 11]
    assert column(fixed, "staleness") == [None] * 4 + [3, None, None] * 3 + [3]
    assert column(fixed, "lands") == [None, 5, 5, 5, 8, 8, 8, 11, 11, 11, 14, 14, 14, 17]
    assert all((drift is not None) == (shared is not None) for drift, shared in drifts(fixed))
    assert "average 1 that lands after step 5" in column(fixed, "reason")[1]
    assert column(given, "lands") == [None, None, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15]
    assert planned == ["averages of parameters travel under 2 steps"]
    assert column(measured, "lands")[:5] == [None] * 5
    assert None not in column(measured, "lands")[5:]
    assert ["travel under" in decision for decision in decisions] == [True, True], "after the warm-up, and 6 steps on"


def drifts(rows: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Of the steps but the first, whose average is waited for."""
    return list(zip(column(rows, "drift"), column(rows, "landed"), strict=True))[1:]


def scaled() -> tuple[list[float], list[Tensor], Tensor]:
    """The gradients of rank 1 overflow in the fourth pass, in which an average is on its way, and in the seventh."""
    invariants.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    gate = Scripted(SCRIPTS["mixed"], grad_scaler=scaler)
    model = make_model()
    schedule = FifoDelayed(merged=3)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), gate=gate, schedule=schedule)
    scales, after = [], []
    for step in range(11):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        bad = step in (3, 6) and xo.rank() == 1
        scaler.scale(nn.functional.mse_loss(model(features), targets) * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(float(scaler.get_scale()))
        if step not in (3, 6):
            after.append(flat(model).clone())
    optimizer.flush()
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()
    return scales, after, flat(model)


def test_all_ranks_skip_while_an_average_travels() -> None:
    taken = [0, 1, 2, 4, 5, 7, 8, 9, 10]
    wanted = late_by_hand(make_model, sgd, SCRIPTS["mixed"], 9, 2, under=3, batches=taken)
    for rank, (scales, after, flushed) in enumerate(run_ranks(scaled, 2, env=ENV)):
        assert scales == [256.0] * 3 + [128.0] * 3 + [64.0] * 5
        require_as_expected(wanted, rank, after, flushed)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def make_job(seed: int = 0, selsync: bool = False) -> tuple[invariants.Job, xo.selsync.Gate]:
    model = make_model(seed)
    gate: xo.selsync.Gate = Scripted(SCRIPTS["while one travels"])
    if selsync:  # whose opinions are tensors
        gate = xo.selsync.SelSync(0.05, factor=0.5, warmup_steps=3)
    return invariants.Job(model, adam(model), gate=gate, schedule=FifoDelayed(merged=3)), gate


def saved_and_resumed(folder: Path, after: int, selsync: bool = False) -> None:
    """Saved after so many steps: bit for bit on with every rank's own state, by rule with that of rank 0."""
    invariants.start()
    job, _ = make_job(0, selsync)
    train(job.model, job.optimizer, range(after))
    mark = invariants._log.mark
    state = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    assert invariants._log.mark == mark, "state_dict() starts no collective"
    torch.save(state, folder / f"{after}.{xo.rank()}.pt")
    train(job.model, job.optimizer, range(after, STEPS))
    unbroken = flat(job.model).clone()

    job.model.load_state_dict(state[0])
    job.optimizer.load_state_dict(copy.deepcopy(state[1]))
    train(job.model, job.optimizer, range(after, STEPS))
    assert torch.equal(flat(job.model), unbroken), "rolled back in a job that is training"
    job.check(steps=2 * STEPS - after)

    job, gate = make_job(5, selsync)
    weights, saved = torch.load(folder / f"{after}.{xo.rank()}.pt", weights_only=True)
    job.model.load_state_dict(weights)
    job.optimizer.load_state_dict(saved)
    assert job.optimizer.state_dict()["crossover"]["late"]["share"] == saved["crossover"]["late"]["share"]
    train(job.model, job.optimizer, range(after, STEPS))
    assert torch.equal(flat(job.model), unbroken), "every rank's state"
    assert gate.steps == STEPS
    assert synchronizer_of(job).late.dropped == 0
    job.check(steps=STEPS - after)

    job, gate = make_job(5 + xo.rank(), selsync)
    if xo.rank() == 0:
        job.model.load_state_dict(weights)
        job.optimizer.load_state_dict(saved)
    xo.broadcast_parameters(job.model.state_dict(), root_rank=0)
    xo.broadcast_optimizer_state(job.optimizer, root_rank=0)
    train(job.model, job.optimizer, range(after, STEPS))
    travelled = saved["crossover"]["late"]["share"] is not None
    assert synchronizer_of(job).late.dropped == int(travelled)
    assert gate.steps == STEPS
    assert not torch.equal(flat(job.model), unbroken)
    job.check(steps=STEPS - after)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_resumed_job_goes_on(tmp_path: Path, launcher: str) -> None:
    """Saved while an average travels and a wish to share is kept back; and while nothing travels."""
    calls = [(tmp_path, 5), (tmp_path, 10), (tmp_path, 7, True)]
    run_ranks(several, 2, saved_and_resumed, calls, launcher=launcher, env=ENV)


# -- ranks that do not do the same -------------------------------------------------------------------------------------


def uneven(way: str) -> None:
    """Rank 1 runs out of data while an average travels, and in the other epoch while none does."""
    log = invariants.start()
    job, gate = make_job()
    for epoch in range(2):
        for_all = Join([job.optimizer]) if way == "Join" else None
        if for_all is not None:
            with for_all:
                train(job.model, job.optimizer, range(9 - epoch if xo.rank() == 0 else 4))
        else:
            train(job.model, job.optimizer, range(9 - epoch if xo.rank() == 0 else 4))
            assert xo.join() == 0
        invariants.require_same("parameters", invariants.digests(job.model))
        invariants.require_same("counters", (gate.steps, gate.local_steps, gate.apart, gate.since_shared))
        assert synchronizer_of(job).late.share is None
    assert not log.open
    invariants.require_same_collectives()


def test_uneven_inputs() -> None:
    run_ranks(several, 2, uneven, [("Join",), ("join()",)], env=ENV)


def different(what: str) -> str:
    xo.init()
    model = make_model()
    schedule = FifoDelayed(merged=2 + xo.rank() if what == "schedule" else 4)
    gate = Scripted(SCRIPTS["always"])
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), gate=gate, schedule=schedule)
    for step in range(12):
        if what == "flush" and step == 4 and xo.rank() == 1:
            optimizer.flush()
        if what == "skipped step" and step == 4 and xo.rank() == 1:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch(1, step)[0]), batch(1, step)[1]).backward()
            continue
        train(model, optimizer, range(step, step + 1))
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("schedule", "schedule: steps is 3 on rank 1 and 2 on rank 0"),
        ("flush", "flush(): rank 1 called it"),
        ("skipped step", "step(): rank 1 did not call it"),
    ],
)
def test_a_rank_that_does_otherwise_is_named(what: str, message: str) -> None:
    for outcome in run_ranks(different, 2, what, env=ENV, expect_failure=True):
        assert outcome.error == "RankMismatchError", outcome.describe()
        assert message in outcome.message
