"""The table of ``benchmarks.auto``, from made-up answers."""

from __future__ import annotations

from benchmarks import auto
from benchmarks.harness import Measured, Outcome
from tests.benchmarks.test_questions import CELL


def ran(*repeats: float, choice: str = "") -> Measured:
    measured = Measured()
    for step in repeats:
        facts = {"choice": choice, "decision": "made"} if choice else {}
        measured.add([{"windows": [step], "choice": {}, "tried": {}, "facts": facts} for _ in range(2)])
    return measured


def test_auto_is_compared_with_the_faster_fixed_schedule_and_with_plain() -> None:
    plain, deft, chosen = ran(0.060, 0.080), ran(0.050, 0.050), ran(0.051, 0.052, choice="deft")
    systems = {"alone": ran(0.04, 0.04), "crossover": plain, "crossover_deft": deft, "crossover_auto": chosen}
    outcome = Outcome(CELL, systems, "2 hosts", "2 hosts; 800 Mbit/s")
    assert auto.row(outcome)[2:] == ["70.0", "50.0", "51.5", "1.030", "0.750", "deft"]
    table, details = auto.sections([outcome])
    assert "x best" in table
    assert "decision made" in details


def test_what_was_not_measured_says_so() -> None:
    systems = {"crossover": ran(0.06), "crossover_deft": Measured(reason="failed"), "crossover_auto": ran(0.06)}
    outcome = Outcome(CELL, systems, "2 hosts", "2 hosts; 800 Mbit/s")
    assert auto.row(outcome)[-1] == "not measured"
    assert len(auto.row(outcome)) == len(auto.HEADER)
