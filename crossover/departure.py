"""How a rank leaves a job: orderly, or by an exception that the other ranks should hear of."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType

from crossover.comm.board import Board, State
from crossover.errors import CommunicationError

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_exit_code: int | None = None


class Departure:
    """Watches the end of this process for as long as a job runs.

    Args:
        board: where an unhandled exception is posted.
        leave: called at a normal end of the interpreter.
    """

    def __init__(self, board: Board, leave: Callable[[], None]) -> None:
        self._board = board
        self._leave = leave
        self._previous: _Hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        """Stop watching."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous
        self._board = Board(None, 0)  # where another hook was chained on top, ours only passes on

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        global _exit_code
        if not hasattr(sys, "ps1"):  # at a prompt the process goes on
            _exit_code = 130 if issubclass(kind, KeyboardInterrupt) else 1
            if not isinstance(error, CommunicationError):  # it has said what it waited for, which tells more
                self._board.post(State.RAISED, f"{kind.__name__}: {error}")
        self._previous(kind, error, traceback)

    def _at_exit(self) -> None:
        if _exit_code is None:
            self._leave()


def _end_now() -> None:
    """Skip the interpreter's tear-down after an unhandled exception.

    Destroying a process group waits for its collectives, and the other ranks wait for this process to end.
    """
    if _exit_code is not None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(_exit_code)


atexit.register(_end_now)  # at import, so before others: what they register runs first
