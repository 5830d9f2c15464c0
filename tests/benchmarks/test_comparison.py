"""What ``make demo`` shows of what was measured: tables, and a picture with every method and pair in it."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import comparison, harness
from benchmarks.comparison import LABELS, PAIRS, PLAIN, SELDOM, Pair
from benchmarks.harness import Cell, Measured, Outcome
from benchmarks.workloads.measure import ComputeTime

COMPUTE = ComputeTime("vgg", 32, 4_000_000, forward_backward_s=0.040, step_s=0.050, spread=0.01)


def trained(seconds: float, accuracies: list[float], sent: int) -> Measured:
    elapsed = [seconds * point / (len(accuracies) - 1) for point in range(len(accuracies))]
    answer = {"seconds": elapsed, "accuracies": accuracies, "steps": 40, "bytes": sent, "choice": {}, "tried": {}}
    return Measured([[answer, answer]])


def outcome() -> Outcome:
    systems = {name: trained(4.0, [0.1, 0.7, 0.8], 50_000_000) for name in LABELS}
    systems[PLAIN] = trained(10.0, [0.1, 0.6, 0.9], 300_000_000)
    systems["crossover_selsync"] = trained(5.0, [0.1, 0.9, 0.95], 60_000_000)
    systems["crossover_deft"] = Measured(reason="no luck")
    return Outcome(Cell("vgg", 3.0, COMPUTE, hosts=2), systems, "2 hosts", "2 hosts; slow")


def shown(pairs: dict[str, Pair]) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    comparison.show(outcome(), pairs, console)
    return console.export_text()


def test_tables_say_time_to_plains_accuracy_and_all_steps() -> None:
    pairs = {PLAIN: Pair(16.0, (0.9, 0.8)), SELDOM: Pair(5.0, (0.9, 0.9))}
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(pairs).splitlines() if "│" in line]
    rows = {row[0]: row[1:] for row in lines}
    assert rows["plain"] == ["10.0 s", "1.0 x", "10.0 s", "1.0 x", "90.0%", "300 MB"]
    assert rows["SelSync"] == ["2.5 s", "4.0 x", "5.0 s", "2.0 x", "95.0%", "60 MB"]
    assert rows["SelSync + DeFT"] == ["not reached", "", "4.0 s", "2.5 x", "80.0%", "50 MB"]
    assert "DeFT" not in rows
    assert rows["plain, one after the other"] == ["20.0 s", "1.0 x", "90.0%"]
    assert rows[PAIRS[PLAIN]] == ["16.0 s", "1.2 x", "90.0%, 80.0%"]
    assert rows[PAIRS[SELDOM]] == ["5.0 s", "4.0 x", "90.0%, 90.0%"]


def test_what_could_not_run_is_said_and_pairs_may_be_missing() -> None:
    text = shown({})
    assert "DeFT could not run: no luck" in text
    assert "without any communication: 2.0 s" in text
    assert "Two trainings" not in text


def test_the_picture_has_a_line_a_method_and_a_bar_a_pair(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "comparison.png"
    comparison.draw(outcome(), {PLAIN: Pair(16.0, (0.9, 0.8))}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_each_pair_is_of_a_method_that_runs_alone_too() -> None:
    assert set(PAIRS) <= set(LABELS)
    assert len({colour for *_, colour in LABELS.values()}) == len(LABELS)


def test_a_pair_waits_for_the_later_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def both(place: Any, module: str, system: str, task: Any, seeds: Any, timeout: float) -> list[Any]:
        asked.append((system, list(seeds)))
        return [trained(seconds, [0.1, 0.9 - seconds / 100], 1).runs[0] for seconds in (3.0, 4.0)]

    monkeypatch.setattr("benchmarks.together.run", both)
    monkeypatch.setattr(harness, "say", lambda text: None)
    found = comparison.pair(argparse.Namespace(), SELDOM, {})  # type: ignore[arg-type]
    assert found == Pair(4.0, (pytest.approx(0.87), pytest.approx(0.86)))
    assert asked == [(SELDOM, [0, 1])]
