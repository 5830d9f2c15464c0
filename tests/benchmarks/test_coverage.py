"""The arithmetic of coverage rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import coverage

positive = st.floats(1e-3, 1e9)
hosts = st.integers(2, 64)


def test_known_figures():
    # 33.6 MB between two hosts at 500 Mbit/s: each sends all of it once.
    assert coverage.all_reduce_bytes(33.6e6, 2) == 33.6e6
    assert coverage.all_reduce_s(33.6e6, 500e6, 2) == pytest.approx(0.5376)
    assert coverage.all_reduce_bytes(33.6e6, 4) == pytest.approx(50.4e6)
    assert coverage.all_reduce_bytes(33.6e6, 1) == 0
    assert coverage.rate_for(2.0, 0.2688, 33.6e6, 2) == pytest.approx(500e6)
    assert coverage.limit_s(0.18, 33.6e6, 500e6, 2) == pytest.approx(0.5376)
    assert coverage.limit_s(0.6, 33.6e6, 500e6, 2) == 0.6


@given(cr=positive, compute=positive, size=positive, count=hosts)
def test_a_rate_meets_the_coverage_rate_asked_for(cr, compute, size, count):
    rate = coverage.rate_for(cr, compute, size, count)
    assert coverage.coverage_rate(compute, size, rate, count) == pytest.approx(cr)


@given(compute=positive, size=positive, rate=positive, count=hosts)
def test_the_limit_is_reached_by_the_longer_of_the_two(compute, size, rate, count):
    limit = coverage.limit_s(compute, size, rate, count)
    assert limit >= compute
    assert limit >= coverage.all_reduce_s(size, rate, count)
    assert limit in (compute, coverage.all_reduce_s(size, rate, count))


@pytest.mark.parametrize(
    "call",
    [
        lambda: coverage.all_reduce_bytes(1.0, 0),
        lambda: coverage.all_reduce_bytes(-1.0, 2),
        lambda: coverage.all_reduce_s(1.0, 0.0, 2),
        lambda: coverage.rate_for(0.0, 1.0, 1.0, 2),
        lambda: coverage.rate_for(1.0, 1.0, 1.0, 1),
        lambda: coverage.coverage_rate(0.0, 1.0, 1.0, 2),
    ],
)
def test_impossible_figures_are_refused(call):
    with pytest.raises(ValueError, match="give"):
        call()
