from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from crossover.telemetry import JsonLines, Recorder, StepRecord, sinks
from tests.telemetry.samples import record

WRITE_UNTIL_KILLED = """
import sys, time
from crossover.telemetry import JsonLines
from tests.telemetry.samples import record
sink = JsonLines(sys.argv[1], rank=2, size=3)
step = 0
while True:
    sink.log(record(step, rank=2))
    step += 1
    if step == 200:
        sink.flush()
        print("written", flush=True)
    time.sleep(0.0005)
"""


def emit_and_close(recorder: Recorder, steps: int) -> None:
    for step in range(steps):
        recorder.emit(record(step))
    recorder.close()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_file_name_carries_the_rank(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "new" / "dir", "records.rank7.jsonl"), (tmp_path / "a.jsonl", "a.rank7.jsonl")):
        sink = JsonLines(path, rank=7)
        sink.close()
        assert sink.path.name == expected
        assert sink.path.is_file()


def test_header_then_one_line_a_record(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path, rank=1, size=2)
    for step in range(300):
        sink.log(record(step, rank=1))
    sink.close()
    header, *steps = lines(sink.path)
    assert (header["kind"], header["rank"], header["size"]) == ("run", 1, 2)
    assert [StepRecord.from_dict(line) for line in steps] == [record(step, rank=1) for step in range(300)]


def test_numbers_that_json_lacks_do_not_break_the_file(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path)
    sink.log(record(0, extra={"significance": math.nan, "ratio": math.inf, "loss": 1.5}))
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    last = json.loads(sink.path.read_text().splitlines()[-1], parse_constant=refuse)
    assert last["extra"] == {"significance": "nan", "ratio": "inf", "loss": 1.5}


def test_every_line_is_whole_after_a_kill(tmp_path: Path) -> None:
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
    text = (tmp_path / "records.rank2.jsonl").read_text()
    assert text.endswith("\n")
    _, *steps = (json.loads(line) for line in text.splitlines())
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert len(steps) >= 200


def test_next_run_does_not_continue_a_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "records.rank0.jsonl"
    path.write_text('{"kind": "run", "rank": 0, "size": 1}\n{"kind": "st')
    sink = JsonLines(tmp_path)
    sink.log(record(0))
    sink.close()
    _, broken, header, step = path.read_text().splitlines()
    assert broken == '{"kind": "st'
    assert json.loads(header)["kind"] == "run"
    assert json.loads(step)["kind"] == "step"


def test_disk_that_fills_up_costs_one_warning_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, recorder = JsonLines(tmp_path), Recorder()
    recorder.subscribe(sink)

    def full(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sinks, "write_all", full)
    recorder.emit(record(0))
    sink.flush()
    with pytest.warns(RuntimeWarning, match=r"records\.rank0\.jsonl.*No space left") as caught:
        emit_and_close(recorder, 49)
    assert len(caught) == 1
    assert len(recorder) == 50


def test_path_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"records: cannot write .*file/sub/records.*give a path") as caught:
        JsonLines(tmp_path / "file" / "sub")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_disk_that_takes_nothing_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "records.rank0.jsonl").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"records: cannot write.*No space left"):
        JsonLines(tmp_path)
