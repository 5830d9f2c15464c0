"""Who decides, what is sent, and what becomes of buffers, state, flushes and new parameters under local steps."""

from __future__ import annotations

import copy
import gc
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover import telemetry
from tests.cases import invariants
from tests.harness import run_ranks
from tests.selsync.local_steps import Scripted, backward, by_hand, several, train
from tests.training import adam, flat, make_model, sgd

ENV = {"CROSSOVER_TIMEOUT": "8"}
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def job(gate: Any, build: Any = sgd, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    return model, xo.DistributedOptimizer(build(model), model.named_parameters(), gate=gate, **options)


def votes(log: invariants.Log, optimizer: Any, mark: int = 0) -> int:
    return sum(entry.name.endswith(".vote") for entry in log.since(mark, optimizer))


def averages(log: invariants.Log, optimizer: Any, mark: int = 0) -> int:
    return sum("average" in entry.name for entry in log.since(mark, optimizer))


# -- who decides -----------------------------------------------------------------------------------------------------


def shared_steps(script: list[list[int]], options: dict[str, Any], rates: list[float] | None = None) -> list[bool]:
    model, optimizer = job(gate := Scripted(script, **options))
    shared = []
    for step in range(len(script)):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        train(model, optimizer, range(step, step + 1))
        shared.append(gate.since_shared == 0)
    assert gate.lssr == shared.count(False) / len(shared)
    return shared


def rules() -> dict[str, list[bool]]:
    xo.init()
    one, two = [[0], [1], [], [2]], [[0], [0, 2], [0, 1, 2], []]
    return {
        "any": shared_steps(one, {}),
        "half": shared_steps(two, {"quorum": 0.5}),
        "all": shared_steps(two, {"quorum": 1.0}),
        "at most 2": shared_steps([[], [], [], [0], [], [], []], {"max_local_steps": 2}),
        "drop": shared_steps([[]] * 5, {"lr_drop": 0.7}, [0.1, 0.09, 0.05, 0.05, 0.005]),
    }


def test_rules() -> None:
    for found in run_ranks(rules, 3):
        assert found == {
            "any": [True, True, False, True],
            "half": [False, True, True, False],
            "all": [False, False, True, False],
            "at most 2": [False, False, True, True, False, False, True],
            "drop": [False, False, True, False, True],
        }


def traffic() -> None:
    """Votes are cast where the answer is open; nothing else travels with local steps."""
    log = invariants.start()
    for gate, steps, cast, averaged in (
        (xo.selsync.Periodic(4), 12, 1 + 3 + 3, 3),  # the first step's, and two for each that is shared
        (xo.selsync.SelSync(math.inf, warmup_steps=3), 12, 3 + 2, 2),
        (Scripted([[], [0]]), 12, 12 + 6, 6),
        (xo.selsync.SelSync(0), 5, 5 + 5, 5),
    ):
        model, optimizer = job(gate)
        train(model, optimizer, range(steps))
        name = type(gate).__name__
        assert votes(log, optimizer) == cast, name
        assert averages(log, optimizer) == averaged, name
        assert all(entry.shape == (14,) for entry in log.since(0, optimizer) if entry.name.endswith("vote"))
        mark = log.mark
        optimizer.flush()
        assert averages(log, optimizer, mark) == (name == "SelSync" and gate.delta > 0), name
        optimizer.flush()
        assert votes(log, optimizer, mark) == 2
    invariants.require_same_collectives()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_travels(launcher: str) -> None:
    run_ranks(traffic, 2, launcher=launcher, env=ENV)


# -- what else is averaged -------------------------------------------------------------------------------------------


def buffers_and_types() -> None:
    invariants.start()
    torch.manual_seed(5)
    model = nn.ModuleList([nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16()])
    model.extra = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    model.empty = nn.Parameter(torch.zeros(0))
    model.channels = nn.Parameter(torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    model.register_buffer("flag", torch.tensor([False, False]))
    gate = Scripted([[], [0]], buffers=model)
    optimizer = xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), gate=gate)
    for step in range(2):
        optimizer.zero_grad()
        for _ in range(1 + xo.rank()):
            out = model[2](model[1](model[0](torch.randn(8, 3) + xo.rank())).bfloat16()).float().sum()
        (
            out + (model.extra.abs() * xo.rank()).sum() + model.extra.real.sum() + model.channels.sum() * xo.rank()
        ).backward()
        if step == 0:
            model.flag[xo.rank()] = True
        own = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()
    stepped = invariants.everywhere(own)
    invariants.require_same("all of the model", invariants.digests(model))
    assert model.flag.tolist() == [True, True]
    assert int(model[1].num_batches_tracked) == 4
    mean = (stepped[0]["1.running_mean"] + stepped[1]["1.running_mean"]) / 2
    assert torch.allclose(model[1].running_mean, mean)
    assert model.channels.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.channels, torch.full((2, 3, 2, 2), -0.5))
    assert model[2].weight.dtype is torch.bfloat16


def test_buffers_and_every_kind_of_parameter() -> None:
    run_ranks(buffers_and_types, env=ENV)


def state_of_some() -> None:
    """Momentum that not all ranks have stays where it is; what all have is averaged."""
    invariants.start()
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    gate = Scripted([[0]], optimizer_state="average")
    optimizer = xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), gate=gate)
    loss = model[0](torch.ones(1, 2) * (1 + xo.rank())).sum()
    if xo.rank() == 1:
        loss = loss + model[1](torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    invariants.require_same("parameters", invariants.digests(model))
    assert optimizer.state[model[0].weight]["momentum_buffer"].tolist() == [[1.5, 1.5]]
    assert (model[1].weight in optimizer.state) == (xo.rank() == 1)


def test_state_that_not_all_ranks_have() -> None:
    run_ranks(state_of_some, env=ENV)


# -- ranks out of step -----------------------------------------------------------------------------------------------


def leaves_out_a_step(script: list[list[int]], average: str) -> tuple[int, str]:
    xo.init()
    model, optimizer = job(Scripted(script, average=average))
    for step in range(6):
        optimizer.zero_grad()
        try:
            backward(model, xo.rank(), step)
            if step != 3 or xo.rank() == 0:
                optimizer.step()
        except xo.RankMismatchError as error:
            return step, str(error)
    return 6, ""


def test_a_step_left_out_by_one_rank_is_told_on_every_rank() -> None:
    calls = [(script, average) for script in ([[]], [[0]]) for average in ("parameters", "gradients")]
    results = run_ranks(several, 2, leaves_out_a_step, calls, env=ENV)
    for call, (first, message), (second, other) in zip(calls, *results, strict=True):
        assert message == other
        assert message.startswith("step(): rank 1 did not call it")
        assert second == 4
        assert first == (3 if call == ([[0]], "parameters") else 4)


def leaves_out_an_unvoted_step(gate: xo.selsync.Gate) -> str:
    xo.init()
    model, optimizer = job(gate)
    for step in range(12):
        assert step != 3 or not gate.votes_now()
        try:
            backward(model, xo.rank(), step)
            if xo.rank() != 1 or step != 3:
                optimizer.step()
        except xo.RankMismatchError as error:
            return str(error)
        optimizer.zero_grad()
    return "nothing"


@pytest.mark.parametrize(
    "gate", [xo.selsync.SelSync(0.0, warmup_steps=2, every=4), xo.selsync.Periodic(4, warmup_steps=2)]
)
def test_a_step_left_out_where_there_was_no_vote_is_told_in_the_next(gate: xo.selsync.Gate) -> None:
    for told in run_ranks(leaves_out_an_unvoted_step, 2, gate, env=ENV):
        assert told.startswith("step(): rank 1 did not call it")


def joins_with_two(lead: int) -> tuple[list[Tensor], list[int]]:
    """Two optimizers whose votes fall into different passes; rank 0 trains on, joins, and trains again."""
    xo.init()
    gates = [xo.selsync.SelSync(0.3, warmup_steps=2, every=4) for _ in range(2)]
    (first, first_optimizer), (second, second_optimizer) = (job(gate) for gate in gates)
    train(first, first_optimizer, range(lead))
    for epoch in range(2):
        for step in range(9 if xo.rank() == epoch else 6):
            train(first, first_optimizer, range(step, step + 1))
            train(second, second_optimizer, range(step, step + 1))
        assert xo.join() == epoch
    return [flat(first), flat(second)], [gate.steps for gate in gates]


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_join_ends_where_votes_are_seldom(lead: int) -> None:
    (first, counts), (second, others) = run_ranks(joins_with_two, 2, lead, env=ENV)
    assert counts == others
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def flushes_alone(leaves: bool) -> str:
    xo.init()
    model, optimizer = job(Scripted([[]]))
    train(model, optimizer, range(3))
    if leaves and xo.rank() == 1:
        with invariants.warnings_of_the_library() as warnings:
            xo.shutdown()
        return warnings[0].removeprefix("what was in flight at shutdown is lost: ")
    call = optimizer.flush if xo.rank() == 1 else partial(train, model, optimizer, range(3, 6))
    with pytest.raises(xo.RankMismatchError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_flush_of_one_rank_is_told_on_every_rank(leaves: bool) -> None:
    first, second = run_ranks(flushes_alone, 2, leaves, env=ENV)
    assert first == second
    assert first.startswith("flush(): rank 1 called it, or left the job")


# -- parameters that come --------------------------------------------------------------------------------------------


def unequal() -> str:
    xo.init()
    model = make_model(seed=xo.rank())
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), gate="selsync")
    with pytest.raises(xo.RankMismatchError) as caught:
        train(model, optimizer, range(1))
    return str(caught.value)


def test_unequal_weights_are_told_before_the_first_step() -> None:
    first, second = run_ranks(unequal, env=ENV)
    assert first == second
    assert "'0.weight'" in first
    assert "broadcast_parameters" in first


def grows(average: str, where: str) -> str:
    invariants.start()
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]).double()
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    model[1].requires_grad_(False)
    gate = Scripted([[], [], [0]], average=average)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), gate=gate)

    def step(number: int) -> None:
        features = torch.full((1, 2), 1.0 + xo.rank() + number, dtype=torch.float64)
        layers = [layer for layer in model if layer.weight.requires_grad]
        sum(layer(features).square().sum() for layer in layers).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(number)
    if where == "with other values" and xo.rank() == 1:
        model[1].weight.data.add_(1)
    if where != "on rank 1" or xo.rank() == 1:
        model[1].requires_grad_(True)
    try:
        for number in range(2, 6):
            step(number)
    except xo.RankMismatchError as error:
        return str(error)
    optimizer.flush()
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()
    return ""


def test_parameters_that_come_later() -> None:
    texts = {"everywhere": "", "on rank 1": "1.weight", "with other values": "'1.weight'"}
    calls = [(average, where) for average in ("parameters", "gradients") for where in texts]
    for (_, where), first, second in zip(calls, *run_ranks(several, 2, grows, calls, env=ENV), strict=True):
        assert first == second
        assert (texts[where] in first) if texts[where] else not first


# -- saving ----------------------------------------------------------------------------------------------------------

SCRIPT = [[], [1], [], [], []]


def selsync() -> xo.selsync.SelSync:
    return xo.selsync.SelSync(0.05, factor=0.5, warmup_steps=3)


def saved_by_all(path: Path) -> tuple[Tensor, dict[str, Any], list[str]]:
    """Eight steps, saved on every rank after the fifth, and the gate's state at the end."""
    xo.init()
    with invariants.warnings_of_the_library() as warnings:
        model, optimizer = job(gate := selsync(), adam)
        train(model, optimizer, range(12))
        while not gate.apart:
            train(model, optimizer, range(gate.steps, gate.steps + 1))
        state = optimizer.state_dict()
        torch.save([model.state_dict(), state, gate.steps], path / f"rank{xo.rank()}.pt")
        optimizer.state_dict()
        train(model, optimizer, range(gate.steps, 20))
    bare = adam(make_model())
    bare.load_state_dict(copy.deepcopy(state))
    invariants.require_equal_state(bare.state_dict(), state)
    return flat(model), gate.state_dict(), warnings


def resumed_by_all(path: Path) -> tuple[Tensor, dict[str, Any], list[str]]:
    xo.init()
    with invariants.warnings_of_the_library() as warnings:
        model, optimizer = job(gate := selsync(), adam)
        weights, state, steps = torch.load(path / f"rank{xo.rank()}.pt")
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(steps, 20))
    return flat(model), gate.state_dict(), warnings


def test_every_ranks_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    unbroken, resumed = (run_ranks(half, 2, tmp_path, env=ENV) for half in (saved_by_all, resumed_by_all))
    for (before, counters, _), (after, others, warnings) in zip(unbroken, resumed, strict=True):
        assert torch.equal(before, after)
        assert counters == others
        assert warnings == []
    assert ["flushed()" in warning for warning in unbroken[0][2]] == [True]
    assert unbroken[1][2] == []


def resumed_from_rank_0() -> tuple[list[int], Tensor, dict[str, Any]]:
    """A flushed checkpoint of rank 0, in new objects of which rank 0 alone loads it."""
    invariants.start()
    model, optimizer = job(gate := xo.selsync.Periodic(4))
    train(model, optimizer, range(6))
    with optimizer.flushed():
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    invariants.require_same("state", saved[1]["crossover"])
    assert not saved[1]["crossover"]["gate"]["apart"]
    model, optimizer = job(gate := xo.selsync.Periodic(4))
    if xo.rank() == 0:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    shared = []
    for step in range(6, 12):
        train(model, optimizer, range(step, step + 1))
        shared += [step] * (gate.since_shared == 0)
    assert gate.steps == 12
    # and in the midst of training, on every rank
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(6, 8))
    assert gate.steps == 8
    assert gate.since_shared == 0
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()
    invariants.require_same("counters", gate.steps)
    return shared, flat(model), saved[1]


def test_rank_0s_state_alone_goes_on_by_rule() -> None:
    for shared, _, _ in run_ranks(resumed_from_rank_0, env=ENV):
        assert shared == [7, 11]


def loads_alone() -> str:
    xo.init()
    model, optimizer = job(Scripted([[]]))
    train(model, optimizer, range(3))
    if xo.rank() == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(xo.RankMismatchError) as caught:
        train(model, optimizer, range(3, 5))
    return str(caught.value)


def test_a_state_loaded_by_one_rank_in_the_midst_of_training_is_told() -> None:
    first, second = run_ranks(loads_alone, env=ENV)
    assert first == second
    assert first.startswith("load_state_dict(): rank 1 loaded a state")


def plain_state() -> list[str]:
    xo.init()
    model, optimizer = job(gate := xo.selsync.Periodic(2))
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    del state["crossover"]
    with invariants.warnings_of_the_library() as warnings:
        for _ in range(2):
            optimizer.load_state_dict(state)
    assert gate.steps == 3
    return warnings


def test_a_plain_state_is_taken_with_one_warning() -> None:
    [warning], none = run_ranks(plain_state, env=ENV)
    assert '"crossover"' in warning
    assert none == []


# -- records and new jobs --------------------------------------------------------------------------------------------


def recorded() -> list[telemetry.StepRecord]:
    xo.init()
    recorder = telemetry.start()
    model, optimizer = job(xo.selsync.SelSync(0.0001, factor=0.5, warmup_steps=2, lr_drop=None))
    train(model, optimizer, range(3))
    del model, optimizer
    gc.collect()
    model, optimizer = job(Scripted([[], [1]]))
    train(model, optimizer, range(2))
    return list(recorder)


def test_records_tell_what_was_decided_and_why() -> None:
    ranks = run_ranks(recorded, env=ENV)
    for rank, records in enumerate(ranks):
        first, second, third, local, shared = records
        assert "significance" not in first.extra
        assert second.extra["significance"] > 0
        assert (second.extra["votes"], second.extra["voters"], second.extra["vote"]) == (2, "0,1", True)
        assert third.synchronised
        assert third.extra["drift"] > 0
        assert "shared: 2 voted" in first.reason
        payload = sum(p.numel() * p.element_size() for p in make_model().parameters())
        assert (local.synchronised, local.extra["bytes_saved"], local.collectives) == (False, payload, 1)
        assert local.extra["lssr"] == 1.0
        assert "drift" not in local.extra
        assert (shared.extra["voters"], shared.extra["vote"], shared.extra["lssr"]) == ("1", rank == 1, 0.5)
        assert (shared.extra["bytes_saved"], shared.collectives) == (0, 3)
        assert shared.bytes_sent > payload
    # the average is as far from one of two ranks as from the other
    assert math.isclose(ranks[0][4].extra["drift"], ranks[1][4].extra["drift"], rel_tol=1e-9)


def goes_on() -> tuple[Tensor, Tensor]:
    xo.init()
    model, optimizer = job(gate := Scripted([[], [], [0]]))
    train(model, optimizer, range(4))
    optimizer.reattach()  # as it is: ranks are apart
    train(model, optimizer, range(4, 5))
    assert gate.apart
    optimizer.flush()
    together = flat(model)
    xo.shutdown()
    xo.init(backend="solo")
    optimizer.reattach()
    train(model, optimizer, range(5, 6))
    assert gate.steps == 5
    return together, flat(model)


def test_the_gate_goes_on_in_a_new_job() -> None:
    (first, first_alone), (second, _) = run_ranks(goes_on, env=ENV)
    assert torch.equal(first, second)
    expected = by_hand(sgd, [False, False, True, False, False])
    assert torch.equal(first, (expected[0] + expected[1]) / 2)
    assert not torch.equal(first, first_alone)
