"""A notice board on which ranks leave a word when something goes wrong, so that an error can name who was missing.

The board is kept by the launcher's rendezvous server, outside the collectives that failed. It is touched only by a
rank that waits for long, fails or leaves; never while things go well. No call here raises or waits for long.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from typing import Protocol

from torch._C._distributed_c10d import Store, TCPStore

_SECONDS_PER_CALL = 2.0
_SECONDS_BETWEEN_LOOKS = 0.05
_LONGEST_TEXT = 400
_ALARM = "alarm"


class State(str, Enum):
    """What a rank says of itself."""

    WAITING = "waiting"
    GAVE_UP = "gave up"
    RAISED = "raised"
    LEFT = "left"
    WORKING = "working"  # after a wait that was long enough to be posted

    @property
    def failed(self) -> bool:
        """Whether a rank that says so takes part in no further collective."""
        return self in (State.GAVE_UP, State.RAISED)


@dataclass(frozen=True)
class Word:
    """What a rank last said.

    Attributes:
        state: what it does.
        text: the collective it waits in, or the exception it raised.
        since: seconds since the epoch, on that rank's clock.
    """

    state: State
    text: str
    since: float

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.since))
        return {
            State.WAITING: f"waiting in {self.text!r} since {at}",
            State.GAVE_UP: f"gave up on {self.text!r}, in which it had waited since {at}",
            State.RAISED: f"raised {self.text} at {at}",
            State.LEFT: f"left at {at}: its script ended or it called shutdown()",
            State.WORKING: f"went on at {at} after a long wait in {self.text!r}",
        }[self.state]


class Pinboard(Protocol):
    """An open connection to a key-value store."""

    def write(self, key: str, value: str) -> None:
        """Set ``key``. May raise anything."""

    def read(self, key: str) -> bytes | None:
        """What ``key`` holds, ``None`` if nothing; never waits for it to be set. May raise anything."""


Connect = Callable[[], AbstractContextManager[Pinboard]]


class Board:
    """Words of all ranks of a job.

    Args:
        connect: opens a connection for a few calls; ``None`` where the launcher offers no store.
        rank: this process's global rank.
        keeper: whose end makes the board unreachable, for messages.
    """

    def __init__(self, connect: Connect | None, rank: int, keeper: str = "the launcher") -> None:
        self._connect = connect
        self._rank = rank
        self._keeper = keeper

    def post(self, state: State, text: str = "", since: float | None = None) -> None:
        """Replace this rank's word. Returns within seconds and never raises."""
        if self._connect is None:
            return
        word = Word(state, text[:_LONGEST_TEXT], time.time() if since is None else since)
        with contextlib.suppress(Exception), self._connect() as pinboard:
            pinboard.write(str(self._rank), json.dumps(asdict(word)))
            if state.failed:  # after the word, which whoever sees the alarm looks for
                pinboard.write(_ALARM, str(self._rank))

    def alarmed(self) -> bool:
        """Whether any rank of the job has failed: one look-up, however many ranks there are. Never raises."""
        if self._connect is None:
            return False
        with contextlib.suppress(Exception), self._connect() as pinboard:
            return pinboard.read(_ALARM) is not None
        return False

    def gather(self, ranks: Collection[int], patience: float) -> tuple[Mapping[int, Word], str | None]:
        """The words of ``ranks``, given ``patience`` seconds to arrive. Never raises.

        Returns:
            The words found by global rank, and why the board could not be read (``None``: it could).
        """
        words: dict[int, Word] = {}
        if self._connect is None:
            return words, "this launcher keeps no notice board"
        deadline = time.monotonic() + patience
        try:
            with self._connect() as pinboard:
                while True:
                    for rank in ranks:
                        value = pinboard.read(str(rank))
                        if value is not None:
                            words[rank] = _parsed(value)
                    if len(words) == len(ranks) or time.monotonic() >= deadline:
                        return words, None
                    time.sleep(_SECONDS_BETWEEN_LOOKS)
        except Exception as error:
            return words, f"the notice board could not be read, as if {self._keeper} had ended ({error})"


def _parsed(value: bytes) -> Word:
    fields = json.loads(value)
    return Word(State(fields["state"]), str(fields["text"]), float(fields["since"]))


class _StorePinboard:
    def __init__(self, store: Store, scope: str) -> None:
        self._store = store
        self._scope = scope

    def write(self, key: str, value: str) -> None:
        self._store.set(f"{self._scope}/{key}", value)

    def read(self, key: str) -> bytes | None:
        name = f"{self._scope}/{key}"
        return self._store.get(name) if self._store.check([name]) else None


def tcp_store(host: str, port: int, scope: str) -> Connect:
    """Connects anew to the TCP store at ``host:port``: a thread that hangs in the job's own client would block it."""

    @contextlib.contextmanager
    def connect() -> Iterator[Pinboard]:
        # TCPStore retries a refused connection until its time-out and logs each try; a plain socket fails at once.
        socket.create_connection((host, port), timeout=_SECONDS_PER_CALL).close()
        patience = timedelta(seconds=_SECONDS_PER_CALL)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
        yield _StorePinboard(store, scope)

    return connect


def any_store(store: Store, scope: str) -> Connect:
    """Uses a store of another kind, such as one on a file, as it is."""

    @contextlib.contextmanager
    def connect() -> Iterator[Pinboard]:
        yield _StorePinboard(store, scope)

    return connect


class _HttpPinboard:
    def __init__(self, address: str) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def write(self, key: str, value: str) -> None:
        request = urllib.request.Request(f"{self._address}/{key}", data=value.encode(), method="PUT")
        self._opener.open(request, timeout=_SECONDS_PER_CALL).close()

    def read(self, key: str) -> bytes | None:
        try:
            with self._opener.open(f"{self._address}/{key}", timeout=_SECONDS_PER_CALL) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def http_store(host: str, port: int, scope: str) -> Connect:
    """Uses the key-value server that ``horovodrun`` keeps for its workers."""

    @contextlib.contextmanager
    def connect() -> Iterator[Pinboard]:
        yield _HttpPinboard(f"http://{host}:{port}/{scope}")

    return connect
