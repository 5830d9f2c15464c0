"""Bad input ends in an error that names it, on every rank, within the time-out and with an exit code that is not
zero.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from tests.harness import Outcome, run_ranks
from tests.training import batch, make_model, sgd

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
TIMEOUT_S = 5.0
ENV = {"CROSSOVER_TIMEOUT": str(TIMEOUT_S)}


def wrap(model: nn.Module, **options: Any) -> Any:
    options.setdefault("named_parameters", model.named_parameters())
    return xo.DistributedOptimizer(sgd(model), **options)


def backward(model: nn.Module, step: int = 0) -> None:
    features, targets = batch(xo.rank(), step)
    nn.functional.mse_loss(model(features), targets).backward()


# -- wrong on every rank: refused at the call, by the name of the argument -------------------------------------------

WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "no optimizer": (lambda m: xo.DistributedOptimizer(m), "optimizer: is a Sequential"),
    "a scheduler": (
        lambda m: xo.DistributedOptimizer(torch.optim.lr_scheduler.StepLR(sgd(m), 1)),
        "optimizer: is a StepLR",
    ),
    "wrapped twice": (lambda m: xo.DistributedOptimizer(wrap(m)), "wrapped already"),
    "lbfgs": (lambda m: xo.DistributedOptimizer(torch.optim.LBFGS(m.parameters())), "LBFGS"),
    "names of another model": (lambda m: wrap(m, named_parameters=make_model(1).named_parameters()), "have no name"),
    "some names missing": (lambda m: wrap(m, named_parameters=list(m.named_parameters())[1:]), r"1 of the .* no name"),
    "one name for two": (
        lambda m: wrap(m, named_parameters=[("weight", parameter) for parameter in m.parameters()]),
        "'weight' names two parameters",
    ),
    "names without parameters": (lambda m: wrap(m, named_parameters=["0.weight"]), "pair"),
    "parameters without names": (lambda m: wrap(m, named_parameters=m.parameters()), "pair"),
    "numbers for parameters": (lambda m: wrap(m, named_parameters=[("0.weight", 1.0)]), "'0.weight' is a float"),
    "a generator walked before": (lambda m: wrap(m, named_parameters=iter(())), "is empty"),
    "unknown op": (lambda m: wrap(m, op=xo.Max), "op: is"),
    "op by name": (lambda m: wrap(m, op="average"), "op: is 'average'"),
    "no passes": (lambda m: wrap(m, backward_passes_per_step=0), "backward_passes_per_step: is 0"),
    "half a pass": (lambda m: wrap(m, backward_passes_per_step=1.5), "backward_passes_per_step: is 1.5"),
    "predivide by nothing": (lambda m: wrap(m, gradient_predivide_factor=0.0), "gradient_predivide_factor: is 0.0"),
    "predivide a sum": (lambda m: wrap(m, op=xo.Sum, gradient_predivide_factor=2.0), "gradient_predivide_factor"),
    "compression by a wrong name": (lambda m: wrap(m, compression="int8"), "compression: is 'int8'"),
    "no compression": (lambda m: wrap(m, compression=16), "compression: is 16"),
    "negative groups": (lambda m: wrap(m, groups=-1), "groups: is -1"),
    "groups of strangers": (lambda m: wrap(m, groups=[[torch.zeros(1)]]), "no trainable parameters"),
    "a parameter in two groups": (lambda m: wrap(m, groups=[[m[0].weight], [m[0].weight]]), "two groups"),
    "no bucket size": (lambda m: wrap(m, bucket_cap_mb=0), "bucket_cap_mb: is 0"),
    "bucket size in words": (lambda m: wrap(m, first_bucket_cap_mb="1MB"), "first_bucket_cap_mb: is '1MB'"),
    "unknown schedule": (lambda m: wrap(m, schedule="fastest"), "schedule: is 'fastest'"),
    "a class of schedules": (lambda m: wrap(m, schedule=xo.schedulers.Priority), "schedule"),
    "no process group": (lambda m: wrap(m, process_group="everyone"), "process_group: is 'everyone'"),
    "no process set": (lambda m: wrap(m, process_set=[0, 1]), "process_set"),
    "unknown gate": (lambda m: wrap(m, gate="sometimes"), "gate: is 'sometimes'"),
    "a gate of no delta": (lambda m: wrap(m, gate="selsync:much"), "gate: is 'selsync:much'"),
    "a gate with Priority": (lambda m: wrap(m, gate="periodic:4", schedule="priority"), "Overlapped, DeFT or Fifo"),
    "a gate that averages late gradients": (
        lambda m: wrap(m, gate=xo.selsync.Periodic(4, average="gradients"), schedule="fifo_delayed"),
        "gate: averages gradients",
    ),
    "a gate that averages late state": (
        lambda m: wrap(m, gate=xo.selsync.Periodic(4, optimizer_state="average"), schedule="deft"),
        "gate: averages the optimizer's state",
    ),
    "a gate with sums": (lambda m: wrap(m, gate="periodic:4", op=xo.Sum), "op: is Sum"),
    "turns": (lambda m: wrap(m, sharing="turns"), "sharing"),
}


def all_wrong_calls() -> dict[str, str]:
    """Each is refused at once, without waiting for anybody; a right call works afterwards."""
    xo.init()
    messages = {}
    for name, (call, _) in WRONG.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared with the table, outside
            call(make_model())
        messages[name] = str(caught.value)
    model = make_model()
    optimizer = wrap(model)
    backward(model)
    optimizer.step()
    return messages


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_wrong_arguments_are_named(launcher: str) -> None:
    for messages in run_ranks(all_wrong_calls, launcher=launcher, env=ENV):
        for name, (_, pattern) in WRONG.items():
            assert re.search(pattern, messages[name]), f"{name}: {messages[name]}"


# -- different on one rank: told on every rank, in the same words ----------------------------------------------------


def mismatched(name: str) -> None:
    xo.init()
    odd = xo.rank() == 1
    model = make_model()
    if name == "shape":
        model[0] = nn.Linear(7, 41 if odd else 40).double()
    elif name == "dtype":
        model[2] = model[2].float() if odd else model[2]
    elif name == "missing parameter":
        model = make_model()[:4] if odd else model
    elif name == "frozen on one rank":
        model[4].requires_grad_(not odd)
    elif name == "order":
        names = list(model.named_parameters())
        parameters = [parameter for _, parameter in (reversed(names) if odd else names)]
        xo.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), names)
        return
    options: dict[str, Any] = {
        "accumulation": {"backward_passes_per_step": 2 if odd else 1},
        "op": {"op": xo.Sum if odd else xo.Average},
        "compression": {"compression": xo.Compression.fp16 if odd else xo.Compression.none},
        "schedule": {"schedule": "priority" if odd else "overlapped"},
        "bucket size": {"bucket_cap_mb": 1 if odd else 2},
        "groups": {"groups": 2 if odd else 3},
        "gate": {"gate": "selsync:0.3" if odd else None},
        "threshold": {"gate": "selsync:0.3" if odd else "selsync:0.5"},
    }.get(name, {})
    if name == "dtype of no backend":
        model.extra = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    wrap(model, **options)


MISMATCHES = {
    "shape": ("RankMismatchError", r"rank 0 has 0\.weight \(40, 7\).*rank 1 has 0\.weight \(41, 7\)"),
    "dtype": ("RankMismatchError", r"2\.weight .*float64.*2\.weight .*float32"),
    "missing parameter": ("RankMismatchError", r"4\.weight"),
    "frozen on one rank": ("RankMismatchError", r"4\.weight"),
    "order": ("RankMismatchError", r"0\.weight.*4\.bias"),
    "accumulation": ("RankMismatchError", r"backward_passes_per_step=1 .*backward_passes_per_step=2"),
    "op": ("RankMismatchError", r"op=Average .*op=Sum"),
    "compression": ("RankMismatchError", r"compression="),
    "schedule": ("RankMismatchError", r"schedule=Overlapped .*schedule=Priority"),
    "bucket size": ("RankMismatchError", r"buckets="),
    "groups": ("RankMismatchError", r"buckets="),
    "gate": ("RankMismatchError", r"gate=SelSync"),
    "threshold": ("RankMismatchError", r"delta=0.5 .*delta=0.3"),
    "dtype of no backend": ("ValueError", r"'extra'.*float8"),
}


def all_mismatches() -> dict[str, tuple[str, str]]:
    """Each raises on both ranks, without a hang, so that the next one can be tried in the same job."""
    found = {}
    for name in MISMATCHES:
        try:
            mismatched(name)
        except ValueError as error:
            found[name] = (type(error).__name__, str(error))
        else:
            found[name] = ("nothing", "")
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_differences_between_ranks_are_told_on_every_rank(launcher: str) -> None:
    first, second = run_ranks(all_mismatches, launcher=launcher, env=ENV)
    assert first == second
    for name, (kind, pattern) in MISMATCHES.items():
        assert first[name][0] == kind, f"{name}: {first[name]}"
        assert re.search(pattern, first[name][1]), f"{name}: {first[name][1]}"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_mismatch_ends_the_job_with_an_exit_code(launcher: str) -> None:
    for outcome in run_ranks(mismatched, 2, "shape", launcher=launcher, env=ENV, expect_failure=True, timeout=60):
        assert outcome.error == "RankMismatchError", outcome.describe()
        check_ended(outcome)


# -- one rank is wrong, dead or late ---------------------------------------------------------------------------------


def raises_on_rank_1(*_: Any) -> None:
    if xo.rank() == 1:
        raise ZeroDivisionError("on rank 1")


def one_fails(place: str) -> None:
    xo.init()
    odd = xo.rank() == 1
    model = make_model()
    if place == "a wrong argument on one rank":
        wrap(model, op=xo.Max if odd else xo.Average)
    if place == "no wrapping on one rank":
        optimizer: Any = sgd(model) if odd else wrap(model)
    else:
        optimizer = wrap(model)
    for step in range(5):
        if step == 3 and place == "killed" and odd:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and place == "raises in backward":
            model[2].weight.register_hook(raises_on_rank_1)
        if step == 3 and place == "one batch fewer" and odd:
            break
        if step == 3 and place == "hangs" and odd:
            time.sleep(TIMEOUT_S + 4)
        if step == 3 and place == "moved to another dtype":
            model.float() if odd else None
            features, targets = batch(xo.rank(), step)
            nn.functional.mse_loss(model(features.to(model[0].weight.dtype)), targets).backward()
            continue
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def check_ended(outcome: Outcome) -> None:
    assert outcome.exit_code not in (0, None), outcome.describe()


FAILURES = {
    "a wrong argument on one rank": ("ValueError", "op: is"),
    "no wrapping on one rank": (None, ""),
    "killed": (None, ""),
    "raises in backward": ("ZeroDivisionError", "on rank 1"),
    "one batch fewer": (None, ""),
    "moved to another dtype": ("ValueError", "parameter '"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("place", list(FAILURES))
def test_a_failure_on_one_rank_ends_the_others(place: str, launcher: str) -> None:
    survivor, odd = run_ranks(one_fails, 2, place, launcher=launcher, env=ENV, expect_failure=True, timeout=60)
    kind, text = FAILURES[place]
    assert odd.error == kind, odd.describe()
    assert text in odd.message
    if kind is not None:
        check_ended(odd)
    assert survivor.error == "CommunicationError", survivor.describe()
    assert "rank 1" in survivor.message
    assert "optimizer0" in survivor.message
    check_ended(survivor)


def test_a_rank_that_hangs_is_named() -> None:
    waiting, _ = run_ranks(one_fails, 2, "hangs", env=ENV, expect_failure=True, timeout=60)
    assert waiting.error == "CommunicationError", waiting.describe()
    assert "Absent: rank 1" in waiting.message
    assert "CROSSOVER_TIMEOUT" in waiting.message
    check_ended(waiting)


def not_initialised() -> list[str]:
    messages = []
    model = make_model()
    for call in (lambda: wrap(model), lambda: xo.rank(), lambda: xo.allreduce(torch.ones(1)), lambda: xo.join()):
        with pytest.raises(ValueError, match="not initialised") as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_use_before_init_is_named() -> None:
    [messages] = run_ranks(not_initialised, 1, launcher="none")
    assert all("crossover.init()" in message for message in messages)
