from __future__ import annotations

import logging
import threading
import warnings
from typing import Any

import pytest

from crossover.telemetry import Recorder, Sink, StepRecord
from tests.telemetry.samples import record


class Failing(Sink):
    def __init__(self) -> None:
        self.calls = 0

    def log(self, record: StepRecord) -> None:
        self.calls += 1
        raise OSError("no space left")


class Collecting(Sink):
    def __init__(self) -> None:
        self.seen: list[StepRecord] = []

    def log(self, record: StepRecord) -> None:
        self.seen.append(record)


def emit_all(recorder: Recorder, steps: int) -> None:
    for step in range(steps):
        recorder.emit(record(step))


def test_ring_keeps_the_newest_and_never_more_than_its_capacity() -> None:
    recorder = Recorder(capacity=10)
    emit_all(recorder, 25)
    assert len(recorder) == 10
    assert [item.step for item in recorder] == list(range(15, 25))


@pytest.mark.parametrize("capacity", [0, -3])
def test_capacity_below_one_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity: got {capacity}"):
        Recorder(capacity=capacity)


def test_record_survives_its_dictionary_and_ignores_later_keys() -> None:
    original = record(3, rank=1, extra={"significance": 0.25, "vote": True, "schedule": "overlapped"})
    assert StepRecord.from_dict({**original.as_dict(), "key_of_a_later_version": 1}) == original


def test_flat_form_puts_extra_beside_the_fields_and_omits_unknown_times() -> None:
    flat = record(0, extra={"significance": 0.25}).flat()
    assert flat["crossover/significance"] == 0.25
    assert flat["crossover/bytes_sent"] == 1000
    assert "crossover/step_s" not in flat
    assert "crossover/extra" not in flat


def test_extra_cannot_hide_a_field() -> None:
    assert record(7, extra={"step": 99}).flat()["crossover/step"] == 7


def test_failing_sink_is_dropped_with_one_warning_and_the_others_go_on() -> None:
    recorder, failing, collecting = Recorder(rank=3), Failing(), Collecting()
    recorder.subscribe(failing)
    recorder.subscribe(collecting)
    with pytest.warns(RuntimeWarning, match=r"rank 3: Failing failed .*no space left") as caught:
        emit_all(recorder, 5)
    assert len(caught) == 1
    assert failing.calls == 1
    assert [item.step for item in collecting.seen] == [0, 1, 2, 3, 4]


def test_sink_that_fails_when_closed_does_not_keep_others_open() -> None:
    class FailsLate(Collecting):
        def close(self) -> None:
            raise OSError("gone")

    class Closing(Collecting):
        closed = False

        def close(self) -> None:
            self.closed = True

    recorder, closing = Recorder(), Closing()
    recorder.subscribe(FailsLate())
    recorder.subscribe(closing)
    with pytest.warns(RuntimeWarning, match="FailsLate"):
        recorder.close()
    assert closing.closed


def test_logger_objects_and_callables_get_flat_dictionaries() -> None:
    class Run:
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def log(self, values: dict[str, Any]) -> None:
            self.rows.append(values)

    run, rows, recorder = Run(), [], Recorder()
    recorder.subscribe(run)
    recorder.subscribe(rows.append)
    recorder.emit(record(4))
    assert run.rows == rows == [record(4).flat()]


@pytest.mark.parametrize("logger", [logging.getLogger("x"), object(), "tensorboard"])
def test_objects_that_cannot_take_records_are_refused(logger: object) -> None:
    with pytest.raises(ValueError, match="loggers:"):
        Recorder().subscribe(logger)


def test_unsubscribed_sink_gets_nothing_more() -> None:
    recorder, collecting = Recorder(), Collecting()
    sink = recorder.subscribe(collecting)
    recorder.emit(record(0))
    recorder.unsubscribe(sink)
    recorder.unsubscribe(sink)
    recorder.emit(record(1))
    assert [item.step for item in collecting.seen] == [0]


def test_summary_is_exact_on_a_hand_made_set() -> None:
    recorder = Recorder()
    recorder.emit(record(0, exposed_s=5.0))  # its step time is unknown: its wait is in no share
    recorder.emit(record(1, step_s=0.010, exposed_s=0.001))
    recorder.emit(record(2, step_s=0.030, exposed_s=0.009))
    recorder.emit(record(3, step_s=0.020, exposed_s=0.0, synchronised=False, bytes_sent=0, collectives=0))
    summary = recorder.summary()
    assert (summary.steps, summary.timed_steps, summary.synchronised_steps) == (4, 3, 3)
    assert summary.median_step_s == 0.020
    assert summary.median_busy_s == 0.020
    assert summary.median_exposed_s == pytest.approx(0.005)
    assert summary.exposed_share == pytest.approx(0.010 / 0.060)
    assert summary.mean_exposed_s == pytest.approx(0.010 / 3)
    assert summary.synchronised_share == 0.75
    assert (summary.bytes_sent, summary.collectives) == (3000, 6)
    assert summary.total_hidden_s == pytest.approx(0.012)
    assert summary.total_communication_s == pytest.approx(0.016)


def test_summary_of_nothing_claims_nothing() -> None:
    summary = Recorder().summary()
    assert summary.steps == 0
    assert summary.median_step_s is summary.exposed_share is summary.synchronised_share is None


def test_without_sinks_no_thread_is_started_and_nothing_warns() -> None:
    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder = Recorder()
        recorder.emit(record())
        recorder.flush()
        recorder.close()
    assert threading.active_count() == before
    assert len(recorder) == 1
