"""Jobs that share devices, measured: the arithmetic and the table, without a network."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import hand_over, two_jobs
from benchmarks.two_jobs import ALONE, AT_ONCE, SCENARIOS, TURNS, Result


def ranks(*ends: list[float]) -> list[dict[str, Any]]:
    return [{"ends": moments} for moments in ends]


def test_rates_are_of_the_time_in_which_all_jobs_ran() -> None:
    steady = [0.5 * number for number in range(21)]
    late = [2.0 + number for number in range(5)]
    assert two_jobs.rates([ranks(steady), ranks(late)]) == pytest.approx([2.0, 1.0])


def test_a_step_is_done_when_the_slowest_rank_is() -> None:
    assert two_jobs.rates([ranks([0.0, 1.0, 2.0], [0.5, 1.5, 2.5])]) == pytest.approx([1.0])


def test_parts_of_a_step_count() -> None:
    first, second = [0.0, 1.0, 2.0, 3.0], [0.0, 2.0]
    assert two_jobs.rates([ranks(first), ranks(second)]) == pytest.approx([1.0, 0.5])


def result() -> Result:
    made = Result(SCENARIOS["two"], place="a place")
    made.alone_s = [[0.3, 0.3], [0.31, 0.31]]
    made.rates = {AT_ONCE: [[1.5, 1.5], [1.5, 1.5]], TURNS: [[2.5, 2.5], [2.5, 2.5]]}
    made.turns = [{"turn_s": 0.2, "waited_s": 0.01}] * 2
    made.compute_s = [0.2, 0.2]
    return made


def test_gain_is_work_done() -> None:
    assert result().gains(ALONE) == [1.0, 1.0]
    assert result().gains(AT_ONCE) == pytest.approx([0.9, 0.93])
    assert result().gains(TURNS) == pytest.approx([1.5, 1.55])


def test_the_table() -> None:
    text = two_jobs.section(result())
    lines = [line for line in text.splitlines() if line.startswith(f"| {TURNS}")]
    assert "1.52" in lines[0]
    assert "400.0" in lines[0], "a step of each, in milliseconds"
    expected = two_jobs.predicted(result())
    assert expected.limit == "network", "two all-reduces of 33.6 MB take 0.54 s at 1 Gbit/s, computing 0.4 s"
    assert expected.gain == pytest.approx(0.61 / 0.538, rel=0.01)


def test_scenarios_cover_hosts_rates_and_numbers_of_jobs() -> None:
    assert {len(scenario.jobs) for scenario in SCENARIOS.values()} == {2, 3, 4}
    assert {scenario.hosts for scenario in SCENARIOS.values()} == {2, 4}
    assert {scenario.rate for scenario in SCENARIOS.values()} == {"1gbit", "500mbit"}
    assert any(len(set(scenario.jobs)) > 1 for scenario in SCENARIOS.values())


def test_quick_is_one_scenario_once() -> None:
    options = two_jobs.options_of(["--quick"])
    assert (options.scenarios, options.repeats) == (["two"], 1)


def test_hand_over_rows() -> None:
    assert hand_over.row("x", [10e-6] * 50) == ["x", "10.0", "10.0", "10.0", "50"]
    assert hand_over.row("x", [10e-6]) == ["x", "10.0", "10.0", "10.0", "1"]
