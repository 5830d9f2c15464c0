"""Averages of parameters in fewer bits: near those of all bits, the same on every rank, and half the bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import crossover as xo
from crossover import telemetry
from crossover.comm import Solo
from crossover.reduction import Reduction, scaling_for
from crossover.schedulers import FifoDelayed
from crossover.selsync.narrow import wire_bytes
from tests.cases import invariants
from tests.harness import run_ranks
from tests.selsync.late_steps import late_by_hand
from tests.selsync.local_steps import Scripted, by_hand, several, train
from tests.training import flat, make_model, sgd

ENV = {"CROSSOVER_TIMEOUT": "15"}
STEPS = 12
SCRIPT = [[], [1], [], [0, 1]]
SHARED = [bool(SCRIPT[step % 4]) for step in range(STEPS)]
SIZES = [(2, "torch"), (3, "torch"), pytest.param(2, "horovod", marks=pytest.mark.horovod)]


class ToSingle:
    """Double precision travels as single precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


COMPRESSIONS: dict[str, Any] = {"single": ToSingle, "fp16": xo.Compression.fp16, "none": xo.Compression.none}


def job(compression: str, under: int = 0, script: list[list[int]] = SCRIPT) -> invariants.Job:
    model, schedule = make_model(), FifoDelayed(merged=under) if under else None
    options = {"gate": Scripted(script), "schedule": schedule, "compression": COMPRESSIONS[compression]}
    return invariants.Job(model, sgd(model), **options)


def trained(compression: str, under: int) -> Tensor:
    invariants.start()
    mine = job(compression, under)
    train(mine.model, mine.optimizer, range(STEPS))
    mine.optimizer.flush()
    invariants.require_same("parameters", invariants.digests(mine.model))
    mine.check(steps=STEPS)
    return flat(mine.model)


def worked_out(under: int, size: int) -> Tensor:
    if under:
        return late_by_hand(make_model, sgd, SCRIPT, STEPS, size, under=under).flushed
    return by_hand(sgd, SHARED, size)[0]


@pytest.mark.parametrize(("size", "launcher"), SIZES)
def test_parameters_are_near_those_of_all_bits(size: int, launcher: str) -> None:
    cases = [(compression, under) for under in (0, 2) for compression in ("none", "single", "fp16")]
    ranks = run_ranks(several, size, trained, cases, launcher=launcher, env=ENV)
    for number, (compression, under) in enumerate(cases):
        found, wanted = ranks[0][number], worked_out(under, size)
        gap = float((found - wanted).abs().max())
        assert (wanted.half().double() - wanted).abs().max() > 1e-4, "parameters themselves in half precision"
        assert gap < {"none": 1e-12, "single": 1e-8, "fp16": 5e-5}[compression], f"{compression}, {under}: {gap}"
        assert compression == "none" or gap > 0, "nothing was compressed"
        assert all(torch.equal(results[number], found) for results in ranks)


def slow(compression: str) -> Tensor:
    """So small are the steps, about 1e-8, that half precision has no numbers for them as they are."""
    xo.init()
    model = make_model()
    before = flat(model).clone()
    optimizer: Any = xo.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=2e-7),
        model.named_parameters(),
        gate=Scripted([[0]]),
        compression=COMPRESSIONS[compression],
    )
    train(model, optimizer, range(6))
    return flat(model) - before


def test_small_steps_are_not_rounded_away() -> None:
    [whole, narrow], _ = run_ranks(several, 2, slow, [("none",), ("fp16",)], env=ENV)
    assert 1e-9 < float(whole.abs().max()) < 1e-6
    assert float((narrow - whole).norm() / whole.norm()) < 0.05


def set_back(under: int) -> None:
    """Rank 1 diverges, all ranks learn of it, and go on from where they were: from parameters alone, or from all."""
    xo.init()
    mine = job("fp16", under, [[0]])
    train(mine.model, mine.optimizer, range(3))
    mine.optimizer.flush()
    weights, state = copy.deepcopy((mine.model.state_dict(), mine.optimizer.state_dict()))
    for whole in (False, True):
        if xo.rank() == 1:
            nn.init.constant_(mine.model[0].weight, float("nan") if whole else 1e30)
        train(mine.model, mine.optimizer, range(4))
        mine.optimizer.flush()
        assert not flat(mine.model).isfinite().all()
        mine.model.load_state_dict(weights)
        if whole:
            mine.optimizer.load_state_dict(copy.deepcopy(state))
        else:
            mine.optimizer.state.clear()
        train(mine.model, mine.optimizer, range(4))
        mine.optimizer.flush()
        assert flat(mine.model).isfinite().all(), f"set back, whole: {whole}"
        invariants.require_same("parameters", invariants.digests(mine.model))


def test_a_training_that_diverged_can_be_set_back() -> None:
    run_ranks(several, 2, set_back, [(0,), (2,)], env=ENV)


# -- what travels ------------------------------------------------------------------------------------------------------


def sent(compression: str, under: int) -> list[int]:
    xo.init()
    recorder = telemetry.start()
    mine = job(compression, under, [[0]])
    train(mine.model, mine.optimizer, range(4))
    telemetry.stop()
    mine.optimizer.flush()
    return [record.bytes_sent for record in recorder]


def test_bytes_after_the_first_average() -> None:
    cases = [("none", 0), ("fp16", 0), ("none", 1), ("fp16", 1)]
    payload = sum(parameter.numel() for parameter in make_model().parameters())
    [whole, narrow, late, narrow_late], _ = run_ranks(several, 2, sent, cases, env=ENV)
    assert whole[0] == narrow[0], "the first average travels as it is"
    assert whole[2] - narrow[2] == late[3] - narrow_late[3] == 6 * payload, "2 bytes instead of 8"


def sent_after_loading(under: int) -> list[int]:
    """Bytes of each step; the optimizer's own state is loaded before the last but one."""
    xo.init()
    recorder = telemetry.start()
    mine = job("fp16", under, [[0]])
    train(mine.model, mine.optimizer, range(4))
    mine.optimizer.flush()
    mine.optimizer.load_state_dict(copy.deepcopy(mine.optimizer.state_dict()))
    train(mine.model, mine.optimizer, range(4, 7))
    telemetry.stop()
    mine.optimizer.flush()
    return [record.bytes_sent for record in recorder]


def test_the_first_average_after_loading_travels_as_it_is() -> None:
    payload = sum(parameter.numel() for parameter in make_model().parameters())
    for steps in run_ranks(sent_after_loading, 2, 0, env=ENV):
        assert [sent > 8 * payload for sent in steps] == [True, False, False, False, True, False, False]


def test_sizes_on_the_way() -> None:
    tensors = [torch.zeros(5), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.complex64)]
    whole, half = (Reduction(Solo(), scaling_for(True, 1, 1.0), kind) for kind in (None, xo.Compression.fp16))
    assert wire_bytes(tensors, whole, widened=True) == 4 * (5 + 3 + 4), "half precision is added up in float32"
    assert wire_bytes(tensors, whole, widened=False) == 4 * (5 + 4) + 2 * 3
    assert wire_bytes(tensors, half, widened=True) == 2 * (5 + 3 + 4)


# -- dtypes, ranks without data, checkpoints ---------------------------------------------------------------------------


def half_precision() -> list[Tensor]:
    xo.init()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3).bfloat16())
    optimizer: Any = xo.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), gate=Scripted([[0]]), compression=xo.Compression.fp16
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + xo.rank())
        model[1](model[0](torch.randn(4, 7, generator=generator)).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_weights_in_half_precision() -> None:
    first, second = run_ranks(half_precision, 2, env=ENV)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.isfinite(tensor).all() for tensor in first)


def uneven(under: int) -> None:
    """Rank 1 runs out of data: the average is of the others."""
    log = invariants.start()
    mine = job("fp16", under, [[0]])
    for _ in range(2):
        with Join([mine.optimizer]):
            train(mine.model, mine.optimizer, range(8 if xo.rank() == 0 else 3))
        invariants.require_same("parameters", invariants.digests(mine.model))
    assert not log.open
    invariants.require_same_collectives()


def test_uneven_inputs() -> None:
    run_ranks(several, 2, uneven, [(0,), (2,)], env=ENV)


def resumed(under: int) -> None:
    invariants.start()
    mine = job("fp16", under)
    train(mine.model, mine.optimizer, range(7))
    saved = copy.deepcopy((mine.model.state_dict(), mine.optimizer.state_dict()))
    train(mine.model, mine.optimizer, range(7, STEPS))
    mine.optimizer.flush()

    other = job("fp16", under)
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    train(other.model, other.optimizer, range(7, STEPS))
    other.optimizer.flush()
    invariants.require_same("parameters", invariants.digests(other.model))
    assert (flat(mine.model) - flat(other.model)).abs().max() < 5e-5


def test_a_resumed_job_goes_on_near_where_it_was() -> None:
    run_ranks(several, 2, resumed, [(0,), (2,)], env=ENV)
