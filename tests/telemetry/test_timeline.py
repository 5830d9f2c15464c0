from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from crossover.telemetry import timeline
from crossover.telemetry.clock import ClockOffset
from crossover.telemetry.timeline import TimelineWriter

WRITE_UNTIL_KILLED = """
import sys, time
from crossover.telemetry import timeline
writer = timeline.start(sys.argv[1], rank=1)
count = 0
while True:
    now = time.perf_counter_ns()
    timeline.span("communication", f"bucket {count % 5}", now - 100_000, now, {"bytes": count})
    count += 1
    if count == 300:
        assert writer.flush(30)
        print("written", flush=True)
    time.sleep(0.0002)
"""


def events(path: Path, phase: str | None = None) -> list[dict[str, Any]]:
    loaded = json.loads(path.read_text())
    return [event for event in loaded if phase in (None, event["ph"])]


def fill_and_close(writer: TimelineWriter, spans: int) -> None:
    for index in range(spans):
        writer.span("step", f"step {index}", index * 10, index * 10 + 5)
    writer.close()


def rows(path: Path) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events(path, "M") if event["name"] == "thread_name"}


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    opened = TimelineWriter(tmp_path / "run.json", rank=4)
    yield opened
    opened.close()


def test_events_carry_rank_row_time_and_arguments(writer: TimelineWriter) -> None:
    writer.span("step", "step 0", 1_000_000, 3_500_250, {"reason": 'said "yes"'})
    writer.instant("gate", "vote", 2_000_000)
    writer.counter("queue", {"waiting": 3, "in flight": 1}, 2_000_001)
    writer.close()
    assert writer.path.name == "run.rank4.json"
    (span,), (instant,), (counter,) = (events(writer.path, phase) for phase in "XiC")
    assert (span["pid"], span["name"], span["ts"], span["dur"]) == (4, "step 0", 1000.0, 2500.25)
    assert span["args"] == {"reason": 'said "yes"'}
    assert rows(writer.path)[span["tid"]] == "step"
    assert rows(writer.path)[instant["tid"]] == "gate"
    assert instant["ts"] == 2000.0
    assert counter["args"] == {"waiting": 3, "in flight": 1}
    names = [event["args"]["name"] for event in events(writer.path, "M") if event["name"] == "process_name"]
    assert names == ["rank 4"]


def test_overlapping_spans_get_rows_of_their_own_and_nested_ones_share(writer: TimelineWriter) -> None:
    writer.span("communication", "first", 0, 100)
    writer.span("communication", "overlaps", 50, 150)
    writer.span("communication", "after", 200, 300)
    writer.span("communication", "inside", 210, 220)
    writer.span("communication", "around", 190, 310)
    writer.close()
    tids = {event["name"]: event["tid"] for event in events(writer.path, "X")}
    assert tids["first"] != tids["overlaps"]
    assert tids["first"] == tids["after"] == tids["inside"] == tids["around"]
    assert sorted(rows(writer.path).values()) == ["communication", "communication (2)"]


def test_file_of_a_killed_process_only_lacks_the_bracket(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    text = (tmp_path / "timeline.rank1.json").read_text()
    assert not text.rstrip().endswith("]")
    spans = [event for event in json.loads(text + "]") if event["ph"] == "X"]
    assert [event["args"]["bytes"] for event in spans] == list(range(len(spans)))
    assert len(spans) >= 300


def test_file_is_readable_before_the_first_event(writer: TimelineWriter) -> None:
    assert json.loads(writer.path.read_text() + "]")[0]["name"] == "process_name"


def test_size_is_bounded_and_the_end_says_so(tmp_path: Path) -> None:
    bound = 20_000
    writer = TimelineWriter(tmp_path, max_bytes=bound)
    fill_and_close(writer, 5_000)
    assert writer.full
    assert bound - 2_000 < writer.path.stat().st_size <= bound
    spans = events(writer.path, "X")
    assert [event["name"] for event in spans] == [f"step {index}" for index in range(len(spans))]
    last = events(writer.path)[-1]
    assert last["name"].startswith("timeline full")
    assert last["args"] == {"max_bytes": bound}


def test_bound_that_leaves_no_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes: got 100, must be at least"):
        TimelineWriter(tmp_path, max_bytes=100)


def test_overflow_is_counted_in_the_file_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, release = threading.Event(), threading.Event()
    write = TimelineWriter._write

    def slow(self: TimelineWriter, batch: list[Any]) -> None:
        entered.set()
        assert release.wait(30)
        write(self, batch)

    monkeypatch.setattr(TimelineWriter, "_write", slow)
    writer = TimelineWriter(tmp_path, capacity=50)
    writer.span("step", "first", 0, 1)
    assert entered.wait(30)
    for index in range(120):
        writer.span("step", "later", index, index)
    assert writer.dropped == 70
    release.set()
    writer.close()
    assert len(events(writer.path, "X")) == 51
    notices = [event for event in events(writer.path, "i") if "dropped" in event["name"]]
    assert [notice["args"]["dropped_so_far"] for notice in notices] == [70]


def test_failing_disk_ends_the_timeline_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    writer = TimelineWriter(tmp_path)
    monkeypatch.setattr(timeline, "write_all", full)
    with pytest.warns(RuntimeWarning, match=r"timeline .* ends here .*No space left") as caught:
        fill_and_close(writer, 500)
    assert len(caught) == 1
    assert writer.full


def test_names_and_arguments_of_any_kind_keep_the_file_valid(writer: TimelineWriter) -> None:
    writer.span(
        't"rack\n', 'na"me\\ \u00e9\n', 5, 3, {"nan": float("nan"), "object": object, "deep": {"inf": float("inf")}}
    )
    writer.close()
    (span,) = events(writer.path, "X")
    assert span["name"] == 'na"me\\ \u00e9\n'
    assert span["dur"] == 0
    assert span["args"]["nan"] == "nan"
    assert span["args"]["deep"] == {"inf": "inf"}
    assert len(writer.path.read_text().splitlines()) == len(events(writer.path)) + 2


def test_times_are_shifted_from_the_moment_the_offset_is_known(writer: TimelineWriter) -> None:
    writer.span("step", "before", 10_000, 20_000)
    writer.set_clock(ClockOffset(-4_000_001, 500, "exchange"))
    writer.span("step", "after", 10_000, 20_000)
    writer.close()
    before, after = events(writer.path, "X")
    assert before["ts"] == 10.0
    assert after["ts"] == -3990.001
    told = [event["args"] for event in events(writer.path, "M") if event["name"] == "crossover_clock"]
    assert told[-1] == {"offset_ns": -4_000_001, "error_ns": 500, "method": "exchange"}


def test_earlier_timeline_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    for name in ("old", "new"):
        writer = TimelineWriter(tmp_path)
        writer.span("step", name, 0, 1)
        writer.close()
    kept = writer.path.with_name("timeline.rank0.json.previous")
    assert [event["name"] for event in events(kept, "X")] == ["old"]
    assert [event["name"] for event in events(writer.path, "X")] == ["new"]


def test_module_functions_do_nothing_when_off_and_write_when_on(tmp_path: Path) -> None:
    assert timeline.active() is None
    timeline.span("step", "lost", 0, 1)
    timeline.instant("gate", "lost")
    timeline.counter("queue", 1.0)
    timeline.stop()
    try:
        writer = timeline.start(tmp_path, rank=0)
        assert timeline.active() is writer
        with pytest.raises(ValueError, match="call stop"):
            timeline.start(tmp_path, rank=0)
        timeline.span("step", "kept", 0, 1)
        timeline.instant("gate", "kept")
        timeline.counter("queue", 1.0)
    finally:
        timeline.stop()
    assert timeline.active() is None
    assert [event["name"] for event in events(writer.path) if event["ph"] in "XiC"] == ["kept", "kept", "queue"]


def test_bad_path_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"timeline: cannot write .* give a path"):
        timeline.start(tmp_path / "file" / "run.json")
    assert timeline.active() is None
