"""Steps on the virtual clock against the planner's own arithmetic, closed forms, and bounds that no schedule beats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from crossover.deft import BucketTimes, Limits, make_plan, step_durations, synchronous_plan
from crossover.simulate import Cluster, Job, Part, Result, gated, gpus, layerwise, simulate, systems
from crossover.simulate.us_byte import Times, step_s, us_byte_groups
from tests.deft.profiles import random_times
from tests.simulate.jobs import exact_cluster, job_of

STEPS = 24


def durations(result: Result) -> list[int]:
    """Of each step, in microseconds."""
    return [round(1e6 * step) for step in np.diff([0.0, *result.marks])]


class Given(systems.DeFT):
    """DeFT on buckets as they are."""

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        return job


class AsIs(systems.Plain):
    """DDP on buckets as they are."""

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        return job


@pytest.mark.parametrize("capacity", [(1, 1), (5, 4), (2, 1)])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("links", [1, 2])
def test_deft_takes_as_long_as_its_planner_says(seed: int, links: int, capacity: tuple[int, int]) -> None:
    times = random_times(seed)
    factors = (1, 2)[:links]
    times = dataclasses.replace(times, reduce=tuple(tuple(f * t for t in times.reduce[0]) for f in factors))
    plan = make_plan(times, Limits(capacity))
    assert plan.cycle, "the test needs plans that repeat"
    expected = step_durations([step for n in range(STEPS) if (step := plan.step(n)) is not None], times)
    result = simulate(job_of(times), Given(capacity), exact_cluster(factors), STEPS)
    assert durations(result) == expected


@pytest.mark.parametrize("seed", range(12))
def test_plain_takes_as_long_as_the_synchronous_plan_says(seed: int) -> None:
    times = random_times(seed)
    result = simulate(job_of(times), AsIs(), exact_cluster(), STEPS)
    [step] = step_durations(synchronous_plan(times.buckets).cycle, times)
    assert durations(result) == [step] * STEPS
    assert round(1e6 * result.exposed_s) == step - times.compute


def test_updates_are_counted_as_merged() -> None:
    times = BucketTimes((10,) * 24, (20,) * 24, ((60,) * 24,))  # coverage rate 2
    result = simulate(job_of(times), Given(), exact_cluster(), 48)
    assert result.updates_per_step == pytest.approx(0.5, abs=0.05)
    assert round(1e6 * result.step_s) == times.compute


SHARING_ALL: list[Callable[[], systems.System]] = [
    lambda: systems.Plain(100, 10),
    lambda: layerwise.Priority(20, 60, 5),
    lambda: layerwise.USByte(10),
    lambda: layerwise.Decoupled(60),
    lambda: gated.Fused(1e-5),
    lambda: gated.Local(0.0, vote=False),
]


@pytest.mark.parametrize("make", SHARING_ALL)
@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_shares_every_gradient_beats_computing_or_the_link(
    make: Callable[[], systems.System], seed: int
) -> None:
    times = random_times(seed)
    result = simulate(job_of(times), make(), exact_cluster(), STEPS)
    limit = max(times.compute, sum(times.reduce[0]))
    slowest = times.compute + sum(times.reduce[0]) + 1e3
    assert limit - 1 <= 1e6 * result.step_s <= slowest


@pytest.mark.parametrize("make", SHARING_ALL[:4])
def test_without_communication_all_are_alike(make: Callable[[], systems.System]) -> None:
    job = Job("job", (Part(1e-3, 2e-3, 0), Part(1e-3, 2e-3, 1)), between_s=1e-3)
    result = simulate(job, make(), exact_cluster(), STEPS)
    assert result.step_s == pytest.approx(job.compute_s, rel=1e-2)


def test_priority_hides_the_input_side_under_what_follows() -> None:
    times = BucketTimes((50, 50), (50, 50), ((40, 120),))
    plain = simulate(job_of(times), AsIs(), exact_cluster())
    ahead = simulate(job_of(times), layerwise.Priority(10, 10, 1), exact_cluster())
    assert round(1e6 * plain.step_s) == 310  # 100 forward, 50 until the first bucket, 160 on the link
    # at the end of backward 50 of the large bucket are through; the small one goes first, the rest under 50 of forward
    assert round(1e6 * ahead.step_s) == 260


def test_local_steps_pay_for_their_shares_only() -> None:
    times = BucketTimes((10,), (20,), ((300,),), between=5)
    result = simulate(job_of(times), gated.Local(0.75, vote=False), exact_cluster(), 48)
    assert 1e6 * result.step_s == pytest.approx(35 + 300 / 4, abs=0.1)


def test_delayed_first_come_first_served_needs_the_coverage_rate_in_steps() -> None:
    times = BucketTimes((10,) * 2, (20,) * 2, ((75, 75),))
    result = simulate(job_of(times), systems.FifoDelayed(merge=None), exact_cluster(), 48)
    assert round(1e6 * result.step_s) == times.compute
    assert result.updates_per_step == pytest.approx(1 / 3, abs=0.03)


def test_all_wait_for_a_slow_rank() -> None:
    times = BucketTimes((100,), (200,), ((1,),))
    result = simulate(job_of(times), AsIs(), exact_cluster(ranks=8, slow=(1.5,)), STEPS)
    assert round(1e6 * result.step_s) == 451


def test_transfers_take_their_share_of_computing() -> None:
    # the second bucket's 50 are under way while the first one's backward computes: 100 take 105
    times = BucketTimes((0, 0), (100, 100), ((0, 50),))
    alone = simulate(job_of(times), systems.Alone(), exact_cluster(contention=0.1), STEPS)
    result = simulate(job_of(times), AsIs(), exact_cluster(contention=0.1), STEPS)
    assert round(1e6 * alone.step_s) == 200
    assert round(1e6 * result.step_s) == 205


def test_a_thousand_ranks_and_two_hundred_buckets() -> None:
    job = Job("large", tuple(Part(1e-4, 2e-4, 2_000_000) for _ in range(200)), 1e-3)
    result = simulate(job, systems.Plain(1), gpus(1024, 100e9), steps=6)
    assert len(result.transfers["link 0"]) == 6 * 200
    assert result.step_s > job.compute_s


def test_us_byte_sends_every_byte_once_and_is_no_worse_than_the_input_side_first() -> None:
    for seed in range(20):
        times = random_times(seed)
        job = job_of(times)
        nbytes = [part.nbytes for part in job.parts]
        network = exact_cluster().network
        model = Times(job.ready_s(), [p.forward_s for p in job.parts], nbytes, 7, network.all_reduce_s)
        groups = us_byte_groups(model)
        sent = [sum(n for layer, n in groups if layer == number) for number in range(len(nbytes))]
        assert sent == nbytes
        whole = [(layer, nbytes[layer]) for layer in range(len(nbytes))]
        assert step_s(model, groups) <= step_s(model, whole) + 1e-12


@pytest.mark.parametrize("steps", [0, 2])
def test_too_few_steps_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match="3 or more"):
        simulate(job_of(random_times(0)), systems.Plain(), exact_cluster(), steps)
