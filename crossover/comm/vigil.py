"""What a wait on other ranks does when it takes long: warns, gives up, and says who was missing."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch._C._autograd import _profiler_enabled

from crossover.comm.board import Board, State, Word
from crossover.errors import CommunicationError

_log = logging.getLogger("crossover.comm")
SLICE = 1.0  # seconds; Python handles Ctrl-C only between slices
_PATIENCE = 1.0  # seconds for the others' words to arrive: they fail at about the same time
_FIRST_LOOK = 0.5  # seconds of waiting; well within the others' patience. Each further look comes at twice the last


def profiler_span(name: str) -> AbstractContextManager[object]:
    """A span ``crossover::<name>`` in a running torch profiler; nothing where none runs."""
    if _profiler_enabled():
        return torch.profiler.record_function(f"crossover::{name}")
    return contextlib.nullcontext()


class Vigil:
    """Watches over the waits of one communicator.

    Args:
        backend: its name, for messages.
        rank: this process's place in the group.
        ranks: the members' global ranks, indexed by group rank.
        timeout: seconds after which a wait fails.
        stall_warning: seconds after which a wait is warned of; at most half the time-out is used, so that ranks that
            wait have said so when the first of them gives up.
        board: where ranks leave their words.
    """

    def __init__(
        self, backend: str, rank: int, ranks: Sequence[int], timeout: float, stall_warning: float, board: Board
    ) -> None:
        self._backend = backend
        self._me = ranks[rank]
        self._others = [other for place, other in enumerate(ranks) if place != rank]
        self.timeout = timeout
        self.stall_warning = stall_warning
        self.board = board
        self.first_slice = min(SLICE, timeout / 2, stall_warning)

    def wait(self, name: str, poll: Callable[[float], bool], waited: float = 0.0) -> None:
        """Wait until ``poll(seconds)``, which waits for at most that long, says that the collective is done.

        Args:
            name: of the collective.
            poll: raises ``RuntimeError`` where the collective failed.
            waited: seconds already spent.

        Raises:
            CommunicationError: the time-out passed, ``poll`` raised, or another rank said that it has failed: not
                every backend ends what waits for a rank that is gone.
        """
        started = time.monotonic() - waited
        warning_at = min(self.stall_warning, self.timeout / 2)
        look_at = _FIRST_LOOK
        warned = False
        while True:
            waited = time.monotonic() - started
            if waited >= self.timeout:
                raise self.failure(name, waited)
            if waited >= warning_at and not warned:
                self._warn(name, waited)
                warned = True
                continue
            if waited >= look_at:
                look_at = 2 * waited
                self._look_for_failures(name, waited)
                continue
            left = (self.timeout if warned else warning_at) - waited
            try:
                done = poll(min(SLICE, left, look_at - waited))
            except RuntimeError as error:
                raise self.failure(name, time.monotonic() - started, error) from error
            if done:
                if warned:  # else a later error elsewhere would find this rank still waiting here
                    self.board.post(State.WORKING, name)
                return

    def _look_for_failures(self, name: str, waited: float) -> None:
        if not self.board.alarmed():
            return
        words, _ = self.board.gather(self._others, 0.0)
        failed = [rank for rank in self._others if rank in words and words[rank].state.failed]
        if failed:
            raise self.failure(name, waited, RuntimeError(f"{_named(failed)} had failed"))

    def _warn(self, name: str, waited: float) -> None:
        self.board.post(State.WAITING, name, time.time() - waited)
        words, unreadable = self.board.gather(self._others, min(_PATIENCE, self.timeout / 4))
        _log.warning(
            "rank %d has waited %.0f s in %r (%s) and gives up after %.0f s.%s",
            self._me,
            waited,
            name,
            self._backend,
            self.timeout,
            self._report(words, unreadable),
        )

    def failure(self, name: str, waited: float, cause: BaseException | None = None) -> CommunicationError:
        """The error for a collective that failed (``cause``) or took too long, telling what the other ranks said."""
        self.board.post(State.GAVE_UP, name, time.time() - waited)
        words, unreadable = self.board.gather(self._others, _PATIENCE)
        if cause is None or waited > 0.95 * self.timeout:  # the backend's own time-out can be the first to pass
            what = f"did not finish within the time-out of {self.timeout:g} s"
        else:
            what = f"failed after {waited:.1f} s: {_first_sentence(cause)}"
        return CommunicationError(
            f"{name!r} on rank {self._me} of ranks {_listed([self._me, *self._others])} ({self._backend}) {what}."
            f"{self._report(words, unreadable)}{self._remedy(name, words, unreadable)}"
        )

    def _report(self, words: Mapping[int, Word], unreadable: str | None) -> str:
        silent = "no word" if unreadable else "no word: killed, or still computing"
        lines = [f"\n  rank {rank}: {words.get(rank, silent)}" for rank in self._others]
        return (f"\n  ({unreadable})" if unreadable else "") + "".join(lines)

    def _remedy(self, name: str, words: Mapping[int, Word], unreadable: str | None) -> str:
        raised = [rank for rank in self._others if rank in words and words[rank].state is State.RAISED]
        left = [rank for rank in self._others if rank in words and words[rank].state is State.LEFT]
        silent = [rank for rank in self._others if rank not in words or words[rank].state is State.WORKING]
        elsewhere = [rank for rank in self._others if rank in words and words[rank].text != name]
        if raised:
            advice = f"Absent: {_named(raised)}, ended by the exception above; look at its output."
        elif left:
            advice = (
                f"Absent: {_named(left)}, which ended before this rank; give all ranks the same number of steps, or "
                "end them with crossover.join()."
            )
        elif silent and not unreadable:
            advice = (
                f"Absent: {_named(silent)}; look at its output and its host (was it killed, for memory perhaps?). If "
                f"it only computes for longer than {self.timeout:g} s, raise init(timeout=...) or CROSSOVER_TIMEOUT."
            )
        elif elsewhere:
            advice = (
                f"All ranks wait, but {_named(elsewhere)} in another collective: every rank has to make the same "
                "calls in the same order."
            )
        else:
            advice = "Look at the other ranks' output; the first of them to fail says why."
        return f"\n{advice} These ranks cannot communicate any more: end the job, or re-initialise."


def _first_sentence(error: BaseException) -> str:
    """What a backend says, without its source lines and its advice."""
    text = re.sub(r"\[\S+:\d+\] ", "", str(error).strip()) or type(error).__name__
    return re.split(r"\.\s|\n", text)[0].rstrip(".")


def _listed(ranks: Sequence[int]) -> str:
    """``"0-3"`` or ``"0,2,5"``."""
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"
