"""DeFT on real ranks from measurement to plan, over an emulated slow link, and what it decides."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover import telemetry
from crossover.comm import Solo
from crossover.deft import DeFT, Preserver, Profile, scout
from crossover.deft.course import agree_on_plan
from crossover.deft.plan import synchronous_plan
from crossover.errors import RankMismatchError
from crossover.schedulers import FifoDelayed, schedule_of
from tests.deft.profiles import random_profile
from tests.deft.reference import Delayed, fifo_decisions, momentum, sgd
from tests.deft.test_executor import BUCKETS, planned
from tests.harness import run_ranks
from tests.training import batch, flat, make_model

SLOW_LINK = {"CROSSOVER_EMULATED_LINK": "10mbit,0.1ms"}
LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]


class Pause(nn.Module):
    """Computing that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return values


def train(schedule: DeFT, steps: int, pause: float = 0.0, loss: Any = None, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    if pause:
        model.append(Pause(pause))
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=schedule, **options)
    for step in range(steps):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        error = nn.functional.mse_loss(model(features), targets)
        if loss is not None:
            schedule.observe(loss(step, float(error)))
        error.backward()
        optimizer.step()
    return model, optimizer


def measured(pause: float) -> dict[str, Any]:
    xo.init()
    schedule = DeFT(warmup_steps=10, profile_steps=6, bucket_bytes=100, preserver=Preserver(tolerance=1.0))
    model, optimizer = train(schedule, 30, pause)
    assert schedule.profile is not None
    result = {
        "delayed": schedule.delayed,
        "decisions": [str(decision) for decision in schedule.decisions],
        "profile": schedule.profile,
        "updates": schedule.updates,
        "plan": schedule.course.plan,
    }
    optimizer.flush()
    return {**result, "weights": flat(model)}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_slow_link_is_measured_and_updates_come_late(launcher: str) -> None:
    first, second = run_ranks(measured, 2, 0.002, launcher=launcher, env=SLOW_LINK)
    assert first["delayed"], first["decisions"]
    assert any("delayed, capacity" in line and "coverage_rate" in line for line in first["decisions"])
    on_the_link = 8 * sum(first["profile"].nbytes) / 10  # microseconds at 10 Mbit/s
    assert sum(first["profile"].reduce_us[0]) > 0.9 * on_the_link
    assert first["profile"].times().compute > 2000, "the pause was seen"
    assert first["updates"] < 30
    for key in ("decisions", "profile", "plan", "updates"):
        assert first[key] == second[key], key
    assert torch.equal(first["weights"], second["weights"])


def test_with_little_communication_a_job_stays_synchronous_and_says_so() -> None:
    first, second = run_ranks(measured, 2, 0.03)
    assert not first["delayed"], first["decisions"]
    assert "nothing to gain" in first["decisions"][-1]
    assert first["updates"] == 30
    assert torch.equal(first["weights"], second["weights"])


def decided_twice(compression: Any) -> tuple[list[float], float]:
    xo.init()
    schedule = DeFT(warmup_steps=8, profile_steps=5, ramp_updates=0)
    model = make_model(width=400).insert(1, Pause(0.003))  # its second layer takes longer than a window
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), compression, schedule=schedule)
    for step in range(20):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    assert len(schedule.generations.pieces) > len(schedule.buckets), "none was cut"
    optimizer.flush()
    rates = [d.numbers["coverage_rate"] for d in schedule.decisions if "coverage_rate" in d.numbers]
    assert schedule.profile is not None
    elements = sum(bucket.buffer.numel() for bucket in schedule.buckets)
    return [*rates, schedule.profile.coverage_rate], sum(schedule.profile.nbytes) / elements


@pytest.mark.parametrize(
    ("launcher", "compression", "width"),
    [
        ("torch", "none", 8),
        ("torch", "fp16", 2),
        pytest.param("horovod", "bf16", 4, marks=pytest.mark.horovod),  # which it adds up in float32
    ],
)
def test_a_second_decision_goes_by_the_same_measurement_though_buckets_were_cut(
    launcher: str, compression: str, width: int
) -> None:
    for (first, *later), measured_width in run_ranks(decided_twice, 2, compression, launcher=launcher, env=SLOW_LINK):
        assert len(later) > 1
        assert later == pytest.approx([first] * len(later), rel=0.05)
        assert measured_width == pytest.approx(width, rel=0.01)


def resumed(*sizes: int) -> list[tuple[int, int, int]]:
    """Trainings of 8 steps, each with the state of the one before; the link seems to want buckets of these sizes."""
    xo.init()
    found, state = [], None
    for size in sizes:
        scout.bucket_bytes = lambda *_, size=size: size  # type: ignore[assignment]
        schedule = DeFT(warmup_steps=6, profile_steps=3, ramp_updates=0)
        model = make_model()
        optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=schedule)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in range(8):
            optimizer.zero_grad()
            features, targets = batch(xo.rank(), step)
            nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
        state = optimizer.state_dict()
        found.append((len(schedule.buckets), schedule.course.steps, schedule.dropped))
        optimizer.flush()
    return found


def test_a_state_goes_on_though_the_link_looks_different_at_the_next_start() -> None:
    for (buckets, *_), later in run_ranks(resumed, 2, 2_000, 100_000):
        assert buckets > 1
        assert later == (buckets, 16, 0)


def loss_that_rises() -> list[tuple[int, str]]:
    xo.init()
    preserver = Preserver(tolerance=1.0, fallback_steps=8, retries=1, loss_rise=1.2)
    schedule = DeFT(
        random_profile(1, BUCKETS, coverage=0.8),
        warmup_steps=3,
        capacity=(1, 1),
        bucket_bytes=100,
        preserver=preserver,
        profile_steps=4,
    )
    _, optimizer = train(schedule, 80, loss=lambda step, error: 1.0 if step < 20 else 9.0)
    optimizer.flush()
    return [(decision.step, decision.action) for decision in schedule.decisions]


def test_the_delay_ends_when_the_loss_rises_and_is_tried_again() -> None:
    first, second = run_ranks(loss_that_rises, 2)
    assert first == second
    late = [step for step, action in first if action.startswith("delayed")]
    [(fell_back, why)] = [(step, action) for step, action in first if "the loss rose" in action]
    assert late == [3, fell_back + 8], (first, why)
    assert fell_back > 20


def late(compression: Any) -> tuple[Tensor, int]:
    xo.init()
    schedule = DeFT(random_profile(1, BUCKETS, coverage=0.8), warmup_steps=3, capacity=(1, 1), bucket_bytes=100)
    recorder = telemetry.start()
    model, optimizer = train(schedule, 20, compression=compression)
    assert schedule.delayed
    telemetry.stop()
    optimizer.flush()
    return flat(model), sum(record.bytes_sent for record in list(recorder)[6:])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_late_gradients_travel_in_half_precision(launcher: str) -> None:
    whole, _ = run_ranks(late, 2, xo.Compression.none, launcher=launcher)
    narrow, other = run_ranks(late, 2, xo.Compression.fp16, launcher=launcher)
    assert torch.equal(narrow[0], other[0])
    assert 0 < float((narrow[0] - whole[0]).abs().max()) < 1e-3
    assert narrow[1] < 0.5 * whole[1], "2 bytes in place of 8"


def over_two_links(pays: bool) -> tuple[Tensor, int, list[str]]:
    xo.init()
    scout.second_link_pays = lambda *_: pays  # type: ignore[assignment]
    profile = random_profile(2, BUCKETS, links=2, coverage=1.4)
    schedule = DeFT(
        profile,
        warmup_steps=2,
        capacity=(1, 1),
        bucket_bytes=100,
        ramp_updates=0,
        merge="mean",
        second_link="lo",
    )
    model, optimizer = train(schedule, 30)
    used = {link for step in schedule.course.plan.repeated for link, _ in step.backward + step.forward + step.fresh}  # type: ignore[union-attr]
    optimizer.flush()
    return flat(model), len(used), [str(decision) for decision in schedule.decisions]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("pays", [True, False])
def test_a_second_link_carries_a_part(pays: bool, launcher: str) -> None:
    results = run_ranks(over_two_links, 2, pays, launcher=launcher)
    reference = Delayed(sgd, [0, 1], gain=lambda steps: 1.0)
    for step, decision in enumerate(planned(2, 1.4, (1, 1), links=2 if pays else 1)):
        reference.step(step, decision)
    reference.flush()
    for weights, used, decisions in results:
        assert used == 1 + pays
        assert ("not used" in decisions[0]) != pays
        torch.testing.assert_close(weights, reference.result(), rtol=0, atol=1e-12)


def ramped() -> Tensor:
    xo.init()
    schedule = DeFT(
        random_profile(1, BUCKETS, coverage=0.8),
        warmup_steps=2,
        capacity=(1, 1),
        bucket_bytes=100,
        ramp_updates=10,
        merge="mean",
    )
    model, _ = train(schedule, 8)
    return flat(model)


def test_the_learning_rate_rises_after_the_switch() -> None:
    updates = 0

    def gain(steps: int) -> float:
        nonlocal updates
        late = max(updates - 2, 0)
        updates += 1
        return 1.0 if updates <= 2 else 0.5 + 0.05 * late

    reference = Delayed(sgd, [0, 1], gain=gain)
    for step, decision in enumerate(planned(1, 0.8, (1, 1))[:8]):
        reference.step(step, decision)
    for result in run_ranks(ramped, 2):
        torch.testing.assert_close(result, reference.result(), rtol=0, atol=1e-12)


def compensated() -> Tensor:
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(
        momentum(model), schedule=FifoDelayed(warmup_steps=1, compensation=0.1), bucket_cap_mb=100.0
    )
    for step in range(8):
        optimizer.zero_grad()
        features, targets = batch(xo.rank(), step)
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    return flat(model)


class Compensated(Delayed):
    """One step late, and corrected for how far the weights have gone since."""

    def update(self, generation: list[list[Tensor]], clip: bool = True, late: bool = False) -> None:
        gradients = generation[0]
        if self.updates:
            sizes = torch.cat([gradient.flatten() for gradient in gradients])
            strength = 0.1 / (sizes.norm() / sizes.numel() ** 0.5)
            for gradient, parameter, then in zip(gradients, self.model.parameters(), self.then, strict=True):
                gradient += strength * gradient * gradient * (parameter.detach() - then)
        super().update(generation, clip, late)

    def step(self, step: int, decision: Any) -> None:
        now = [parameter.detach().clone() for parameter in self.model.parameters()]
        super().step(step, decision)
        self.then = now


def test_late_gradients_can_be_corrected() -> None:
    reference = Compensated(momentum, [0, 1], gain=lambda steps: 1.0)
    for step, decision in enumerate(fifo_decisions(8, 1, 1)):
        reference.step(step, decision)
    plain = Delayed(momentum, [0, 1], gain=lambda steps: 1.0)
    for step, decision in enumerate(fifo_decisions(8, 1, 1)):
        plain.step(step, decision)
    for result in run_ranks(compensated, 2):
        torch.testing.assert_close(result, reference.result(), rtol=0, atol=1e-12)
        assert not torch.allclose(result, plain.result(), atol=1e-12)


class Disagreeing(Solo):
    """Two ranks of which the other one got another plan."""

    def __init__(self) -> None:
        super().__init__(timeout=1.0)
        self.ranks = (0, 1)

    def all_gather_object(self, value: Any, *, name: str) -> list[Any]:
        return [value, "another"]


def test_ranks_with_different_plans_are_told() -> None:
    with pytest.raises(RankMismatchError, match="rank 1 holds another plan"):
        agree_on_plan(Disagreeing(), "test", lambda: synchronous_plan(3))


@pytest.mark.parametrize(
    "arguments",
    [
        {"warmup_steps": 0},
        {"warmup_steps": 2},
        {"profile_steps": 0},
        {"replan_steps": 1.5},
        {"ramp_updates": -1},
        {"bucket_bytes": 0},
        {"capacity": (0, 1)},
        {"most_merged": 0},
        {"merge": "most"},
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        DeFT(**arguments)


def test_it_is_known_by_name() -> None:
    assert isinstance(schedule_of("deft"), DeFT)
    assert isinstance(Profile.from_json(random_profile(0, 3).as_json()), Profile)
