from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossover import telemetry
from crossover.telemetry import timeline
from tests.telemetry.fake_ranks import ThreadRank, on_ranks
from tests.telemetry.samples import record


@pytest.fixture(autouse=True)
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("CROSSOVER_RECORDS", "CROSSOVER_TIMELINE", "CROSSOVER_TENSORBOARD"):
        monkeypatch.delenv(variable, raising=False)
    assert telemetry.active() is None
    yield
    telemetry.stop()


def test_off_means_nothing_at_all(tmp_path: Path) -> None:
    before = threading.active_count()
    assert telemetry.start_from_environment(0, None) is None
    assert telemetry.active() is None
    assert timeline.active() is None
    assert threading.active_count() == before
    telemetry.stop()


def test_start_opens_what_was_asked_and_stop_closes_it(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    recorder = telemetry.start(tmp_path / "records", tmp_path / "run.json", loggers=[rows.append], rank=3)
    assert telemetry.active() is recorder
    recorder.emit(record(0, rank=3))
    timeline.span("step", "step 0", 0, 1)
    telemetry.stop()
    assert telemetry.active() is timeline.active() is None
    assert len(rows) == 1
    assert len((tmp_path / "records" / "records.rank3.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "run.rank3.json").read_text())[-1]["name"] == "step 0"
    recorder.emit(record(1))
    assert len(rows) == 1


def test_second_start_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    recorder = telemetry.start(timeline=tmp_path / "run.json")
    with pytest.raises(ValueError, match="on already; call"):
        telemetry.start()
    assert telemetry.active() is recorder
    assert timeline.active() is not None


def test_failed_start_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = threading.active_count()
    with pytest.raises(ValueError, match="timeline: cannot write"):
        telemetry.start(records=tmp_path, timeline=tmp_path / "file" / "run.json")
    assert telemetry.active() is timeline.active() is None
    assert threading.active_count() == before


def test_failed_start_leaves_a_timeline_of_the_users_own_running(tmp_path: Path) -> None:
    writer = timeline.start(tmp_path / "own.json")
    with pytest.raises(ValueError, match="written already"):
        telemetry.start(timeline=tmp_path / "run.json")
    assert timeline.active() is writer


def test_environment_turns_on_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_RECORDS", str(tmp_path / "records"))
    monkeypatch.setenv("CROSSOVER_TIMELINE", str(tmp_path / "run.json"))
    recorder = telemetry.start_from_environment(1, None)
    assert recorder is telemetry.active() is not None
    assert telemetry.start_from_environment(1, None) is recorder
    telemetry.stop()
    assert (tmp_path / "records" / "records.rank1.jsonl").is_file()
    assert (tmp_path / "run.rank1.json").is_file()


def test_bad_path_in_the_environment_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CROSSOVER_RECORDS", str(tmp_path / "file" / "records"))
    with pytest.raises(ValueError, match="records: cannot write"):
        telemetry.start_from_environment(0, None)


def test_error_of_one_rank_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(timeline, "_active", None)

    def begin(communicator: ThreadRank) -> str:
        path = tmp_path / "file" / "x" if communicator.rank == 1 else tmp_path / "good"
        with pytest.raises(ValueError, match="cannot write") as caught:
            telemetry.start(records=path, communicator=communicator)
        return str(caught.value)

    messages, meeting = on_ranks(3, begin)
    assert messages[1].startswith("records: cannot write")
    for rank in (0, 2):
        assert messages[rank].startswith("telemetry could not start on another rank. rank 1: records: cannot write")
    assert all(names == meeting.names[0] for names in meeting.names)


def test_rank_comes_from_the_communicator(tmp_path: Path) -> None:
    communicator = ThreadRank(0, 1, None)  # type: ignore[arg-type]
    communicator.ranks = (5,)
    telemetry.start(tmp_path, tmp_path / "run.json", communicator=communicator)
    telemetry.stop()
    header = json.loads((tmp_path / "records.rank5.jsonl").read_text().splitlines()[0])
    assert (header["rank"], header["size"]) == (5, 1)
    clocks = [e for e in json.loads((tmp_path / "run.rank5.json").read_text()) if e["name"] == "crossover_clock"]
    assert clocks[-1]["args"]["method"] == "same clock"


def test_ranks_without_the_environment_take_part_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host got CROSSOVER_TIMELINE, the other did not: the same collectives on both, and no hang."""
    here = threading.local()

    class PerRank(dict[str, str]):
        def get(self, name: str, default: str | None = None) -> str | None:  # type: ignore[override]
            return (
                str(tmp_path / "run.json")
                if (getattr(here, "rank", None), name) == (1, "CROSSOVER_TIMELINE")
                else default
            )

    monkeypatch.setattr(telemetry.os, "environ", PerRank())

    def begin(communicator: ThreadRank) -> None:
        here.rank = communicator.rank
        telemetry.start_from_environment(communicator.rank, communicator)

    _, meeting = on_ranks(2, begin)
    telemetry.stop()
    assert meeting.names[0] == meeting.names[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run.rank1.json"]


def test_tensorboard_scalars_are_those_of_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = telemetry.start(tensorboard=tmp_path)
    for step in range(20):
        recorder.emit(record(step, bytes_sent=step * 10, extra={"significance": step / 4, "schedule": "overlapped"}))
    telemetry.stop()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(item.step, item.value) for item in events.Scalars("crossover/bytes_sent")] == [
        (step, step * 10.0) for step in range(20)
    ]
    assert [item.value for item in events.Scalars("crossover/significance")] == [step / 4 for step in range(20)]
    assert len(events.Scalars("crossover/step_s")) == 19
    assert "crossover/schedule" not in events.Tags()["scalars"]
    assert events.Scalars("crossover/exposed_s")[3].wall_time == pytest.approx(1_000_003.0)


def test_tensorboard_is_for_rank_0_unless_asked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    telemetry.start(tensorboard=tmp_path / "one", rank=1)
    telemetry.stop()
    telemetry.start(tensorboard=tmp_path / "all", rank=1, all_ranks=True)
    telemetry.stop()
    assert not (tmp_path / "one").exists()
    assert list((tmp_path / "all" / "rank1").iterdir())
