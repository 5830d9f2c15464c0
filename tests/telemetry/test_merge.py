from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crossover.telemetry.clock import ClockOffset
from crossover.telemetry.timeline import TimelineWriter, merge


def write(path: Path, rank: int, names: list[str], aligned: bool = True) -> Path:
    writer = TimelineWriter(path, rank)
    if aligned:
        writer.set_clock(ClockOffset(0, 0, "same clock"))
    for index, name in enumerate(names):
        writer.span("step", name, index * 100, index * 100 + 50)
    writer.close()
    return writer.path


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_all_events_of_all_ranks_are_in_the_merged_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / "run.json", rank, [f"r{rank}s{step}" for step in range(3)]) for rank in range(3)]
    merged = merge(paths, tmp_path / "all.json")
    assert (merged.files, merged.damaged, merged.not_aligned) == (3, 0, ())
    assert merged.events == len(json.loads((tmp_path / "all.json").read_text()))
    assert {(event["pid"], event["name"]) for event in spans(tmp_path / "all.json")} == {
        (rank, f"r{rank}s{step}") for rank in range(3) for step in range(3)
    }


@pytest.mark.parametrize("cut", [1, 3, 20, 50])
def test_truncated_file_loses_at_most_its_last_line(tmp_path: Path, cut: int) -> None:
    whole = write(tmp_path / "run.json", 0, ["a", "b"])
    short = write(tmp_path / "run.json", 1, ["c", "d"])
    text = short.read_text().rstrip("]\n")
    short.write_text(text[:-cut])
    merged = merge([whole, short], tmp_path / "all.json")
    assert merged.damaged == 1
    assert [event["name"] for event in spans(tmp_path / "all.json")] == ["a", "b", "c"]


def test_two_jobs_that_share_a_rank_number_get_processes_of_their_own(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.json", 0, ["x"]), write(tmp_path / "b.json", 0, ["y"])
    merge([first, second], tmp_path / "all.json")
    assert {event["name"]: event["pid"] for event in spans(tmp_path / "all.json")} == {"x": 0, "y": 1}
    loaded = json.loads((tmp_path / "all.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in loaded if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 0 (b.rank0.json)"}


def test_files_on_clocks_of_their_own_are_reported(tmp_path: Path) -> None:
    paths = [write(tmp_path / "run.json", rank, ["x"], aligned=rank == 0) for rank in range(2)]
    assert merge(paths, tmp_path / "all.json").not_aligned == (str(paths[1]),)
    assert merge(paths[1:], tmp_path / "one.json").not_aligned == ()


def test_merged_file_can_be_merged_again(tmp_path: Path) -> None:
    paths = [write(tmp_path / "run.json", rank, ["x"]) for rank in range(3)]
    merge(paths[:2], tmp_path / "two.json")
    merge([tmp_path / "two.json", paths[2]], tmp_path / "three.json")
    assert sorted(event["pid"] for event in spans(tmp_path / "three.json")) == [0, 1, 2]


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run.json", 0, ["x"])
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="paths: got none"):
        merge([], tmp_path / "all.json")
    with pytest.raises(ValueError, match=r"paths: cannot read .*missing"):
        merge([tmp_path / "missing.json"], tmp_path / "all.json")
    with pytest.raises(ValueError, match="holds no event"):
        merge([tmp_path / "other.json"], tmp_path / "all.json")
    with pytest.raises(ValueError, match="also one of the files"):
        merge([path], path)
    with pytest.raises(ValueError, match="out: cannot write"):
        merge([path], tmp_path / "file" / "all.json")
    assert spans(path)
