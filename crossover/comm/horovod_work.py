"""Collectives under way on Horovod's engine, and the wait for them, which sleeps and ends in a named time-out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd

from crossover.comm.communicator import Work
from crossover.comm.vigil import Vigil
from crossover.comm.waiting import waiting

_SHORTEST_SLEEP = 50e-6
_LONGEST_SLEEP = 1e-3


class HorovodWork(Work):
    """A Horovod handle, and what remains to be done with its result.

    Args:
        vigil: bounds the wait and names who is missing.
        name: for messages.
        handle: Horovod's.
        forget: called once it has been waited for.
        finish: called with the result.
    """

    __slots__ = ("_finish", "_forget", "_handle", "_sleep", "_vigil", "name")

    def __init__(
        self,
        vigil: Vigil,
        name: str,
        handle: int,
        forget: Callable[[], None],
        finish: Callable[[Any], object] | None,
    ) -> None:
        self._vigil = vigil
        self._forget = forget
        self._handle: int | None = handle
        self._finish = finish
        self._sleep = _SHORTEST_SLEEP
        self.name = name

    def wait(self) -> None:
        """See :meth:`Work.wait`. Sleeps between looks: Horovod's own wait takes a whole core from what it waits for."""
        if self._handle is None:
            return
        started = time.monotonic()
        try:
            if not hvd.poll(self._handle):
                with waiting():
                    self._vigil.wait(self.name, self._poll)
            result = self._result(started)
        finally:
            self._handle = None
            self._forget()
        if self._finish is not None:
            self._finish(result)

    def _poll(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not hvd.poll(self._handle):
            if time.monotonic() >= deadline:
                return False
            time.sleep(self._sleep)
            self._sleep = min(self._sleep * 1.5, _LONGEST_SLEEP)
        return True

    def _result(self, started: float) -> Any:
        try:
            return hvd.synchronize(self._handle)
        except RuntimeError as error:
            raise self._vigil.failure(self.name, time.monotonic() - started, error) from error

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`."""
        return self._handle is None or bool(hvd.poll(self._handle))


class Chained(Work):
    """A work with something to do after it."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish
        self.name = work.name

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`."""
        return self._work.is_completed()
