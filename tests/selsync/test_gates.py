"""Gates by themselves: when they ask, what they answer, what they count and save."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from crossover.selsync import LocalGradients, Periodic, SelSync, gate_of
from crossover.selsync.ballot import Field, decision_of, same_everywhere
from crossover.selsync.gate import CHECKED_EVERY, Gate
from crossover.selsync.local_gradients import Observation
from crossover.selsync.significance import TensorSignificanceTracker
from crossover.selsync.smoothing import SignificanceTracker


class Never(Gate):
    """Wants nothing."""

    def opinion(self, gradients: LocalGradients) -> bool:
        return False


WRONG: dict[str, tuple[Any, str]] = {
    "delta": (lambda: SelSync(-0.1), "delta: is -0.1"),
    "factor": (lambda: SelSync(factor=0), "factor: is 0"),
    "average": (lambda: SelSync(average="weights"), "average: is 'weights'; use 'parameters' or 'gradients'"),
    "optimizer_state": (lambda: Periodic(2, optimizer_state="reset"), "optimizer_state: is 'reset'"),
    "quorum": (lambda: SelSync(quorum=1.5), "quorum: is 1.5"),
    "max_local_steps": (lambda: SelSync(max_local_steps=0), "max_local_steps: is 0"),
    "lr_drop": (lambda: SelSync(lr_drop=1.0), "lr_drop: is 1.0"),
    "buffers": (lambda: SelSync(buffers=["mean"]), "buffers: holds a str"),
    "every": (lambda: Periodic(0), "every: is 0"),
    "warmup_steps": (lambda: Periodic(2, -1), "warmup_steps: is -1"),
    "name": (lambda: gate_of("often"), "gate: is 'often'"),
    "no number": (lambda: gate_of("periodic"), "gate: is 'periodic'"),
    "too many numbers": (lambda: gate_of("selsync:0.1:2:3"), "gate: is 'selsync:0.1:2:3'"),
    "selsync, every": (lambda: SelSync(every=0), "every: is 0"),
    "selsync, half a step": (lambda: gate_of("selsync:0.1:0.2"), "gate: is 'selsync:0.1:0.2'"),
    "bad number": (lambda: gate_of("periodic:2.5"), "gate: is 'periodic:2.5'"),
    "bad delta": (lambda: gate_of("selsync:-1"), "gate: is 'selsync:-1'; delta"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments_are_named(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(ValueError, match="^" + text.replace("'", "['\"]")):
        call()


def test_gates_by_name() -> None:
    assert gate_of(None) is None
    assert gate_of("none") is None
    delta, period = gate_of("SelSync:0.25"), gate_of("periodic:8:100")
    assert isinstance(delta, SelSync)
    assert (delta.delta, delta.every) == (0.25, 1)
    seldom = gate_of("selsync:0.25:4")
    assert isinstance(seldom, SelSync)
    assert (seldom.delta, seldom.every) == (0.25, 4)
    assert isinstance(period, Periodic)
    assert (period.every, period.warmup_steps) == (8, 100)
    assert gate_of(delta) is delta


def test_periodic_shares_its_warm_up_and_every_so_many_steps() -> None:
    gate = Periodic(every=3, warmup_steps=2)
    shared = []
    for _ in range(11):
        shared.append(gate.opinion(LocalGradients([])))
        assert gate.asks() == shared[-1]
        gate.count(shared[-1])
    assert shared == [True, True, False, False, True, False, False, True, False, False, True]
    assert (gate.shared_steps, gate.local_steps, gate.since_shared) == (5, 6, 0)
    assert gate.lssr == 6 / 11


def test_ranks_vote_only_where_the_answer_is_open() -> None:
    gate, asked = Periodic(every=10), []
    for step in range(CHECKED_EVERY + 1):
        if gate.votes_now():
            asked.append(step)
        gate.count(gate.opinion(LocalGradients([])))
    assert asked == [0, *range(9, CHECKED_EVERY, 10), CHECKED_EVERY]
    assert Periodic(10, lr_drop=0.5).votes_now()
    scaled = Periodic(10, grad_scaler=torch.amp.GradScaler("cpu"))
    scaled.count(shared=False)
    assert scaled.votes_now()
    scaled.grad_scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert not scaled.votes_now()


def test_an_infinite_delta_asks_during_the_warm_up_only() -> None:
    gate = SelSync(math.inf, warmup_steps=3)
    answers = []
    for _ in range(6):
        answers.append(int(gate.opinion(LocalGradients([torch.ones(3)]))))
        assert gate.votes_now() == (gate.steps < 3)
        gate.count(bool(answers[-1]))
    assert answers == [1, 1, 0, 0, 0, 0]
    bounded = SelSync(math.inf, warmup_steps=0, max_local_steps=4)
    asked = []
    for step in range(1, 11):
        bounded.count(shared=bounded.rule_asks([0.1]))
        asked.append(step) if bounded.votes_now() else None
    assert asked == [4, 9]


def test_selsync_may_look_at_some_steps_only() -> None:
    gate, looked = SelSync(0.5, factor=0.9, warmup_steps=2, every=3), []
    for step in range(12):
        if gate.votes_now():
            looked.append(step)
            gate.rule_asks([0.1])
            vote = bool(gate.opinion(LocalGradients([torch.full((2,), 9.0 if step >= 6 else 1.0)])))
            assert vote == (step in (0, 8)), step  # unknown at first; the change behind step 6 is seen in step 8
        gate.count(shared=False)
    assert looked == [0, 1, 2, 5, 8, 11]


def test_in_steps_that_are_not_looked_at_the_average_stays() -> None:
    gate = SelSync(0.0, warmup_steps=0, every=2, grad_scaler=torch.amp.GradScaler("cpu"))
    gate.count(shared=False)
    before = gate.state_dict()["tracker"]
    assert gate.votes_now()  # a scaler has ranks tell each other of infinities in every step
    assert not gate.opinion(LocalGradients([torch.ones(3)]))
    assert gate.state_dict()["tracker"] == before


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_selsync_votes_as_the_rule_on_floats(scale: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    gate = SelSync(0.25, factor=0.5, warmup_steps=3, grad_scaler=scaler)
    scaler.scale(torch.zeros(1))
    tracker = SignificanceTracker(0.5, warmup_steps=3)
    generator = torch.Generator().manual_seed(0)
    for step in range(40):
        gradient = torch.randn(50, generator=generator) * (4 if step % 7 == 0 else 1)
        if step == 20:
            gradient[3] = math.nan
        change = tracker.update(float(gradient.square().sum()))
        vote = gate.opinion(LocalGradients([gradient * scale]))
        assert bool(vote) == (change is None or change >= 0.25), f"step {step}"
        assert change is None or math.isclose(gate.facts()["significance"], change, rel_tol=1e-4, abs_tol=1e-5)  # type: ignore[arg-type]


def test_a_fall_of_the_rate_is_noticed_once() -> None:
    gate = SelSync(lr_drop=0.7)
    rates = [[1.0, 0.5], [0.9, 0.5], [0.9, 0.35], [0.9, 0.35], [0.09, 0.035], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert [gate.rule_asks(pair) for pair in rates] == [False, False, True, False, True, True, False, False]


def test_counters_and_tracker_are_saved() -> None:
    gate = SelSync(0.3, factor=0.5, warmup_steps=2)
    for step in range(5):
        gate.opinion(LocalGradients([torch.full((3,), float(step + 1))]))
        gate.rule_asks([0.1])
        gate.count(shared=step == 2)
    other = SelSync(0.3, factor=0.5, warmup_steps=2)
    other.load_state_dict(gate.state_dict())
    assert other.state_dict() == gate.state_dict()
    assert (other.steps, other.since_shared, other.apart) == (5, 2, True)
    with pytest.raises(ValueError, match="state: lacks"):
        other.load_state_dict({"local_steps": 3})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_tracker_goes_on_where_the_gradients_are(device: str) -> None:
    """As after a checkpoint, or when a model moves: floats on the CPU, tensors elsewhere, the same numbers."""
    gate, reference = SelSync(0.3, factor=0.5, warmup_steps=2), SignificanceTracker(0.5, warmup_steps=2)
    for step, place in enumerate(("cpu", device, device, "cpu", device)):
        gate.opinion(LocalGradients([torch.full((1,), step + 1.0, device=place)]))
        assert gate.tracker.value() == reference.update((step + 1.0) ** 2)
        assert isinstance(gate.tracker, SignificanceTracker if place == "cpu" else TensorSignificanceTracker)
        if device == "cpu":
            tensors = TensorSignificanceTracker(0.5, warmup_steps=2)
            tensors.load_state_dict(gate.tracker.state_dict())
            gate.tracker = tensors
    assert gate.tracker.state_dict() == reference.state_dict()


def test_ranks_go_on_from_the_one_that_is_furthest() -> None:
    ahead, fresh = SelSync(0.3), SelSync(0.3)
    for _ in range(4):
        ahead.opinion(LocalGradients([torch.ones(2)]))
        ahead.count(shared=False)
    states = [fresh.state_dict(), ahead.state_dict()]
    for gate in (ahead, fresh):
        gate.agree(states)
    assert fresh.steps == ahead.steps == 4
    assert fresh.tracker.state_dict() == ahead.tracker.state_dict()


def test_one_gate_serves_one_optimizer() -> None:
    gate = Never()
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    gate.serve(first)
    gate.serve(first)
    with pytest.raises(ValueError, match="already serves another optimizer"):
        gate.serve(second)
    del first
    gate.serve(second)


def test_the_model_may_be_given_for_its_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    gate = Never(buffers=model)
    listed = Never(buffers=model.buffers())
    assert gate.settings() == listed.settings()
    model.double()
    assert all(buffer is own for buffer, own in zip(gate.buffers, model.buffers(), strict=True))


def test_decisions() -> None:
    def counts(**facts: int) -> list[int]:
        return [facts.get(field.name.lower(), 0) for field in Field]

    assert not decision_of(counts(), 4, None).shared
    assert decision_of(counts(wants=1, voters=0b100), 4, None).voters == (2,)
    assert not decision_of(counts(wants=2), 5, 0.5).shared
    assert decision_of(counts(wants=2, absent=1), 5, 0.5).shared
    assert decision_of(counts(rule=1), 4, 1.0).forced
    assert "rule" in decision_of(counts(rule=1), 4, 1.0).reason
    assert "local: 1 voted" in decision_of(counts(wants=1), 4, 1.0).reason
    assert same_everywhere(15, 75, 3)
    assert not same_everywhere(15, 77, 3)


def parameters_with_gradients() -> list[nn.Parameter]:
    shapes = [(300, 300), (7,), (512, 256), (3, 3)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return parameters


def test_norms_taken_as_gradients_arrive_are_those_taken_at_the_end() -> None:
    parameters = parameters_with_gradients()
    whole = float(LocalGradients([p.grad for p in parameters if p.grad is not None]).squared_norm())
    observation = Observation(lambda: True)
    for parameter in filter(Observation.worthwhile, parameters):
        observation.arrived(parameter)
    seen = observation.gradients_of(parameters)
    assert len(seen) == 4
    assert seen[1:][0] is parameters[1].grad
    assert math.isclose(float(seen.squared_norm()), whole, rel_tol=1e-5)
    # what is added to or exchanged afterwards is read again
    observation.clear()
    for parameter in filter(Observation.worthwhile, parameters):
        observation.arrived(parameter)
    assert parameters[0].grad is not None
    parameters[0].grad.mul_(2)
    observation.arrived(parameters[0])
    parameters[2].grad = torch.ones(512, 256)
    expected = sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None)
    assert math.isclose(float(observation.gradients_of(parameters).squared_norm()), expected, rel_tol=1e-5)


def test_norms_are_not_taken_where_nobody_asks() -> None:
    asked: list[int] = []

    def wanted() -> bool:
        asked.append(1)
        return False

    observation, [large, *_] = Observation(wanted), parameters_with_gradients()
    for _ in range(3):
        observation.arrived(large)
    assert asked == [1]
    assert not observation._partial


def test_with_one_rank_a_gate_is_ignored() -> None:
    xo.init()
    try:
        model = nn.Linear(2, 1)
        gate = Never()
        optimizer: Any = xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gate=gate)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert gate.steps == 0
        assert optimizer.state_dict().keys() == {"state", "param_groups"}
        optimizer.flush()
    finally:
        xo.shutdown()
