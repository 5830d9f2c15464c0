"""Situations 2 to 4 with a gate: ``GradScaler`` skips a step, of one rank's own accord, and the average due with it.

With local steps each rank looks at its own gradients, so an overflow on one rank is not one on the others. Where the
gate knows the scaler, the vote carries the overflow: all ranks skip the step, halve the scale together, and an average
that was due is taken in the next step. Where it does not, the ranks that stepped and the one that did not are told.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import crossover as xo
from tests.cases import invariants
from tests.harness import run_ranks
from tests.selsync.local_steps import Scripted, several
from tests.training import batch, make_model, sgd

ENV = {"CROSSOVER_TIMEOUT": "8"}
BAD_STEP = 3
STEPS = 7


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)


def scaled(
    script: list[list[int]], told: bool, bad_ranks: tuple[int, ...] = (1,), build: Any = sgd, parts: int = 1
) -> tuple[list[float], list[int], str]:
    """Scales after each step, the steps with an average, and the error, if any."""
    log = invariants.start()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    gate = Scripted(script, grad_scaler=scaler if told else None)
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(
        build(model), model.named_parameters(), gate=gate, backward_passes_per_step=parts
    )
    scales: list[float] = []
    averaged: list[int] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mark = log.mark
        try:
            for part in range(parts):
                features, targets = batch(xo.rank(), step, part)
                bad = step == BAD_STEP and part == 0 and xo.rank() in bad_ranks
                loss = nn.functional.mse_loss(model(features), targets) * (math.inf if bad else 1.0)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
        except xo.RankMismatchError as error:
            return scales, averaged, str(error)
        scaler.update()
        scales.append(float(scaler.get_scale()))
        averaged += [step] * any("average" in entry.name for entry in log.since(mark, optimizer))
    optimizer.flush()
    assert not log.open
    invariants.require_same("parameters", invariants.digests(model))
    invariants.require_same_collectives()
    assert all(math.isfinite(norm) for norm in gate.norms) == (xo.rank() not in bad_ranks)
    return scales, averaged, ""


SKIPPED: dict[str, tuple[tuple[Any, ...], list[int]]] = {
    "gate-shut": (([[]], True), []),
    "gate-shut, all ranks": (([[]], True, (0, 1)), []),
    "gate-open": (([[0]], True), [0, 1, 2, 4, 5, 6]),
    "gate-open, all ranks": (([[0]], True, (0, 1)), [0, 1, 2, 4, 5, 6]),
    "due in the skipped step": (([[], [], [], [0], [], [], []], True), [4]),
    # the skipped one is no step, so the script's next is the one after it
    "accumulation": (([[], [1]], True, (1,), sgd, 2), [1, 4, 6]),
    "an optimizer that skips inside": (([[0]], True, (1,), fused_adam), list(range(STEPS))),
}


def test_all_ranks_skip_and_the_average_is_made_up_for() -> None:
    for results in run_ranks(several, 2, scaled, [call for call, _ in SKIPPED.values()], env=ENV):
        for (name, (_, expected)), (scales, averaged, error) in zip(SKIPPED.items(), results, strict=True):
            assert not error, name
            assert scales == [256.0] * BAD_STEP + [128.0] * (STEPS - BAD_STEP), name
            assert averaged == expected, name


def test_a_scaler_that_the_gate_does_not_know_is_named() -> None:
    first, second = run_ranks(several, 2, scaled, [([[]], False), ([[0]], False)], env=ENV)
    for (_, _, message), (_, _, other) in zip(first, second, strict=True):
        assert message == other
        assert message.startswith("step(): rank 1 did not call it")
        assert "grad_scaler=scaler" in message


def scales_and_votes(script_scale: float) -> list[int]:
    """Half the scale is half the gradient, and must neither open nor close the gate."""
    xo.init()
    scaler = torch.amp.GradScaler("cpu", init_scale=script_scale, growth_interval=4)
    model = make_model()
    gate = xo.selsync.SelSync(0.1, factor=0.5, warmup_steps=2, lr_drop=None, grad_scaler=scaler)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), gate=gate)
    shared = []
    for step in range(20):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        scaler.scale(nn.functional.mse_loss(model(features), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
        shared += [step] * (gate.since_shared == 0)
    return shared


def test_the_scale_is_no_part_of_the_significance() -> None:
    for one, other in run_ranks(several, 2, scales_and_votes, [(1.0,), (4096.0,)], env=ENV):
        assert one == other
        assert 3 < len(one) < 20
