"""Situation 41: metrics and checkpoints depend on the rank that made them.

Between two averages each rank holds a model of its own. ``optimizer.flushed()`` brings them together, once and on all
ranks; a state that is taken without it says so; and what averages parameters or gradients itself is refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import crossover as xo
from tests.cases import invariants
from tests.cases.gates import MODES
from tests.harness import run_ranks
from tests.selsync.local_steps import Scripted, by_hand, several, train
from tests.training import batch, flat, make_model, sgd

STEPS = 10


def evaluated(mode: str) -> tuple[Tensor, Tensor, list[str]]:
    log = invariants.start()
    model = make_model()
    job = invariants.Job(model, sgd(model), gate=Scripted(MODES[mode]))
    train(model, job.optimizer, range(STEPS))
    own = flat(model)
    with invariants.warnings_of_the_library() as warnings:
        job.optimizer.state_dict()
        with job.optimizer.flushed():
            outputs = model(batch(0, 99)[0]).detach()
            invariants.require_same("outputs", outputs.tolist())
            job.optimizer.state_dict()
            mark = log.mark
            job.optimizer.flush()
            assert [entry.name.rpartition(".")[2] for entry in log.collectives[mark:]] == ["vote"]
    flushed = flat(model)
    job.check(steps=STEPS)
    return own, flushed, warnings


def test_all_ranks_evaluate_and_save_one_model() -> None:
    results = run_ranks(several, 2, evaluated, [(mode,) for mode in MODES])
    for (mode, script), *ranks in zip(MODES.items(), *results, strict=True):
        expected = by_hand(sgd, [bool(script[step % len(script)]) for step in range(STEPS)])
        for rank, (own, flushed, warnings) in enumerate(ranks):
            assert torch.equal(own, expected[rank]), mode
            assert torch.equal(flushed, (expected[0] + expected[1]) / 2), mode
            told = mode != "gate-open" and rank == 0
            assert ["flushed()" in warning for warning in warnings] == [True] * told


def inside_ddp() -> str:
    xo.init()
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), gate="selsync")
    with pytest.raises(ValueError, match="DistributedDataParallel") as caught:
        wrapped(batch(0, 0)[0]).sum().backward()
    del optimizer
    return str(caught.value)


def test_what_averages_by_itself_is_refused() -> None:
    first, second = run_ranks(inside_ddp)
    assert first == second
