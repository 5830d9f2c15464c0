"""``gate="auto"`` on real ranks: shared as without a gate at first, and open where the network asks for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import crossover as xo
from crossover.auto import AutoGate
from crossover.deft import DeFT
from crossover.optimizer import GATE_VARIABLE
from crossover.schedulers import Overlapped
from crossover.selsync import gate_of
from tests.auto.jobs import SLOW_LINK, listen, make_job, same_everywhere, train, weights
from tests.harness import run_ranks

STEPS = 3 + 8 + 4 + 1  # norms until there is a significance, watched ones, timed ones, and the first pass
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


def auto_gate(**options: Any) -> AutoGate:
    return AutoGate(**{"warmup_steps": 3, "watch_steps": 8, "profile_steps": 4, "max_local_steps": 3, **options})


def opened(pause: float, steps: int) -> dict[str, Any]:
    xo.init()
    said, gate = listen(), auto_gate()
    model, optimizer = make_job(pause, gate=gate)
    shared, equal = [], []
    for number in range(steps):
        train(model, optimizer, range(number, number + 1))
        shared.append(gate.since_shared == 0)
        equal.append(same_everywhere(model))
    optimizer.flush()
    return {
        "opened": gate.opened,
        "delta": gate.delta,
        "shared": shared,
        "equal": equal,
        "lssr": gate.lssr,
        "log": said.getvalue(),
        "weights": weights(model),
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_slow_link_opens_it_on_every_rank(launcher: str) -> None:
    first, second = run_ranks(opened, 2, 0.0, 60, launcher=launcher, env=SLOW_LINK)
    assert first["opened"], first["log"]
    for key in ("opened", "delta", "shared", "lssr"):
        assert first[key] == second[key], key
    assert first["delta"] > 0
    assert torch.equal(first["weights"], second["weights"]), "flushed"
    assert all(first["shared"][:STEPS])
    assert all(first["equal"][:STEPS])
    assert first["shared"][STEPS:].count(False) > 10
    for step, shared in enumerate(first["shared"]):
        assert first["equal"][step] == shared, step
    runs = "".join("s" if shared else "l" for shared in first["shared"])
    assert "llll" not in runs, "at most three local steps in a row"
    assert second["log"] == ""
    [line] = first["log"].splitlines()
    assert line.startswith(f"auto: step {STEPS}: local steps: gains")
    for word in ("delta ", "watched 9 steps", "at most 3 local steps", "wanted"):
        assert word in line, line


def opened_in_half_precision(steps: int) -> dict[str, Any]:
    xo.init()
    said, gate = listen(), auto_gate()
    model, optimizer = make_job(0.0, gate=gate, compression=xo.Compression.fp16)
    train(model, optimizer, range(steps))
    optimizer.flush()
    return {"opened": gate.opened, "lssr": gate.lssr, "log": said.getvalue(), "weights": weights(model)}


def test_it_opens_with_compression() -> None:
    """Gradients travel in half precision at first, and distances from the last average from then on."""
    first, second = run_ranks(opened_in_half_precision, 2, 60, env=SLOW_LINK)
    assert first["opened"], first["log"]
    assert first["lssr"] == second["lssr"] > 0
    assert torch.equal(first["weights"], second["weights"])
    assert first["weights"].isfinite().all()


def plainly(steps: int) -> torch.Tensor:
    xo.init()
    model, optimizer = make_job(0.0, schedule=Overlapped())
    train(model, optimizer, range(steps))
    return weights(model)


def test_where_communication_is_hidden_it_stays_shared_bit_for_bit() -> None:
    first, second = run_ranks(opened, 2, 0.03, STEPS + 4)
    assert not first["opened"]
    assert all(first["shared"])
    assert all(first["equal"])
    for result in (first, second):
        assert torch.equal(result["weights"], run_ranks(plainly, 2, STEPS + 4)[0])
    [line] = first["log"].splitlines()
    assert f"auto: step {STEPS}: shared: communication is hidden already" in line


def records() -> list[tuple[bool, bool]]:
    xo.init()
    model, optimizer = make_job(0.0, gate=auto_gate())
    exchange = optimizer._crossover.engine.exchange
    found = []
    for number in range(STEPS + 2):
        train(model, optimizer, range(number, number + 1))
        _, _, facts = exchange.facts()
        found.append((exchange.shares_all, "delta" in facts or "gate" in facts))
    return found


def test_records_tell_of_the_gate_once_it_votes() -> None:
    for found in run_ranks(records, 2, env=SLOW_LINK):
        assert found == [(True, False)] * (STEPS - 1) + [(False, False)] + [(False, True)] * 2


def resumed() -> dict[str, Any]:
    xo.init()
    gate = auto_gate()
    model, optimizer = make_job(0.0, gate=gate)
    number = 0
    while number < 30 or gate.since_shared == 0:
        train(model, optimizer, range(number, number := number + 1))
    assert gate.opened
    state = copy.deepcopy(optimizer.state_dict())
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    apart = not same_everywhere(model)
    train(model, optimizer, range(number, number + 10))
    other = auto_gate()
    again, second = make_job(0.0, gate=other)
    again.load_state_dict(parameters)
    second.load_state_dict(state)
    train(again, second, range(number, number + 10))
    return {
        "apart": apart,
        "equal": torch.equal(weights(again), weights(model)),
        "counts": (other.steps, other.local_steps, other.delta) == (gate.steps, gate.local_steps, gate.delta),
    }


def test_local_steps_go_on_from_a_checkpoint() -> None:
    for result in run_ranks(resumed, 2, env=SLOW_LINK):
        assert result == {"apart": True, "equal": True, "counts": True}


def uneven() -> tuple[bool, bool]:
    """One rank has fewer batches, and the gate opens while it only stands in."""
    xo.init()
    gate = auto_gate()
    model, optimizer = make_job(0.0, gate=gate)
    train(model, optimizer, range(STEPS - 3 if xo.rank() else STEPS + 9))
    xo.join()
    optimizer.flush()
    return gate.opened, same_everywhere(model)


def test_a_rank_without_data_stands_in_while_the_gate_opens() -> None:
    assert run_ranks(uneven, 2, env=SLOW_LINK) == [(True, True)] * 2


def from_environment() -> str:
    xo.init()
    _, optimizer = make_job(0.0)
    return type(optimizer._crossover.engine.exchange).__name__


def beside_a_schedule() -> str:
    xo.init()
    try:
        make_job(0.0, gate="auto", schedule=DeFT())
    except ValueError as error:
        return str(error)
    return ""


def test_it_is_chosen_from_the_environment() -> None:
    both = {GATE_VARIABLE: "auto", "CROSSOVER_SCHEDULE": "auto"}
    assert run_ranks(from_environment, 2, env={GATE_VARIABLE: "auto"}) == ["OpeningExchange"] * 2
    assert run_ranks(from_environment, 2, env=both) == ["OpeningExchange"] * 2
    assert "begins with plain steps" in run_ranks(beside_a_schedule, 2)[0]
    assert isinstance(gate_of("auto"), AutoGate)
    with pytest.raises(ValueError, match="'auto', 'selsync'"):
        gate_of("automatic")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"average": "gradients"}, "average: is 'gradients'"),
        ({"watch_steps": 0}, "watch_steps: is 0"),
        ({"profile_steps": 0}, "profile_steps: is 0"),
        ({"max_local_steps": 0}, "max_local_steps: is 0"),
        ({"window": 3}, "window: is 3"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AutoGate(**arguments)
