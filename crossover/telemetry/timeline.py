"""A Chrome trace of each rank, which opens in https://ui.perfetto.dev and in chrome://tracing.

The file is the format's array of events, one event a line, with the comma *before* each further event. A killed
process's file lacks only the closing bracket, which the format makes optional; ``json.loads(text + "]")`` reads it too.
Events are written by a thread of their own at least four times a second, so a kill loses at most that much.

Times are nanoseconds of ``time.perf_counter_ns()`` and are written on rank 0's clock once the writer knows the offset.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from crossover.telemetry.background import CLOSE_TIMEOUT_S, Background
from crossover.telemetry.clock import NOT_ALIGNED, ClockOffset, align_clock, now_ns
from crossover.telemetry.files import open_for_writing, rank_path, write_all, write_first
from crossover.telemetry.trace_events import TRACK_ORDER, Args, Encoder, Item
from crossover.telemetry.trace_merge import Merged, merge

__all__ = [
    "TRACK_ORDER",
    "ClockOffset",
    "Merged",
    "TimelineWriter",
    "active",
    "align_clock",
    "counter",
    "instant",
    "merge",
    "now_ns",
    "span",
    "start",
    "stop",
]

MIN_BYTES = 16 * 1024
_RESERVE = 1024  # for the notice that ends a full file, and the bracket


class TimelineWriter:
    """Writes one rank's trace. Never waits for the disk and never fails a training: errors end it with one warning.

    A file of the same name, from an earlier run, is kept as ``NAME.previous``.

    Args:
        path: file name, to which the rank is added (``run.json`` gives ``run.rank0.json``), or a directory.
        rank: global rank; the trace's process number.
        max_bytes: size at which the trace ends, with an event that says so; at least 16 KiB.
        capacity: events that may wait to be written; beyond it they are dropped, and an event says how many.

    Attributes:
        path: the file of this rank.
        full: whether nothing more is written, for size or because of an error.

    Raises:
        ValueError: the file cannot be written, or ``max_bytes`` is too small.

    Example:
        >>> import tempfile, time
        >>> from crossover.telemetry.timeline import TimelineWriter
        >>> writer = TimelineWriter(tempfile.mkdtemp())
        >>> begun = time.perf_counter_ns()
        >>> writer.span("communication", "bucket 0", begun, time.perf_counter_ns(), {"bytes": 4096})
        >>> writer.close()
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int = 0, *, max_bytes: int = 64 << 20, capacity: int = 65_536
    ) -> None:
        if max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes: got {max_bytes!r}, must be at least {MIN_BYTES}; the default is 64 MiB")
        self.path: Path = rank_path(path, rank, "timeline.json")
        self.full = False
        if self.path.is_file() and self.path.stat().st_size:
            _keep_previous(self.path)
        self._descriptor = open_for_writing(self.path, "timeline", append=False)
        self._max_bytes = max_bytes
        self._reported_drops = 0
        self._encoder = Encoder(rank)
        beginning = ("[\n" + ",\n".join(self._encoder.header(NOT_ALIGNED))).encode()
        write_first(self._descriptor, beginning, self.path, "timeline")
        self._written = len(beginning)
        self._background: Background[Item] = Background(
            self._write, self._finish, name=f"crossover-timeline-{rank}", capacity=capacity, interval_s=0.25
        )

    @property
    def dropped(self) -> int:
        """Events lost because they came faster than they could be written."""
        return self._background.dropped

    def span(self, track: str, name: str, start_ns: int, end_ns: int, args: Args | None = None) -> None:
        """Something that took from ``start_ns`` to ``end_ns``.

        Spans of one track that overlap without nesting get rows of their own, as viewers need it.

        Args:
            track: the row, for example one of :data:`TRACK_ORDER`; ``communication nccl`` for one of several links.
            name: what happened.
            start_ns: nanoseconds of ``time.perf_counter_ns()``.
            end_ns: the same clock.
            args: shown when the span is selected; not to be changed afterwards.
        """
        if not self.full:
            self._background.put(("X", track, name, start_ns, end_ns, args))

    def instant(self, track: str, name: str, at_ns: int | None = None, args: Args | None = None) -> None:
        """Something that happened at ``at_ns``, by default now."""
        if not self.full:
            self._background.put(("i", track, name, now_ns() if at_ns is None else at_ns, args))

    def counter(self, name: str, values: float | dict[str, float], at_ns: int | None = None) -> None:
        """Values that hold from ``at_ns`` on, by default from now; several are stacked in one graph."""
        if not self.full:
            series = values if isinstance(values, dict) else {name: values}
            self._background.put(("C", name, now_ns() if at_ns is None else at_ns, series))

    def set_clock(self, clock: ClockOffset) -> None:
        """Shift all later events onto rank 0's clock, as found by :func:`align_clock`."""
        self._background.put(("clock", clock))

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until what was given before is with the operating system; ``False`` if ``timeout_s`` passed first."""
        return self._background.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write what is queued, within ``timeout_s``, and close the array and the file."""
        self._background.close(timeout_s)

    def _write(self, batch: list[Item]) -> None:
        if self.full:
            return
        try:
            self._append([event for item in batch for event in self._encoder.encode(item)] + self._drops())
        except Exception as error:
            self.full = True
            warnings.warn(
                f"timeline {str(self.path)!r} ends here ({type(error).__name__}: {error}); training goes on without it",
                RuntimeWarning,
                stacklevel=2,
            )

    def _drops(self) -> list[str]:
        dropped, new = self.dropped, self.dropped - self._reported_drops
        self._reported_drops = dropped
        return [self._encoder.notice(f"{new} events dropped", now_ns(), {"dropped_so_far": dropped})] if new else []

    def _append(self, events: list[str]) -> None:
        data = "".join(",\n" + event for event in events).encode()
        if self._written + len(data) > self._max_bytes - _RESERVE:
            self.full = True
            data = self._what_fits(events)
        write_all(self._descriptor, data)
        self._written += len(data)

    def _what_fits(self, events: list[str]) -> bytes:
        room = self._max_bytes - _RESERVE - self._written
        lines = []
        for event in events:
            lines.append((",\n" + event).encode())
            room -= len(lines[-1])
            if room < 0:
                lines.pop()
                break
        limit = {"max_bytes": self._max_bytes}
        lines.append((",\n" + self._encoder.notice("timeline full: nothing after this", now_ns(), limit)).encode())
        return b"".join(lines)

    def _finish(self) -> None:
        try:
            if self._background.failure is None:
                write_all(self._descriptor, b"\n]\n")
        finally:
            os.close(self._descriptor)


def _keep_previous(path: Path) -> None:
    try:
        os.replace(path, path.with_name(path.name + ".previous"))
    except OSError:
        return  # open_for_writing gives the reason, with the argument named


_active: TimelineWriter | None = None


def active() -> TimelineWriter | None:
    """The writer in use, or ``None`` when the timeline is off."""
    return _active


def start(path: str | os.PathLike[str], rank: int = 0, *, max_bytes: int = 64 << 20) -> TimelineWriter:
    """Turn the timeline on for this process. Arguments and errors as of :class:`TimelineWriter`.

    Raises:
        ValueError: it is on already.
    """
    global _active
    if _active is not None:
        raise ValueError(f"timeline: {str(_active.path)!r} is being written already; call stop() first")
    _active = TimelineWriter(path, rank, max_bytes=max_bytes)
    return _active


def stop() -> None:
    """Write out, close and turn off. Does nothing when off."""
    global _active
    writer, _active = _active, None
    if writer is not None:
        writer.close()


def span(track: str, name: str, start_ns: int, end_ns: int, args: Args | None = None) -> None:
    """:meth:`TimelineWriter.span` on the active writer, if any."""
    if _active is not None:
        _active.span(track, name, start_ns, end_ns, args)


def instant(track: str, name: str, at_ns: int | None = None, args: Args | None = None) -> None:
    """:meth:`TimelineWriter.instant` on the active writer, if any."""
    if _active is not None:
        _active.instant(track, name, at_ns, args)


def counter(name: str, values: float | dict[str, float], at_ns: int | None = None) -> None:
    """:meth:`TimelineWriter.counter` on the active writer, if any."""
    if _active is not None:
        _active.counter(name, values, at_ns)
