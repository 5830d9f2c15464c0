"""Plans: the test vectors that were worked out by hand, and what has to hold for any profile."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from crossover.deft.cost import BucketTimes
from crossover.deft.plan import (
    Plan,
    QueueState,
    StepPlan,
    catch_up,
    mean_duration,
    merged_sizes,
    step_durations,
    synchronous_plan,
)
from crossover.deft.planner import Limits, make_plan
from tests.deft.profiles import random_times


def times(*reduce: tuple[int, ...]) -> BucketTimes:
    return BucketTimes((10,) * 4, (20,) * 4, reduce)


def sends(*buckets: int, link: int = 0) -> tuple[tuple[int, int], ...]:
    return tuple((link, bucket) for bucket in buckets)


def test_low_coverage_is_delayed_by_one_and_hides_everything() -> None:
    profile = times((8, 12, 20, 30))
    plan = make_plan(profile)
    assert plan.prefix == (StepPlan(fresh=sends(3, 2), close=True),)
    assert plan.cycle == (StepPlan(sends(1, 0), (), sends(3, 2), close=True, apply=1),)
    assert step_durations(plan.prefix + plan.cycle * 3, profile) == [120] * 4


def test_waiting_a_little_sends_more_at_once() -> None:
    plan = make_plan(times((8, 12, 20, 30)), Limits(sync_wait=8))
    assert plan.prefix == (StepPlan(fresh=sends(3, 2, 1), close=True),)
    assert plan.cycle == (StepPlan(sends(0), (), sends(3, 2, 1), close=True, apply=1),)


def test_coverage_above_one_merges_steps() -> None:
    profile = times((30, 40, 50, 60))
    plan = make_plan(profile)
    full = StepPlan(sends(1), sends(2, 0), (), close=True, apply=1)
    assert plan.prefix == (StepPlan(fresh=sends(3), close=True), full)
    assert plan.cycle == (StepPlan(sends(1), sends(2, 0)), StepPlan((), sends(3), (), close=True, apply=1))
    assert merged_sizes(plan.cycle) == [2]
    assert step_durations(plan.prefix + plan.cycle * 2, profile) == [120] * 6


def test_coarse_buckets_waste_the_slow_link() -> None:
    plan = make_plan(times((40, 60, 60, 80), (66, 99, 99, 132)))
    assert plan.cycle == (
        StepPlan(sends(0), sends(3)),
        StepPlan((), sends(1)),
        StepPlan((), sends(2), (), close=True, apply=1),
    )
    assert merged_sizes(plan.cycle) == [3]


def test_a_bucket_that_fits_nowhere_forces_a_wait() -> None:
    profile = times((20, 20, 20, 150))
    plan = make_plan(profile)
    assert [step.forced for step in plan.cycle] == [True, False]
    assert step_durations([*plan.prefix, *plan.cycle], profile, queued=False) == [120, 120, 190, 120]
    assert step_durations([*plan.prefix, *plan.cycle], profile) == [120, 120, 150, 120], "queued over the stages"


def walk(plan: Plan, steps: int, buckets: int, state: QueueState = QueueState()) -> list[int]:  # noqa: B008
    """Follow a plan as an executor does, and check every rule; returns the sizes of the generations applied."""
    unsent, current, accumulated, sizes, size = set(state.unsent), state.current, state.accumulated, [], 0
    for number in range(steps):
        step = plan.step(number)
        if step is None:
            break
        accumulated += 1
        for _, bucket in (*step.forward, *step.backward):
            assert bucket in unsent, "each bucket of a generation is sent once"
            unsent.remove(bucket)
        if not step.close:
            assert not step.fresh
            assert step.apply == 0
            assert current, "something is on its way, else the generation would close"
            continue
        fresh = [bucket for _, bucket in step.fresh]
        assert len(set(fresh)) == len(fresh)
        assert not unsent, "the current generation is complete where the next closes"
        complete = len(fresh) == buckets
        assert step.apply == int(current) + int(complete)
        sizes += [size] * current + [accumulated] * complete
        size, accumulated, current, unsent = accumulated, 0, not complete, set(range(buckets)) - set(fresh)
    return sizes


@pytest.mark.parametrize("links", [1, 2, 3])
def test_rules_hold_for_any_profile(links: int) -> None:
    for seed in range(60):
        profile = random_times(seed, links=links)
        for limits in (Limits(), Limits((5, 4)), Limits(most_merged=2), Limits(sync_wait=15)):
            plan = make_plan(profile, limits)
            sizes = walk(plan, 120, profile.buckets)
            assert all(0 < size <= limits.most_merged for size in sizes), (seed, limits)


def test_nothing_is_exposed_that_was_not_forced() -> None:
    for seed in range(80):
        profile = random_times(seed, links=1 + seed % 2)
        plan = make_plan(profile)
        steps = [step for number in range(60) if (step := plan.step(number)) is not None]
        if any(step.forced for step in steps):
            continue
        assert set(step_durations(steps, profile)) == {profile.compute}, seed


def test_a_plan_goes_on_from_any_state() -> None:
    for seed in range(40):
        profile = random_times(seed)
        plan = make_plan(profile)
        steps: Sequence[StepPlan] = (*plan.prefix, *plan.repeated)
        states = [make_plan(profile, horizon=cut).final for cut in range(1, len(steps) + 1)]
        for state in states:
            walk(make_plan(profile, Limits((3, 2)), state), 40, profile.buckets, state)
            walk(Plan((catch_up(state, profile.buckets),), (), QueueState()), 1, profile.buckets, state)


def test_two_hundred_buckets_are_planned_in_milliseconds() -> None:
    for coverage in (0.4, 1.0, 1.5, 2.0, 3.0):
        profile = random_times(1, buckets=200, coverage=coverage)
        profile = BucketTimes(
            *(tuple(200 * ticks for ticks in row) for row in (profile.forward, profile.backward)),
            tuple(tuple(200 * ticks for ticks in row) for row in profile.reduce),
        )
        seconds = min(_timed(profile) for _ in range(3))
        plan = make_plan(profile)
        walk(plan, 60, 200)
        assert seconds < 0.5, "a bound on the method, with a wide margin for the machine"
        assert plan == make_plan(profile)
        assert plan.updates_per_step() > 0.8 * min(1 / coverage, 1.0)


def _timed(profile: BucketTimes) -> float:
    before = time.process_time()
    make_plan(profile)
    return time.process_time() - before


def test_no_step_is_promised_shorter_than_a_link_needs() -> None:
    for seed in range(60):
        profile = random_times(seed, links=1 + seed % 2)
        fresh = make_plan(profile, Limits((2, 1)))
        states = [QueueState(), QueueState(True, frozenset(range(profile.buckets)), 0), fresh.final]
        found = [mean_duration(make_plan(profile, Limits((2, 1)), state), profile) for state in states]
        for state, mean in zip(states, found, strict=True):
            plan = make_plan(profile, Limits((2, 1)), state)
            many = step_durations([*plan.prefix, *plan.repeated * 60], profile)[-30 * len(plan.repeated) :]
            assert mean == pytest.approx(sum(many) / len(many), rel=0.03), (seed, state)
            assert mean >= profile.compute


def test_plans_travel_as_text() -> None:
    for seed in range(20):
        plan = make_plan(random_times(seed, links=2))
        assert Plan.from_json(plan.as_json()) == plan
        assert Plan.from_json(plan.as_json()).digest() == plan.digest()
    with pytest.raises(ValueError, match="plan"):
        Plan.from_json("{}")


def test_synchronous_steps() -> None:
    plan = synchronous_plan(3)
    assert walk(plan, 5, 3) == [1] * 5
    assert plan.updates_per_step() == 1.0
    assert step_durations(plan.cycle, BucketTimes((10,) * 3, (20,) * 3, ((5, 5, 5),))) == [95]


@pytest.mark.parametrize("arguments", [{"capacity": (0, 1)}, {"sync_wait": -1}, {"most_merged": 0}])
def test_limits_are_checked(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Limits(**arguments)  # type: ignore[arg-type]
