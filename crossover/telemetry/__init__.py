"""What training did, step by step: records, their sinks, and a timeline. Off, and free, unless started.

>>> from crossover import telemetry
>>> recorder = telemetry.start()          # in memory only; give paths to write files
>>> telemetry.active() is recorder
True
>>> telemetry.stop()

Without changing a script, set any of ``CROSSOVER_RECORDS`` (directory), ``CROSSOVER_TIMELINE`` (file or directory) and
``CROSSOVER_TENSORBOARD`` (directory).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from crossover.telemetry import timeline as _timeline
from crossover.telemetry.clock import ClockOffset, align_clock
from crossover.telemetry.records import Recorder, StepRecord, Summary, summarise
from crossover.telemetry.sinks import JsonLines, LoggerSink, Sink
from crossover.telemetry.tensorboard import TensorBoard
from crossover.telemetry.timeline import TimelineWriter

if TYPE_CHECKING:
    from crossover.comm.communicator import Communicator

__all__ = [
    "ClockOffset",
    "JsonLines",
    "LoggerSink",
    "Recorder",
    "Sink",
    "StepRecord",
    "Summary",
    "TensorBoard",
    "TimelineWriter",
    "active",
    "align_clock",
    "start",
    "start_from_environment",
    "stop",
    "summarise",
]

RECORDS_VARIABLE = "CROSSOVER_RECORDS"
TIMELINE_VARIABLE = "CROSSOVER_TIMELINE"
TENSORBOARD_VARIABLE = "CROSSOVER_TENSORBOARD"

PathLike = str | os.PathLike[str]

_active: Recorder | None = None


def active() -> Recorder | None:
    """The recorder in use, or ``None`` when telemetry is off."""
    return _active


def start(
    records: PathLike | None = None,
    timeline: PathLike | None = None,
    tensorboard: PathLike | None = None,
    loggers: Iterable[Any] = (),
    communicator: Communicator | None = None,
    *,
    rank: int | None = None,
    all_ranks: bool = False,
) -> Recorder:
    """Turn telemetry on for this process.

    Collective if ``communicator`` is given: every rank of it calls this, though the other arguments may differ by
    rank. It tells the rank, puts the timelines on rank 0's clock, and makes an error on one rank an error on all.

    Args:
        records: directory (or file name, to which the rank is added) for JSON lines, about 300 bytes a step.
        timeline: file name, to which the rank is added, or directory, for a Chrome trace of at most 64 MiB.
        tensorboard: directory for TensorBoard scalars. Of rank 0 only, unless ``all_ranks``.
        loggers: objects with ``log(dict)`` or callables, given this rank's records; to log one rank,
            pass them on that rank only.
        communicator: the ranks that train together.
        rank: this process's rank, where there is no communicator.
        all_ranks: whether every rank writes TensorBoard scalars, into a directory ``rank0``, ``rank1``, ... each.

    Raises:
        ValueError: telemetry is on already, or a path cannot be written; on every rank, with the first such rank named.
        ImportError: ``tensorboard`` was asked for and is not installed.
    """
    global _active
    if communicator is not None:
        rank = communicator.ranks[communicator.rank]
    recorder = Recorder(rank or 0)
    writer: TimelineWriter | None = None
    problem: Exception | None = None
    try:
        _check_off()
        for sink in _sinks(records, tensorboard, recorder.rank, communicator, all_ranks):
            recorder.subscribe(sink)
        for logger in loggers:
            recorder.subscribe(logger)
        writer = None if timeline is None else _timeline.start(timeline, recorder.rank)
    except (ValueError, ImportError) as error:
        problem = error
    try:
        _agree(problem, writer, recorder.rank, communicator)
    except Exception:
        recorder.close()
        if writer is not None:
            _timeline.stop()
        raise
    _active = recorder
    return recorder


def _sinks(
    records: PathLike | None,
    tensorboard: PathLike | None,
    rank: int,
    communicator: Communicator | None,
    all_ranks: bool,
) -> Iterator[Sink]:
    if records is not None:
        yield JsonLines(records, rank, None if communicator is None else communicator.size)
    if tensorboard is not None and (rank == 0 or all_ranks):
        yield TensorBoard(os.path.join(tensorboard, f"rank{rank}") if all_ranks else tensorboard)


def stop() -> None:
    """Write out everything and turn telemetry off. Local; does nothing when off."""
    global _active
    recorder, _active = _active, None
    _timeline.stop()
    if recorder is not None:
        recorder.close()


def start_from_environment(rank: int = 0, communicator: Communicator | None = None) -> Recorder | None:
    """Turn on what the environment asks for, if anything; what is running already goes on instead.

    Collective if ``communicator`` is given: launchers do not always pass the environment to every host, so the ranks
    first tell each other, and those without any of the variables only take part in aligning the clocks.

    Raises:
        ValueError: a path cannot be written; on every rank.
    """
    variables = (RECORDS_VARIABLE, TIMELINE_VARIABLE, TENSORBOARD_VARIABLE)
    records, timeline, tensorboard = (os.environ.get(variable) or None for variable in variables)
    asked = _active is None and any((records, timeline, tensorboard))
    asked_anywhere = asked
    if communicator is not None and communicator.size > 1:
        asked_anywhere = any(communicator.all_gather_object(asked, name="telemetry.asked"))
    if not asked_anywhere:
        return _active
    if asked:
        return start(records, timeline, tensorboard, communicator=communicator, rank=rank)
    _agree(None, None, rank, communicator)
    return _active


def _check_off() -> None:
    if _active is not None:
        raise ValueError("telemetry is on already; call crossover.telemetry.stop() first")


def _agree(
    problem: Exception | None, writer: TimelineWriter | None, rank: int, communicator: Communicator | None
) -> None:
    """Raise on every rank what one rank met; else align the clocks if any rank writes a timeline."""
    if communicator is None or communicator.size == 1:
        if problem is not None:
            raise problem
        if communicator is not None and writer is not None:
            writer.set_clock(ClockOffset(0, 0, "same clock"))
        return
    told = (None if problem is None else f"rank {rank}: {problem}", writer is not None)
    answers = communicator.all_gather_object(told, name="telemetry.start")
    if problem is not None:
        raise problem
    first = next((message for message, _ in answers if message is not None), None)
    if first is not None:
        raise ValueError(f"telemetry could not start on another rank. {first}")
    if not any(writes for _, writes in answers):
        return
    clock = align_clock(communicator)
    if writer is not None:
        writer.set_clock(clock)
