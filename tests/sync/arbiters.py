"""Arbiters as real processes, and clients of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from crossover.sync.arbiter.messages import Hello, Message
from crossover.sync.arbiter.places import Place
from crossover.sync.arbiter.protocol import decode, encode
from crossover.sync.client import Turn
from crossover.sync.device import CpuSlot
from crossover.sync.link import command, dial


def place_in(directory: Path, device: str = "cpu0") -> Place:
    return Place(directory, "here", device)


def process_of(lock: Path) -> int | None:
    """The process that holds a lock file, ``None`` if nobody does."""
    with contextlib.suppress(OSError), lock.open("rb") as file:
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked)[:28])
        return None if kind == fcntl.F_UNLCK else int(pid)
    return None


@contextlib.contextmanager
def arbiter(place: Place, lease_s: float = 5.0, idle_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """One that is a child of this process, ready to be connected to."""
    with place.log.open("ab") as log:
        process = subprocess.Popen(command(place, "--lease", str(lease_s), "--idle", str(idle_s)), stderr=log)
    try:
        until(place.socket.exists, "the arbiter's socket")
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {seconds:g} s"
        time.sleep(0.002)


@contextlib.contextmanager
def turn_of(place: Place, job: str, **options: object) -> Iterator[Turn]:
    turn = Turn(place, CpuSlot(place.device), Hello(job=job, **options))  # type: ignore[arg-type]
    try:
        yield turn
    finally:
        turn.close()


class Raw:
    """A client that sends what it is told to."""

    def __init__(self, place: Place) -> None:
        self.connection: socket.socket = dial(place)
        self.connection.settimeout(10)

    def send(self, message: Message | bytes) -> None:
        self.connection.send(message if isinstance(message, bytes) else encode(message))

    def receive(self) -> Message:
        datagram = self.connection.recv(1 << 17)
        if not datagram:
            raise EOFError
        return decode(datagram)

    def hello(self, job: str, **options: object) -> Message:
        self.send(Hello(job=job, **options))  # type: ignore[arg-type]
        return self.receive()

    def close(self) -> None:
        self.connection.close()
