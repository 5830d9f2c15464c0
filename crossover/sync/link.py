"""A job's connection to its device's arbiter, which is started if there is none."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from crossover.sync.arbiter.messages import MAX_STATUS_BYTES, Hello, Message, Refused, Welcome
from crossover.sync.arbiter.places import Place
from crossover.sync.arbiter.protocol import ProtocolError, VersionError, decode, encode

START_S = 5.0
"""How long a job waits for an arbiter that it started, before it runs without one."""
ANSWER_S = 2.0
"""How long an arbiter may take to answer."""
LEASE_VARIABLE = "CROSSOVER_LEASE"
_RETRY_S = 0.01
_LARGEST = MAX_STATUS_BYTES + 1024
# Without site packages and by its directory: importing crossover would import torch, which takes seconds and memory.
_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); from arbiter.service import main; sys.exit(main(sys.argv[2:]))"


class Unserved(Exception):  # noqa: N818 - not an error: the job runs without turns
    """There is no arbiter to be had.

    Attributes:
        final: whether asking again later is of no use.
    """

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Link:
    """A greeted connection. Sending and receiving never block; both raise ``OSError`` once it is broken."""

    def __init__(self, connection: socket.socket, welcome: Welcome) -> None:
        self._connection = connection
        self.welcome = welcome

    def fileno(self) -> int:
        """For polling."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send one message."""
        self._connection.send(encode(message))

    def receive(self) -> Message | None:
        """The next message, ``None`` if none is there."""
        return _receive(self._connection)

    def close(self) -> None:
        """Let go."""
        self._connection.close()


def _receive(connection: socket.socket) -> Message | None:
    try:
        datagram = connection.recv(_LARGEST)
    except BlockingIOError:
        return None
    if not datagram:
        raise ConnectionResetError(errno.ECONNRESET, "the arbiter ended")
    return decode(datagram)


def command(place: Place, *options: str) -> list[str]:
    """The command line of a place's arbiter."""
    where = ["--directory", str(place.directory), "--host", place.host, "--device", place.device]
    return [sys.executable, "-I", "-S", "-c", _COMMAND, str(Path(__file__).parent), *where, *options]


def start_arbiter(place: Place) -> None:
    """Start an arbiter that outlives this process. It ends by itself if there is one already."""
    lease = os.environ.get(LEASE_VARIABLE)
    options = ["--daemon"] + (["--lease", lease] if lease else [])
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command(place, *options), stdin=nothing, stdout=nothing, stderr=nothing, cwd="/")
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(START_S)  # it leaves a child of its own behind


def dial(place: Place) -> socket.socket:
    """Connect to an arbiter that is there.

    Raises:
        OSError: there is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(str(place.socket))
    except BaseException:
        connection.close()
        raise
    return connection


def connect(place: Place, hello: Hello, start: bool = True, timeout: float = START_S) -> Link:
    """Connect and say hello.

    Args:
        place: of the arbiter.
        hello: who calls.
        start: whether to start an arbiter where there is none.
        timeout: seconds for all of it.

    Raises:
        Unserved: it did not work out.
    """
    deadline = time.monotonic() + timeout
    started = not start
    while True:
        try:
            return _greet(dial(place), hello, deadline)
        except PermissionError as error:
            raise Unserved(f"{place.socket}: {error.strerror}", final=True) from error
        except OSError as error:
            reason = f"{place.socket}: {error.strerror or error}"
            if not started:
                started = True
                try:
                    start_arbiter(place)
                except OSError as failure:
                    raise Unserved(f"an arbiter cannot be started: {failure}") from failure
        if time.monotonic() >= deadline:
            raise Unserved(reason)
        time.sleep(_RETRY_S)


def _greet(connection: socket.socket, hello: Hello, deadline: float) -> Link:
    try:
        connection.send(encode(hello))
        answer = await_answer(connection, min(deadline, time.monotonic() + ANSWER_S))
    except VersionError as error:
        connection.close()
        raise Unserved(f"the arbiter speaks {error}; it ends once its jobs are done", final=True) from error
    except (OSError, ProtocolError) as error:
        connection.close()
        if isinstance(error, ProtocolError):
            raise Unserved(f"what answers is no arbiter: {error}", final=True) from error
        raise
    if isinstance(answer, Welcome):
        return Link(connection, answer)
    connection.close()
    reason = answer.reason if isinstance(answer, Refused) else type(answer).__name__
    raise Unserved(f"the arbiter refused: {reason}", final=True)


def await_answer(connection: socket.socket, deadline: float) -> Message:
    """The next message.

    Raises:
        TimeoutError: none came by ``deadline``.
        OSError: the connection broke.
        ProtocolError: it is none.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while True:
        message = _receive(connection)
        if message is not None:
            return message
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError(errno.ETIMEDOUT, "the arbiter does not answer")
