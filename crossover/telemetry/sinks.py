"""Where records go: a file of JSON lines per rank, or any logger object."""

from __future__ import annotations

import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossover.telemetry.background import Background
from crossover.telemetry.files import open_for_writing, rank_path, to_json, write_all, write_first

if TYPE_CHECKING:
    from crossover.telemetry.records import StepRecord


class Sink(ABC):
    """Takes records. Called from the training thread, so it must return at once; raising makes the recorder drop it."""

    @abstractmethod
    def log(self, record: StepRecord) -> None:
        """Take one record."""

    def flush(self) -> None:
        """Write out what is held back."""

    def close(self) -> None:
        """Write out and release everything."""

    def __str__(self) -> str:
        return type(self).__name__


class LoggerSink(Sink):
    """Gives each record, as a flat dictionary with keys ``crossover/...``, to a logger object or a callable.

    Args:
        logger: has ``log(dict)``, or is called with the dictionary. Called in the training thread.

    Raises:
        ValueError: it is neither, or a ``logging.Logger``, whose ``log`` means something else.
    """

    def __init__(self, logger: Any) -> None:
        if isinstance(logger, logging.Logger):
            raise ValueError(
                f"loggers: {logger!r} takes text, not dictionaries; "
                f"pass a callable instead, for example: lambda values: logger.info('%s', values)"
            )
        log = getattr(logger, "log", logger)
        if not callable(log):
            raise ValueError(
                f"loggers: got {logger!r}, must be an object with a log(dict) method or a callable taking a dict"
            )
        self._log: Callable[[dict[str, Any]], Any] = log
        self._label = f"logger {type(logger).__name__}"

    def log(self, record: StepRecord) -> None:
        """Call the logger."""
        self._log(record.flat())

    def __str__(self) -> str:
        return self._label


class JsonLines(Sink):
    """Appends each record as a line of JSON to this rank's file, from a thread of its own.

    The first line of each run has ``"kind": "run"`` and says which rank of how many wrote it, when and where; each
    further line has ``"kind": "step"`` and the fields of :class:`~crossover.telemetry.StepRecord`. Lines are written
    whole at least every second, so a kill loses at most that second and leaves a readable file. Nothing waits for the
    disk: if it falls behind by ``capacity`` records, further ones are left out and counted in ``dropped``.

    Args:
        path: a directory (the file is then ``records.rank0.jsonl``) or a file name, to which the rank is added.
        rank: global rank.
        size: number of ranks, where known.
        capacity: records that may wait to be written.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int = 0, size: int | None = None, capacity: int = 100_000
    ) -> None:
        self.path: Path = rank_path(path, rank, "records.jsonl")
        header = {"kind": "run", "rank": rank, "size": size, "started_s": time.time(), "host": socket.gethostname()}
        self._descriptor = open_for_writing(self.path, "records", append=True)
        start = "" if _ends_with_newline(self.path) else "\n"  # a killed run may have left half a line
        write_first(self._descriptor, f"{start}{to_json(header)}\n".encode(), self.path, "records")
        self._background: Background[StepRecord] = Background(
            self._write, self._finish, name=f"crossover-records-{rank}", capacity=capacity, interval_s=0.5
        )

    @property
    def dropped(self) -> int:
        """Records left out because the disk was too slow."""
        return self._background.dropped

    def log(self, record: StepRecord) -> None:
        """Queue ``record``.

        Raises:
            OSError: an earlier record could not be written.
        """
        if self._background.failure is not None:
            raise self._background.failure
        self._background.put(record)

    def flush(self) -> None:
        """Wait, at most five seconds, until everything is with the operating system."""
        self._background.flush()

    def close(self) -> None:
        """Write what is queued and close the file.

        Raises:
            OSError: a record could not be written.
        """
        self._background.close()
        if self._background.failure is not None:
            raise self._background.failure

    def __str__(self) -> str:
        return f"records file {str(self.path)!r}"

    def _write(self, records: list[StepRecord]) -> None:
        lines = [to_json({"kind": "step", **record.as_dict()}) for record in records]
        write_all(self._descriptor, ("\n".join(lines) + "\n").encode())

    def _finish(self) -> None:
        os.close(self._descriptor)


def _ends_with_newline(path: Path) -> bool:
    if path.stat().st_size == 0:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
