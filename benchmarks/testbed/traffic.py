"""A TCP sender and receiver that measure a link from inside the namespaces.

Run as a plain script, so that it starts in milliseconds::

    traffic.py stream OWN_ADDRESS NEXT_ADDRESS PORT WARM_UP_SECONDS SECONDS
    traffic.py answer OWN_ADDRESS PORT BYTES ROUNDS
    traffic.py ask NEXT_ADDRESS PORT BYTES ROUNDS PAUSE_SECONDS

``stream`` sends to the next host while it receives from the one before, as a ring all-reduce does, and prints the bits
a second received. ``ask`` sends one message at a time to ``answer``, pausing in between, and prints the median seconds.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import time

CHUNK = 1 << 18
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 20.0


def listen(address: str, port: int) -> socket.socket:
    server = socket.create_server((address, port))
    server.settimeout(CONNECT_SECONDS)
    return server


def connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            connection.settimeout(IDLE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def send_for(connection: socket.socket, seconds: float) -> None:
    data = bytes(CHUNK)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return  # the receiver has measured enough


def receive_rate(connection: socket.socket, warm_up: float, seconds: float) -> float:
    """Bits a second over the first ``seconds`` after the warm-up, between two arrivals."""
    buffer = bytearray(CHUNK)
    connection.recv_into(buffer)
    began = time.monotonic()
    start = now = began
    received = 0
    while now < began + warm_up + seconds:
        count = connection.recv_into(buffer)
        now = time.monotonic()
        if count == 0:
            raise ConnectionError("the sender stopped before the measurement was over")
        if start - began < warm_up:
            start = now
            continue
        received += count
    return received * 8 / (now - start)


def stream(own: str, following: str, port: int, warm_up: float, seconds: float) -> float:
    with listen(own, port) as server:
        outgoing = connect(following, port)
        incoming, _ = server.accept()
        incoming.settimeout(IDLE_SECONDS)
        # Half a second more than is measured: all senders stay busy until the last receiver is done.
        sender = threading.Thread(target=send_for, args=(outgoing, warm_up + seconds + 0.5), daemon=True)
        sender.start()
        rate = receive_rate(incoming, warm_up, seconds)
        time.sleep(0.1)
        return rate


def receive_all(connection: socket.socket, size: int) -> None:
    buffer = bytearray(CHUNK)
    while size:
        count = connection.recv_into(buffer, min(size, CHUNK))
        if count == 0:
            raise ConnectionError("the peer closed in the middle of a message")
        size -= count


def answer(own: str, port: int, size: int, rounds: int) -> None:
    with listen(own, port) as server:
        connection, _ = server.accept()
        connection.settimeout(IDLE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(rounds):
            receive_all(connection, size)
            connection.sendall(b"!")


def ask(following: str, port: int, size: int, rounds: int, pause: float) -> float:
    connection = connect(following, port)
    data = bytes(size)
    seconds = []
    for _ in range(rounds):
        time.sleep(pause)
        began = time.perf_counter()
        connection.sendall(data)
        receive_all(connection, 1)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main(words: list[str]) -> None:
    role = words[0]
    if role == "stream":
        print(stream(words[1], words[2], int(words[3]), float(words[4]), float(words[5])))
    elif role == "answer":
        answer(words[1], int(words[2]), int(words[3]), int(words[4]))
    else:
        print(ask(words[1], int(words[2]), int(words[3]), int(words[4]), float(words[5])))


if __name__ == "__main__":
    main(sys.argv[1:])
