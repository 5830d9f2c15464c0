"""``schedule="auto"`` on real ranks: what it chooses, that plain is plain, and that it comes back."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import crossover as xo
from crossover.auto import Auto
from crossover.deft import Preserver
from crossover.optimizer import SCHEDULE_VARIABLE
from crossover.schedulers import Overlapped, schedule_of
from tests.auto.jobs import SLOW_LINK, listen, make_job, same_everywhere, train, weights
from tests.harness import run_ranks

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
PAUSE = 0.01  # a third of what an all-reduce takes on the slow link
ALLOWING = Preserver(tolerance=1.0, prior=math.inf)
DEFT = {"bucket_bytes": 100, "ramp_updates": 0}


def auto(**options: Any) -> Auto:
    settings: dict[str, Any] = {"warmup_steps": 12, "profile_steps": 5, "preserver": ALLOWING, **DEFT}
    return Auto(**{**settings, **options})


def chosen(pause: float, steps: int, set_to_none: bool = True) -> dict[str, Any]:
    xo.init()
    said, schedule = listen(), auto()
    model, optimizer = make_job(pause, schedule=schedule)
    buckets, first = [], None
    for number in range(steps):
        train(model, optimizer, range(number, number + 1), set_to_none)
        buckets.append(len(schedule.buckets))
        first = schedule.steps if first is None and schedule.choice == "deft" else first
    result = {
        "choice": schedule.choice,
        "decisions": [(decision.step, decision.action) for decision in schedule.decisions],
        "buckets": buckets,
        "log": said.getvalue(),
        "updates": schedule.deft.updates if schedule.deft is not None else None,
        "attached": type(schedule.active).__name__,
    }
    optimizer.flush()
    return {**result, "weights": weights(model)}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_slow_link_leads_to_deft_on_every_rank(launcher: str) -> None:
    first, second = run_ranks(chosen, 2, PAUSE, 50, launcher=launcher, env=SLOW_LINK)
    assert first["choice"] == "deft", first
    for key in ("decisions", "buckets", "updates", "choice"):
        assert first[key] == second[key], key
    assert torch.equal(first["weights"], second["weights"])
    assert first["updates"] < 50 - 12, "steps were merged"
    assert first["buckets"][10] == 1, "plain buckets until it is decided"
    assert first["buckets"][12] > 1
    assert second["log"] == ""
    [line] = first["log"].splitlines()
    for word in ("auto: step 19: deft: delayed, capacity", "plain ", " ms a step", "coverage_rate", "noise_scale"):
        assert word in line, line


def plainly(steps: int, pause: float) -> Tensor:
    xo.init()
    model, optimizer = make_job(pause, schedule=Overlapped())
    train(model, optimizer, range(steps))
    return weights(model)


@pytest.mark.parametrize("size", [2, 3])
def test_a_fast_link_stays_plain_bit_for_bit(size: int) -> None:
    results = run_ranks(chosen, size, 0.03, 20)
    expected = run_ranks(plainly, size, 20, 0.0)
    for result, plain in zip(results, expected, strict=True):
        assert result["choice"] == "plain"
        assert result["attached"] == "Watched"
        assert torch.equal(result["weights"], plain)
    [line] = results[0]["log"].splitlines()
    assert line.startswith("auto: step 12: plain: no"), line
    assert "coverage rate 0." in line
    assert set(results[0]["buckets"]) == {1}


def test_gradients_that_are_zeroed_in_place_live_through_new_buckets() -> None:
    first, second = run_ranks(chosen, 2, PAUSE, 40, False, env=SLOW_LINK)
    assert first["choice"] == "deft"
    assert torch.equal(first["weights"], second["weights"])


def without_probes() -> tuple[bool, bool, int]:
    """Whether steps are watched before and after the decision, and hooks on all modules that are left."""
    xo.init()
    schedule = auto()
    model, optimizer = make_job(0.02, schedule=schedule)
    train(model, optimizer, range(9))
    before = schedule.plain.watching
    train(model, optimizer, range(9, 16))
    from torch.nn.modules import module

    return before, schedule.plain.watching, len(module._global_forward_hooks) + len(module._global_forward_pre_hooks)


def test_nothing_stays_attached_once_it_is_plain() -> None:
    assert run_ranks(without_probes, 2) == [(True, False, 0)] * 2


def tried_in_vain() -> dict[str, Any]:
    """The first look finds a gain, and the plan then none."""
    xo.init()
    said, schedule = listen(), auto(replan_steps=10)
    real = schedule._make_deft

    def strict(bucket_bytes: int | None = None) -> Any:
        deft = real(bucket_bytes)
        deft.course.pilot.preserver = Preserver(least_gain=0.99)
        return deft

    schedule._make_deft = strict  # type: ignore[method-assign]
    model, optimizer = make_job(PAUSE, schedule=schedule)
    counts = []
    for number in range(48):
        train(model, optimizer, range(number, number + 1))
        counts.append(len(schedule.buckets))
    return {
        "weights": weights(model),
        "counts": counts,
        "decisions": [(decision.step, decision.action) for decision in schedule.decisions],
        "log": said.getvalue().splitlines(),
    }


def test_deft_is_left_again_where_its_plan_gains_nothing() -> None:
    first, second = run_ranks(tried_in_vain, 2, env=SLOW_LINK)
    assert first["decisions"] == second["decisions"]
    steps, reasons = zip(*first["decisions"], strict=True)
    assert steps[:2] == (19, 19 + 10 + 11 + 7), "and decided again"
    assert all(reason.startswith("plain: deft, measured with small buckets") for reason in reasons)
    assert [first["counts"][number] for number in (10, 13, 20, 30)] == [1, first["counts"][13], 1, 1]
    assert first["counts"][13] > 1
    assert len(first["log"]) == len(reasons)
    # two ranks' sums do not depend on where buckets begin
    assert torch.equal(first["weights"], run_ranks(plainly, 2, 48, 0.0)[0])


def slower() -> list[tuple[int, str]]:
    """Steps come to take longer after the decision."""
    xo.init()
    from crossover.deft import drift

    drift.CHECKED_STEPS = 10
    schedule = auto(warmup_steps=8)
    model, optimizer = make_job(0.01, schedule=schedule)
    train(model, optimizer, range(25))
    model[-1].seconds = 0.04
    train(model, optimizer, range(25, 80))
    return [(decision.step, decision.action) for decision in schedule.decisions]


def test_it_measures_again_when_steps_come_to_take_longer() -> None:
    first, second = run_ranks(slower, 2)
    assert first == second
    assert first[0][0] <= 15
    assert first[-1][0] > 25


def resumed(every_rank: bool) -> dict[str, Any]:
    xo.init()
    schedule = auto()
    model, optimizer = make_job(PAUSE, schedule=schedule)
    train(model, optimizer, range(30))
    assert schedule.choice == "deft"
    state = copy.deepcopy(optimizer.state_dict())
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, range(30, 40))
    straight = weights(model)

    other = auto()
    model, optimizer = make_job(0.0, schedule=other)
    model.load_state_dict(parameters)
    if every_rank or xo.rank() == 0:
        optimizer.load_state_dict(state)
    else:
        own = {key: value for key, value in state.items() if key != "crossover"}
        optimizer.load_state_dict(own)
    train(model, optimizer, range(30, 40))
    same = same_everywhere(model)
    return {"equal": torch.equal(weights(model), straight), "deft": other.deft is not None, "same": same}


@pytest.mark.parametrize("every_rank", [True, False])
def test_a_job_with_late_updates_goes_on_from_its_checkpoint(every_rank: bool) -> None:
    for result in run_ranks(resumed, 2, every_rank, env=SLOW_LINK):
        assert result == {"equal": every_rank, "deft": True, "same": True}


def from_environment() -> tuple[str, str]:
    xo.init()
    _, optimizer = make_job(0.0)
    _, gated = make_job(0.0, gate="selsync:0.1")
    return tuple(type(one._crossover.engine.schedule).__name__ for one in (optimizer, gated))  # type: ignore[return-value]


def test_it_is_chosen_from_the_environment_and_plain_beside_a_gate() -> None:
    assert run_ranks(from_environment, 2, env={SCHEDULE_VARIABLE: "auto"}) == [("Auto", "Overlapped")] * 2
    assert isinstance(schedule_of("auto"), Auto)
    with pytest.raises(ValueError, match="'auto', 'deft'"):
        schedule_of("automatic")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"warmup_steps": 20}, "warmup_steps: is 20"),
        ({"profile_steps": 0}, "profile_steps: is 0"),
        ({"replan_steps": 0}, "replan_steps: is 0"),
        ({"capacity": (1, 1)}, "profile, capacity"),
        ({"merge": "most"}, "merge: is 'most'"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Auto(**arguments)


def test_alone_it_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "crossover.auto")
    xo.init()
    model, optimizer = make_job(0.0, schedule="auto")
    train(model, optimizer, range(3))
    assert not caplog.records
