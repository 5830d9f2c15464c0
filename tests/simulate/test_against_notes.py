"""What reads a note of measurements finds the constants that made it, and says how far off predictions are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simulated, simulator
from benchmarks.layer_times import LayerTimes

LAYERS = LayerTimes(
    forward_us=(9_000,) * 8,
    backward_us=(18_000,) * 8,
    nbytes=(4_000_000,) * 8,
    load_s=2e-3,
    update_s=4e-3,
    compressible=0.01,
)
ALONE_S = 0.222
TRUE = simulator.Constants(goodput=0.94, copy_s_per_byte=0.8e-9, cost_s_per_byte=0.4e-9)


def run_of(seconds: float, **facts: Any) -> dict[str, Any]:
    """A system as a note has it: two ranks, three windows of steps."""
    answer = {"windows": [seconds] * 3, "facts": facts}
    return {"runs": [[answer, answer]], "reason": None, "choice": {}, "tried": {}}


def entry(rate: float, **systems: dict[str, Any]) -> dict[str, Any]:
    base = {"workload": "mlp", "cr": 1.0, "hosts": 2, "rate_bit_s": rate, "refused": None}
    return {**base, "systems": {"alone": run_of(ALONE_S), **systems}}


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Cells at three rates whose figures are the simulator's own, with :data:`TRUE`."""
    monkeypatch.setattr(simulator, "layer_times", lambda name: LAYERS)
    monkeypatch.setattr(simulated, "pass_s_per_byte", lambda: 1e-10)
    facts: dict[str, dict[str, Any]] = {
        "ddp": {"bucket_cap_mb": 4.0},
        "dear": {"group_bytes": 8_000_000},
        "crossover_priority": {"partition_bytes": 1_000_000, "credit_bytes": 4_000_000, "fuse_bytes": 262_144},
        "crossover_selsync": {"lssr": 0.75, "warmup": 2},
        "crossover_periodic": {"every": 4},
        "powersgd": {"rank": 1},
        "unheard_of": {},
    }
    made = []
    for rate in (200e6, 500e6, 1000e6):
        blank = entry(rate, **{name: run_of(1.0, **known) for name, known in facts.items()})
        for measured in simulator.read([blank]):
            seconds = simulator.predict(measured, TRUE)
            blank["systems"][measured.system] = run_of(seconds or 1.0, **measured.facts)
        made.append(blank)
    return made


def test_the_step_without_communication_is_the_jobs_computing(data: list[dict[str, Any]]) -> None:
    alone = next(measured for measured in simulator.read(data) if measured.system == "alone")
    assert alone.job.compute_s == pytest.approx(ALONE_S)
    assert simulator.predict(alone, TRUE) == pytest.approx(ALONE_S)


def test_fitted_constants_predict_every_system(data: list[dict[str, Any]]) -> None:
    measured = simulator.read(data)
    constants = simulator.fit(measured)
    for each in measured:
        predicted = simulator.predict(each, constants)
        if each.system == "unheard_of":
            assert predicted is None
        else:
            assert abs(simulator.error(each, predicted)) < 0.03, each.system


def test_refused_cells_and_those_without_a_base_are_left_out(data: list[dict[str, Any]]) -> None:
    refused = {**data[0], "refused": "the link was off"}
    bare = {**data[0], "systems": {"ddp": run_of(1.0)}}
    assert simulator.read([refused, bare]) == []


def test_a_note_becomes_tables(data: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = tmp_path / "note.json"
    note.write_text(json.dumps({"data": data[:1]}))
    assert simulator.main(["--note", str(note)]) == 0
    said = capsys.readouterr().out
    assert "5 of 5 predictions within 10%" in said
    assert "no model" in said
