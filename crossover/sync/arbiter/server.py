"""The arbiter as a process: one socket, one thread, nothing that a client sends or fails to read holds it up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import socket
import sys
import time
from dataclasses import dataclass

from .messages import Bye, Hello, Message, Pause, Refused, Release, Request, Status
from .peers import Peer, death_of, peer_of
from .places import Place, is_shared
from .policy import LEASE_S
from .protocol import MAX_BYTES, ProtocolError, VersionError, decode, encode, report
from .report import describe
from .table import Table

IDLE_S = 60.0
HELLO_S = 5.0
MAX_CLIENTS = 512
MAX_CLIENTS_OF_USER = 256
MESSAGES_AT_ONCE = 16


@dataclass(slots=True)
class Client:
    """One connection.

    Attributes:
        watch: tells of its process's death; ``None`` where the kernel offers nothing of the kind.
    """

    connection: socket.socket
    peer: Peer
    watch: int | None
    since: float
    greeted: bool = False


class Server:
    """Serves one device until nobody has been connected for ``idle_s``.

    Args:
        place: where.
        idle_s: seconds without clients after which it ends; ``None``: never.
        least_lease_s: see :class:`~.table.Table`.

    Raises:
        BlockingIOError: another arbiter serves this device.
    """

    def __init__(self, place: Place, idle_s: float | None = IDLE_S, least_lease_s: float = LEASE_S) -> None:
        self.place = place
        self.idle_s = idle_s
        self.table = Table(secrets.randbits(63), least_lease_s)
        self.clients: dict[int, Client] = {}
        self._watches: dict[int, int] = {}
        self._poll = select.epoll()
        self._shared = is_shared(place.directory)
        # Taken first: only its owner may remove a socket that an arbiter left behind. Not inherited by children.
        self._lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, self._mode)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise BlockingIOError(errno.EAGAIN, f"another arbiter serves {place.name}") from error
        self._listener = self._listen()
        self._poll.register(self._listener, select.EPOLLIN)
        self._empty_since = time.monotonic()

    @property
    def _mode(self) -> int:
        return 0o660 if self._shared else 0o600

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        # Bound under another name and moved: who finds the name finds an arbiter that listens, with the right mode.
        before = self.place.socket.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            before.unlink()
        listener.bind(str(before))
        os.chmod(before, self._mode)
        listener.listen(64)
        os.rename(before, self.place.socket)
        return listener

    def close(self) -> None:
        """Take the socket away, then let go."""
        with contextlib.suppress(FileNotFoundError):
            self.place.socket.unlink()
        for client in list(self.clients):
            self._drop(client)
        self._listener.close()
        self._poll.close()
        os.close(self._lock)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until idle."""
        while not self._idle():
            ready = {descriptor for descriptor, _ in self._poll.poll(self._timeout())}
            newcomers = self._listener.fileno() in ready
            for descriptor in ready:
                if descriptor in self._watches:
                    self._drop(self._watches[descriptor], "died")
                elif descriptor in self.clients:
                    self._read(descriptor)
            # Last: a new connection may get the number of one that was closed just now, whose events are still here.
            if newcomers:
                self._accept()
            self._expire()
            self._send_all()

    def _idle(self) -> bool:
        return self.idle_s is not None and not self.clients and time.monotonic() >= self._empty_since + self.idle_s

    def _timeout(self) -> float:
        now = time.monotonic()
        moments = [client.since + HELLO_S for client in self.clients.values() if not client.greeted]
        if (deadline := self.table.deadline()) is not None:
            moments.append(deadline)
        if self.idle_s is not None and not self.clients:
            moments.append(self._empty_since + self.idle_s)
        return max(min(moments, default=now + 3600.0) - now, 0.0)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [n for n, client in self.clients.items() if not client.greeted and now >= client.since + HELLO_S]
        for number in late:
            self._drop(number, "said nothing")
        deadline = self.table.deadline()
        if deadline is not None and now >= deadline:
            holder = self.table.holder
            self.table.tick(now)
            if holder is not None and self.table.holder != holder:
                log(f"{self._named(holder)}: lease over, others are served")

    # -- clients -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        peer = peer_of(connection)
        of_user = sum(client.peer.uid == peer.uid for client in self.clients.values())
        if not self._welcome(peer) or len(self.clients) >= MAX_CLIENTS or of_user >= MAX_CLIENTS_OF_USER:
            with contextlib.suppress(OSError):
                connection.send(encode(Refused(reason="not yours, or too many connections")))
            connection.close()
            return
        watch = death_of(connection, peer)
        number = connection.fileno()
        self.clients[number] = Client(connection, peer, watch, time.monotonic())
        self._poll.register(number, select.EPOLLIN)
        if watch is not None:
            self._watches[watch] = number
            self._poll.register(watch, select.EPOLLIN)

    def _welcome(self, peer: Peer) -> bool:
        """A shared directory's permissions say who may connect; in one's own, only oneself and root."""
        return self._shared or peer.uid in (os.getuid(), 0)

    def _read(self, number: int) -> None:
        client = self.clients[number]
        # A bounded number at a time: who floods the socket waits for everybody else.
        for _ in range(MESSAGES_AT_ONCE):
            try:
                datagram = client.connection.recv(MAX_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                self._drop(number, "broke off")
                return
            if not datagram:
                self._drop(number)
                return
            if not self._take(number, client, datagram):
                return
            self._send_all()
            if number not in self.clients:
                return

    def _take(self, number: int, client: Client, datagram: bytes) -> bool:
        """Act on one datagram; whether the connection goes on."""
        try:
            if len(datagram) > MAX_BYTES:
                raise ProtocolError("too long")
            self._act(number, client, decode(datagram))
        except VersionError as error:
            self._refuse(number, f"this arbiter speaks {error}; end it, or wait until its jobs are done")
            return False
        except ProtocolError as error:
            self._refuse(number, str(error)[:200])
            return False
        return number in self.clients

    def _refuse(self, number: int, reason: str) -> None:
        self._send(number, Refused(reason=reason))
        self._drop(number, f"refused: {reason!r}")

    def _act(self, number: int, client: Client, message: Message) -> None:
        now = time.monotonic()
        if isinstance(message, Status):
            client.greeted = True
            self._send(number, report(describe(self.table, self.place.host, self.place.device, self._pids(), now)))
        elif isinstance(message, Hello):
            client.greeted = True
            self.table.join(number, message, now)
        elif number not in self.table.seats:
            raise ProtocolError("no hello came first")
        elif isinstance(message, Request):
            self.table.request(number, message.serial, now, message.peak_bytes)
        elif isinstance(message, Release):
            self.table.release(number, message.epoch, now, message.used_s, bool(message.again), message.serial)
        elif isinstance(message, Pause):
            self.table.pause(number, now)
        elif isinstance(message, Bye):
            self._drop(number)
        else:
            raise ProtocolError(f"a job does not send {type(message).__name__}")

    def _pids(self) -> dict[int, int]:
        return {number: client.peer.pid for number, client in self.clients.items()}

    def _drop(self, number: int, reason: str | None = None) -> None:
        client = self.clients.pop(number, None)
        if client is None:
            return
        if reason is not None and number in self.table.seats:
            log(f"{self._named(number)}: {reason}")
        self.table.leave(number, time.monotonic())
        self._poll.unregister(number)
        if client.watch is not None:
            self._watches.pop(client.watch, None)
            self._poll.unregister(client.watch)
            os.close(client.watch)
        client.connection.close()
        if not self.clients:
            self._empty_since = time.monotonic()

    def _named(self, number: int) -> str:
        seat = self.table.seats.get(number)
        return f"client {number}" if seat is None else f"job {seat.hello.job!r} rank {seat.hello.rank}"

    def _send_all(self) -> None:
        while outbox := self.table.take_outbox():  # a client that has to be dropped may make room for another
            for number, message in outbox:
                self._send(number, message)

    def _send(self, number: int, message: Message) -> None:
        client = self.clients.get(number)
        if client is None:
            return
        try:
            client.connection.send(encode(message))
        except OSError as error:
            full = error.errno in (errno.EAGAIN, errno.ENOBUFS)
            self._drop(number, "does not read what it is sent" if full else "broke off")


def log(text: str) -> None:
    """One line on standard error, which is a file for an arbiter that a job started."""
    with contextlib.suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=sys.stderr, flush=True)
