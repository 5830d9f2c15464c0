"""Records as TensorBoard scalars. Needs the extra ``tensorboard``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from crossover.telemetry.background import Background
from crossover.telemetry.files import cannot_write
from crossover.telemetry.sinks import Sink

if TYPE_CHECKING:
    from crossover.telemetry.records import StepRecord


class TensorBoard(Sink):
    """Writes the numbers of each record under ``crossover/...``, one event a step, from a thread of its own.

    Meant for rank 0; given to further ranks, each needs a ``logdir`` of its own.

    Args:
        logdir: directory of the event file; made if missing.

    Raises:
        ImportError: TensorBoard is not installed.
        ValueError: ``logdir`` cannot be written.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped, unused-ignore]
            from torch.utils.tensorboard import FileWriter
        except ImportError as error:
            raise ImportError(
                "tensorboard: TensorBoard is not installed; pip install 'crossover[tensorboard]', or leave it out"
            ) from error
        self.logdir = os.fspath(logdir)
        try:
            os.makedirs(self.logdir, exist_ok=True)
            self._writer: Any = FileWriter(self.logdir, max_queue=1000, flush_secs=10, filename_suffix=".crossover")
        except OSError as error:
            raise cannot_write(self.logdir, "tensorboard", error) from error
        self._summary: Any = Summary
        self._background: Background[StepRecord] = Background(
            self._write, self._finish, name="crossover-tensorboard", capacity=10_000, interval_s=1.0, chunk=8
        )

    def log(self, record: StepRecord) -> None:
        """Queue ``record``.

        Raises:
            OSError: an earlier record could not be written.
        """
        if self._background.failure is not None:
            raise self._background.failure
        self._background.put(record)

    def flush(self) -> None:
        """Wait, at most five seconds, until queued records are in the event file."""
        if self._background.flush():
            self._writer.flush()

    def close(self) -> None:
        """Write what is queued and close the event file.

        Raises:
            OSError: a record could not be written.
        """
        self._background.close()
        if self._background.failure is not None:
            raise self._background.failure

    def __str__(self) -> str:
        return f"TensorBoard in {self.logdir!r}"

    def _write(self, records: list[StepRecord]) -> None:
        for record in records:
            numbers = {name: value for name, value in record.flat().items() if not isinstance(value, str)}
            for name in ("step", "rank", "start_s", "wall_s"):
                del numbers[f"crossover/{name}"]
            values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()]
            self._writer.add_summary(self._summary(value=values), record.step, record.wall_s)

    def _finish(self) -> None:
        self._writer.close()
