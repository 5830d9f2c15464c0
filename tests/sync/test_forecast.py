"""Whether sharing pays, said before it is tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover.sync.forecast import JobProfile, forecast

GIB = 1 << 30


def equal(compute_s: float, exposed_s: float, count: int = 2, **rest: float) -> list[JobProfile]:
    return [JobProfile(name, compute_s, exposed_s, **rest) for name in "abcdefgh"[:count]]  # type: ignore[arg-type]


@pytest.mark.parametrize(("exposed", "gain"), [(0.1, 1.1), (0.2, 1.2), (0.5, 1.5), (1.0, 2.0)])
def test_two_equal_jobs_gain_what_they_expose(exposed: float, gain: float) -> None:
    assert forecast(equal(1.0, exposed)).gain == pytest.approx(gain, rel=1e-3)


def test_a_third_job_adds_nothing_once_the_device_is_full() -> None:
    two, three = forecast(equal(1.0, 0.5)), forecast(equal(1.0, 0.5, 3))
    assert three.gain == pytest.approx(two.gain, rel=1e-3)
    assert "adds nothing" in three.reason


def test_the_longest_job_can_be_the_limit() -> None:
    result = forecast([JobProfile("long", 1.0, 9.0), JobProfile("short", 1.0, 0.0)])
    assert (result.limit, result.shared_s) == ("long", 10.0)
    assert result.slowdowns["long"] == 1.0


def test_one_link_for_all_is_a_limit() -> None:
    result = forecast(equal(0.1, 0.9, network_s=1.0), shared_link=True)
    assert (result.limit, result.gain, result.pays) == ("network", 1.0, False)
    assert "link" in result.reason


def test_no_gain_is_said_plainly() -> None:
    result = forecast(equal(1.0, 0.02))
    assert not result.pays
    assert "does not pay" in result.reason


def test_what_does_not_fit_does_not_pay() -> None:
    result = forecast(equal(1.0, 1.0, peak_bytes=50 * GIB), capacity_bytes=80 * GIB)
    assert not result.pays
    assert "100.0 GiB" in result.reason


def test_communication_on_the_device_takes_the_gain_away() -> None:
    result = forecast(equal(1.0, 1.0), gpu_communication=True)
    assert (result.gain, result.pays) == (1.0, False)
    assert "MPS" in result.reason


@pytest.mark.parametrize("jobs", [equal(1.0, 1.0, 1), [JobProfile("a", 1.0, 0.0)] * 2])
def test_two_jobs_with_names_are_needed(jobs: list[JobProfile]) -> None:
    with pytest.raises(ValueError, match="two or more"):
        forecast(jobs)


@pytest.mark.parametrize("values", [(0.0, 1.0), (1.0, -1.0), (1.0, float("inf")), (float("nan"), 1.0)])
def test_profiles_that_cannot_be(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="a: computes"):
        JobProfile("a", *values)


@given(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 2.0)), min_size=2, max_size=6))
def test_a_gain_is_between_nothing_and_one_for_each_job(times: list[tuple[float, float]]) -> None:
    result = forecast([JobProfile(str(number), *pair) for number, pair in enumerate(times)])
    assert 0.9 < result.gain <= len(times) + 1e-9
    assert all(slowdown >= 1.0 for slowdown in result.slowdowns.values())
