from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossover.telemetry import JsonLines, StepRecord
from crossover.telemetry.display import as_text
from crossover.telemetry.picture import draw
from crossover.telemetry.report import analyse, percent, report, seconds, size
from crossover.telemetry.run import Run, load_run
from tests.telemetry.samples import record


def write(directory: Path, ranks: dict[int, list[StepRecord]], size: int | None = None) -> None:
    for rank, records in ranks.items():
        sink = JsonLines(directory, rank, size or len(ranks))
        for item in records:
            sink.log(item)
        sink.close()


def steady(rank: int, exposed_s: float, steps: int = 11, **changes: object) -> list[StepRecord]:
    return [record(step, rank, exposed_s=exposed_s, **changes) for step in range(steps)]


def test_figures_of_a_hand_made_run_are_exact(tmp_path: Path) -> None:
    local = {"synchronised": False, "bytes_sent": 0, "collectives": 0, "hidden_s": 0.0, "reason": "below delta"}
    write(
        tmp_path,
        {
            0: [record(0), record(1, step_s=0.010), record(2, step_s=0.012, exposed_s=0.0, **local)],
            1: [
                record(0, 1),
                record(1, 1, step_s=0.010, exposed_s=0.005),
                record(2, 1, step_s=0.008, exposed_s=0.0, **local),
            ],
        },
    )
    result = report(tmp_path)
    assert (result.steps, len(result.ranks)) == (3, 2)
    assert result.median_step_s == 0.010
    assert result.exposed_share == pytest.approx((0.001 + 0.005) / 0.040)
    assert result.hidden_share == pytest.approx(4 * 0.003 / (4 * 0.003 + 3 * 0.001 + 0.005))
    assert result.synchronised_share == pytest.approx(4 / 6)
    assert result.bytes_sent == 4000
    assert result.bytes_per_step == pytest.approx(4000 / 6)
    assert result.reasons == {"every step": 4, "below delta": 2}
    assert result.ranks[1].exposed_share == pytest.approx(0.005 / 0.018)
    # own work per step: rank 0 9 and 12 ms, rank 1 5 and 8 ms
    assert result.slowest_rank == 0
    assert result.slowest_lag_s == pytest.approx(0.0105 - 0.0065)
    assert json.loads(json.dumps(result.as_dict()))["bytes_sent"] == 4000


def test_waits_that_only_a_device_sees_are_said_to_be_unknown(tmp_path: Path) -> None:
    write(tmp_path, {rank: steady(rank, 0.0, extra={"unseen": 3}) for rank in range(2)})
    result = report(tmp_path)
    assert result.exposed_share is result.hidden_share is result.ranks[0].exposed_share is None
    assert "the device waited" in result.advice
    assert "the device waited" in as_text(result)


@pytest.mark.parametrize(
    ("exposed", "schedule", "expected"),
    [
        (0.0003, "overlapped", "communication exposed is 3% of the step: there is little to gain"),
        (
            0.0041,
            "overlapped",
            "communication exposed is 41% of the step: consider schedule=crossover.schedulers.Priority()",
        ),
        (0.0041, "priority", "with the Priority schedule: compare with crossover.schedulers.Overlapped()"),
    ],
)
def test_advice_follows_the_exposed_share(exposed: float, schedule: str, expected: str) -> None:
    run = Run({rank: steady(rank, exposed, extra={"schedule": schedule}) for rank in range(2)})
    assert expected in analyse(run).advice


def test_advice_names_a_straggler_before_the_network() -> None:
    waits = {0: 0.004, 1: 0.004, 2: 0.0005, 3: 0.004}
    result = analyse(Run({rank: steady(rank, wait) for rank, wait in waits.items()}))
    assert result.slowest_rank == 2
    assert result.slowest_lag_s == pytest.approx(0.0035)
    assert "wait for rank 2, whose own work takes 3.5 ms a step longer" in result.advice


def test_advice_claims_nothing_where_there_is_nothing_to_say() -> None:
    assert "fewer than two steps" in analyse(Run({0: [record(0)]})).advice
    alone = steady(0, 0.0, collectives=0, bytes_sent=0, hidden_s=0.0)
    assert "there is one rank" in analyse(Run({0: alone})).advice


def test_only_the_latest_run_counts_and_the_rest_is_noted(tmp_path: Path) -> None:
    write(tmp_path, {rank: steady(rank, 0.001, steps=30) for rank in range(3)})
    write(tmp_path, {rank: steady(rank, 0.001, steps=5) for rank in range(2)})
    with (tmp_path / "records.rank1.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 5, "ra')
    run = load_run(tmp_path)
    assert {rank: len(records) for rank, records in run.records.items()} == {0: 5, 1: 5}
    assert len(run.notes) == 3
    assert "rank 2 are from an earlier run" in run.notes[0]
    assert "1 earlier run" in run.notes[1]
    assert "1 line(s) cut short" in run.notes[2]


def test_missing_ranks_are_noted(tmp_path: Path) -> None:
    write(tmp_path, {0: steady(0, 0.001), 2: steady(2, 0.001)}, size=3)
    assert load_run(tmp_path).notes == ("no file of rank 1 of 3: the figures are of the others",)


def test_bad_directories_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory; give the one that CROSSOVER_RECORDS named"):
        load_run(tmp_path / "missing")
    with pytest.raises(ValueError, match="run the job with CROSSOVER_RECORDS="):
        load_run(tmp_path)
    JsonLines(tmp_path / "a.jsonl").close()
    with pytest.raises(ValueError, match="hold no step yet"):
        load_run(tmp_path)
    JsonLines(tmp_path / "b.jsonl").close()
    with pytest.raises(ValueError, match="records named a, b; give each run its own directory"):
        load_run(tmp_path)


def test_text_shows_every_rank_and_the_advice() -> None:
    result = analyse(Run({rank: steady(rank, 0.0041) for rank in range(2)}, notes=("something",)))
    text = as_text(result)
    assert "exposed communication  41% of the step" in text
    assert "note: something" in text
    assert text.rstrip().splitlines()[-1] == f"advice: {result.advice}"
    table = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in table] == ["0", "1"]
    assert table[0][1:4] == ["11", "10", "ms"]


def test_figures_have_units_that_suit_them() -> None:
    assert [seconds(value) for value in (1.25, 0.0183, 0.00064, 0.0, None)] == [
        "1.25 s",
        "18.3 ms",
        "640 µs",
        "0 µs",
        "unknown",
    ]
    assert [size(value) for value in (12, 33_600_000, 2.5e9)] == ["12 B", "33.6 MB", "2.5 GB"]
    assert [percent(value) for value in (0.0, 0.034, 0.41, None)] == ["0%", "3.4%", "41%", "unknown"]


@pytest.mark.parametrize("ranks", [1, 3, 20])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_is_drawn_for_few_and_many_ranks(tmp_path: Path, ranks: int, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    run = Run({rank: steady(rank, 0.0041, steps=30) for rank in range(ranks)})
    path = tmp_path / "new" / f"run.{suffix}"
    draw(run, analyse(run), path)
    content = path.read_bytes()
    assert len(content) > 10_000
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_picture_of_a_single_step_is_drawn_and_bad_suffixes_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Run({0: [record(0)]})
    draw(run, analyse(run), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"picture: .*xyz.*png"):
        draw(run, analyse(run), tmp_path / "run.xyz")
