"""What a plan costs in convergence, against numbers that were worked out elsewhere, and what follows from it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from crossover.comm import Solo
from crossover.deft.cost import BucketTimes
from crossover.deft.course import Course
from crossover.deft.loss_watch import LossWatch
from crossover.deft.pilot import Pilot, Preserver
from crossover.deft.plan import QueueState, merged_sizes
from crossover.deft.planner import Limits
from crossover.deft.preserver import (
    IGNORED_SAMPLES,
    Candidate,
    NoiseScale,
    choose,
    efficiency,
    folded_normal_mean,
    gain,
    largest_curvature,
    walk_ratio,
)
from crossover.schedulers.spike import spike_weights
from tests.deft.profiles import random_profile


@pytest.mark.parametrize(
    ("batch", "noise", "merged", "expected"),
    [
        (1024, 8192, [1, 2], 0.9333),
        (1024, 8192, [2], 0.90),
        (1024, 8192, [1, 1, 2], 0.95),
        (1024, 8192, [3], 0.8182),
        (256, 8192, [1, 2], 0.9804),
        (256, 8192, [2], 0.9706),
        (512, 512, [2], 0.6667),
    ],
)
def test_efficiency(batch: float, noise: float, merged: list[int], expected: float) -> None:
    assert efficiency(merged, batch, noise) == pytest.approx(expected, abs=5e-5)
    assert all(1 <= gain(steps, batch, noise) <= steps for steps in merged)


def test_noise_scale_is_found_from_two_batch_sizes() -> None:
    source = np.random.default_rng(0)
    ranks, signal, deviation = 4, np.full(50, 0.3), 2.0
    estimate = NoiseScale(smoothing=0.999)
    for _ in range(6000):
        own = signal + deviation * source.standard_normal((ranks, 50))
        estimate.add(1, float((own**2).sum(1).mean()), ranks, float((own.mean(0) ** 2).sum()))
    assert estimate.value == pytest.approx(50 * deviation**2 / (signal**2).sum(), rel=0.15)
    before = estimate.state_dict()
    estimate.add(1, math.nan, 4, 1.0)
    assert estimate.state_dict() == before, "what is not finite is left out"
    other = NoiseScale(smoothing=0.999)
    other.load_state_dict(before)
    assert other.value == estimate.value


def test_the_cautious_estimate_is_below_and_comes_nearer() -> None:
    source = np.random.default_rng(1)
    exact, estimate = 4.0 / 0.25, NoiseScale(smoothing=0.99)
    errors = []
    for number in range(400):
        own = 0.5 + 2.0 * source.standard_normal((2, 200))
        estimate.add(1, float((own**2).sum(1).mean()), 2, float((own.mean(0) ** 2).sum()))
        if number in (20, 399):
            assert estimate.value is not None
            assert estimate.cautious is not None
            assert estimate.cautious < estimate.value
            errors.append(estimate.error)
    assert errors[1] < 0.5 * errors[0]
    assert estimate.value == pytest.approx(exact, rel=0.3)
    assert estimate.signal == pytest.approx(0.25 * 200, abs=4 * estimate.error)


def test_nothing_is_said_of_the_noise_before_there_are_samples() -> None:
    estimate = NoiseScale()
    for _ in range(IGNORED_SAMPLES):
        estimate.add(1, 3.0, 2, 2.0)
        assert estimate.value is None
        assert estimate.cautious is None
    estimate.add(1, 3.0, 2, 2.0)
    assert estimate.value == pytest.approx(2.0)
    other = NoiseScale()
    other.load_state_dict(estimate.state_dict())
    for each in (estimate, other):
        each.add(1, 9.0, 2, 2.0)
    assert other.state_dict() == estimate.state_dict()


@pytest.mark.parametrize(
    ("start", "merged", "gains", "expected"),
    [
        (2.0, [1, 2], [1, 2], 1.0),
        (2.0, [1, 2], [1, 1], 0.667),
        (2.0, [2], [1], 0.571),
        (0.5, [1, 2], [1, 2], 0.819),
        (0.5, [2], [2], 0.766),
        (0.5, [1, 2], [1, 2**0.5], 1.046),
        (0.5, [2], [2**0.5], 1.083),
    ],
)
def test_walk(start: float, merged: list[int], gains: list[float], expected: float) -> None:
    assert walk_ratio(start, 0.002, 0.05, merged, gains) == pytest.approx(expected, abs=6e-4)


def test_folded_normal() -> None:
    source = random.Random(0)
    sample = sum(abs(source.gauss(0.4, 0.7)) for _ in range(200_000)) / 200_000
    assert folded_normal_mean(0.4, 0.7) == pytest.approx(sample, abs=5e-3)
    assert folded_normal_mean(-2.0, 0.0) == 2.0


@pytest.mark.parametrize(
    ("momentum", "nesterov", "together", "delayed"),
    [
        (0.0, False, 2, 1),
        (0.5, False, 3, 0.5),
        (0.9, False, 3.8, 0.1),
        (0.5, True, 1.5, 0.562),
        (0.9, True, 1.357, 0.253),
    ],
)
def test_stability(momentum: float, nesterov: bool, together: float, delayed: float) -> None:
    assert largest_curvature(momentum, delayed=False, nesterov=nesterov) == pytest.approx(together, abs=6e-4)
    assert largest_curvature(momentum, delayed=True, nesterov=nesterov) == pytest.approx(delayed, abs=6e-4)


def test_stability_is_what_a_quadratic_does() -> None:
    for momentum, product, stable in ((0.9, 0.095, True), (0.9, 0.11, False), (0.0, 0.95, True), (0.0, 1.05, False)):
        assert settles(momentum, product, (1.0, 0.0)) == stable, (momentum, product)
    for momentum in (0.5, 0.9, 0.95):
        limit = largest_curvature(momentum, delayed=True, spike=True)
        assert limit > largest_curvature(momentum, delayed=True), "what it is for"
        assert settles(momentum, 0.97 * limit, spike_weights(momentum))
        assert not settles(momentum, 1.03 * limit, spike_weights(momentum))


def settles(momentum: float, product: float, weights: tuple[float, float]) -> bool:
    """Whether momentum with gradients one update late comes to rest in the middle of a quadratic."""
    of_buffer, of_gradient = weights
    place, velocity, then = 1.0, 0.0, 1.0
    for _ in range(3000):
        velocity = momentum * velocity + then
        then, place = place, place - product * (of_buffer * velocity + of_gradient * then)
    return abs(place) < 1.0


def test_the_best_of_those_allowed_is_chosen() -> None:
    synchronous = Candidate("synchronous", None, 200.0, 1.0)
    fast = Candidate("1", Limits(), 100.0, 0.7)
    middle = Candidate("3/2", Limits((3, 2)), 120.0, 0.95)
    assert choose([synchronous, fast, middle], tolerance=1.0) is middle
    assert choose([synchronous, fast], tolerance=0.5) is fast
    assert choose([synchronous, fast], tolerance=0.1) is synchronous
    assert choose([synchronous, Candidate("1", Limits(), 198.0, 1.0)], tolerance=0.1) is synchronous, (
        "too little to gain"
    )


TIMES = {rate: BucketTimes((100,) * 8, (200,) * 8, ((int(300 * rate),) * 8,)) for rate in (0.4, 1.0, 2.0)}


def pilot(preserver: Preserver | None = None) -> Pilot:
    made = Pilot(preserver or Preserver(), Limits(), fixed_capacity=False)
    made.silent = True
    return made


def test_a_job_with_little_communication_stays_synchronous_and_says_so() -> None:
    chosen = pilot()
    assert chosen.choose(200, TIMES[0.4], 2, QueueState()) is None
    assert "nothing to gain" in str(chosen.decisions[-1])
    assert "coverage_rate 0.4" in str(chosen.decisions[-1])


def test_merging_depends_on_the_noise_scale() -> None:
    noisy, quiet = pilot(), pilot()
    for estimate, small in ((noisy.noise, 1000.0), (quiet.noise, 1.001)):
        for _ in range(30):
            estimate.add(1, small, 2, (small + 1.0) / 2)
    plan = noisy.choose(0, TIMES[2.0], 2, QueueState())
    assert plan is not None
    assert max(merged_sizes(plan.repeated)) >= 2
    assert quiet.noise.value == pytest.approx(0.001, rel=0.01)
    plan = quiet.choose(0, TIMES[2.0], 2, QueueState())
    assert plan is None or max(merged_sizes(plan.repeated)) == 1, "two merged steps would be worth little more than one"
    assert "efficiency" in str(quiet.decisions[-1])


def test_no_steps_are_merged_before_the_noise_scale_is_known() -> None:
    careful, trusting = pilot(), pilot(Preserver(prior=math.inf))
    plan = careful.choose(200, TIMES[2.0], 2, QueueState())
    assert plan is not None, "a delay alone gains something"
    assert merged_sizes(plan.repeated) == [1]
    said = str(careful.decisions[-1])
    assert "waits rather than merge more steps" in said
    assert "noise_scale not known from 0 samples, taken as 0" in said
    assert "at efficiency 0.5" in said, "what merging two steps was judged by"
    plan = trusting.choose(200, TIMES[2.0], 2, QueueState())
    assert plan is not None
    assert max(merged_sizes(plan.repeated)) >= 2
    assert "waits" not in trusting.decisions[-1].action


@pytest.mark.parametrize(("noise", "most"), [(0.5, 1), (18.0, 2), (30.0, 3), (1e4, 4)])
def test_merging_is_held_to_what_the_noise_scale_allows(noise: float, most: int) -> None:
    times = BucketTimes((100,) * 16, (200,) * 16, ((1200,) * 16,))  # coverage rate 4
    chosen = pilot()
    chosen.noise.load_state_dict({"samples": 99, "signal": 1.0, "noise": noise})
    plan = chosen.choose(0, times, 2, QueueState())
    assert plan is not None
    assert max(merged_sizes(plan.repeated)) == most
    assert efficiency(merged_sizes(plan.repeated), 2, noise) >= 1 - chosen.preserver.tolerance
    assert chosen.chosen.most_merged >= max(merged_sizes(plan.repeated))


def test_without_the_preserver_everything_is_hidden() -> None:
    made = Pilot(Preserver(), Limits((1, 1)), fixed_capacity=True)
    made.silent = True
    plan = made.choose(0, TIMES[2.0], 2, QueueState())
    assert plan is not None
    assert max(merged_sizes(plan.repeated)) >= 2


def test_decisions_come_soon_at_first_and_measure_anew_when_settled() -> None:
    course = Course(pilot(), first_decision=100, profile_steps=20, replan_steps=1000)
    profile = random_profile(1, 4, coverage=1.5)
    assert course.stale
    moments, measured = [], []
    for _ in range(5):
        course.steps = course.decide_at
        moments.append(course.steps)
        course.decide(Solo(timeout=1.0), "test", profile, QueueState())
        course.steps = course.decide_at - 21
        measured.append(course.survey_begins)
    assert moments == [100, 200, 400, 800, 1600]
    assert measured == [False, False, False, False, True]
    course.measure_soon("for the test")
    assert course.stale


def test_the_delay_ends_when_the_loss_rises_and_is_tried_again_with_less_merging() -> None:
    chosen = pilot(Preserver(retries=2))
    for step in range(50):
        chosen.loss.add(2.0 - 0.02 * step, synchronous=True)
    assert chosen.alarm(1.0) is None
    for _ in range(50):
        chosen.loss.add(4.0, synchronous=False)
    assert "loss rose" in str(chosen.alarm(1.0))
    assert chosen.fall_back(100, "the loss rose")
    assert chosen.most_merged == 4
    assert chosen.alarm(1.0) is None, "a new beginning"
    assert chosen.fall_back(200, "again")
    assert not chosen.fall_back(300, "and again"), "two retries, and no more"
    assert [decision.step for decision in chosen.decisions] == [100, 200, 300]


def test_gradients_that_grow_or_are_no_numbers_raise_an_alarm() -> None:
    chosen = pilot()
    assert all(chosen.alarm(1.0 + 0.1 * step) is None for step in range(10))
    assert "norm rose" in str(chosen.alarm(1e6))
    assert "not finite" in str(chosen.alarm(math.nan))
    chosen.loss.add(math.inf, synchronous=False)
    assert chosen.loss.level == math.inf


def test_the_walk_needs_a_falling_loss() -> None:
    watch = LossWatch()
    assert watch.walk() is None
    for step in range(60):
        watch.add(3.0 - 0.01 * step, synchronous=True)
    known = watch.walk()
    assert known is not None
    assert known[1] == pytest.approx(0.01, rel=0.25)


def test_momentum_is_warned_of() -> None:
    chosen = pilot()
    chosen.warn_of_momentum(5, [{"momentum": 0.0}, {"momentum": 0.9}, {"lr": 0.1}])
    assert len(chosen.decisions) == 1
    assert "momentum 0.9 in group 1" in str(chosen.decisions[0])


def test_state_goes_on() -> None:
    first, second = pilot(), pilot()
    for step in range(30):
        first.noise.add(1, 2.0, 2, 1.5)
        first.loss.add(2.0 - 0.01 * step, synchronous=True)
        first.alarm(1.0)
    first.fall_back(3, "for the test")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tolerance", -1.0),
        ("prior", math.nan),
        ("loss_rise", 1.0),
        ("gradient_rise", 0.5),
        ("fallback_steps", -1),
        ("retries", 1.5),
    ],
)
def test_what_may_be_lost_is_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Preserver(**{name: value})  # type: ignore[arg-type]
