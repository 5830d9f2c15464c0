from __future__ import annotations

import pytest

from benchmarks import published_ranges, scale_curves
from benchmarks.simulated_points import SHARING, Point, point


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((1.5, 1.23, 1.03, 0.83), "100"),
        ((1.5, 1.03 + 0.1, 1.03 - 0.1, 1.0), "32"),  # half way between 10 and 100 on a logarithmic scale
        ((1.0, 1.0, 1.0, 1.0), "below 1"),
        ((1.5, 1.5, 1.5, 1.5), "above 1000"),
    ],
)
def test_crossing_is_found_between_the_rates(
    gains: tuple[float, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = (1.0, 10.0, 100.0, 1000.0)
    known = dict(zip(rates, gains, strict=True))
    monkeypatch.setattr(scale_curves, "point", lambda name, option, ranks, rate: Point(known[rate], 1.0, 1.0))
    assert scale_curves.crossing("resnet50", "DeFT", 16, rates) == said


def test_two_jobs_gain_where_one_waits() -> None:
    waiting, computing = (point("resnet50", SHARING, 16, rate).speed_up for rate in (10, 400))
    assert waiting > 1.15
    assert 0.99 < computing < 1.1


def test_deft_gains_on_its_rivals_where_the_network_is_slow() -> None:
    slow, fast = (published_ranges.rivalry("resnet101", rate) for rate in (8, 100))
    assert slow.published
    assert not fast.published
    assert max(fast.gains) < 0.1


def test_the_simulators_own_time_is_told() -> None:
    assert "8 ranks, 4 buckets, 3 steps" in scale_curves.own_speed(8, 4, 3)
