"""The arbiter as a process: who may speak, what it makes of nonsense, and how it comes and goes."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import struct
import subprocess
import time
from pathlib import Path

import pytest

from crossover.sync.arbiter.messages import Grant, Hello, Recall, Refused, Release, Report, Request, Status, Welcome
from crossover.sync.arbiter.protocol import MAX_BYTES, VERSION, encode
from crossover.sync.arbiter.service import BUSY
from crossover.sync.link import command
from tests.sync.arbiters import Raw, arbiter, place_in, process_of, turn_of, until


def test_permissions(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place):
        facts = place.socket.stat()
        assert stat.S_ISSOCK(facts.st_mode)
        assert facts.st_mode & 0o777 == 0o600
        assert place.lock.stat().st_mode & 0o777 == 0o600


def test_a_shared_directory_lets_the_group_in(run_dir: Path) -> None:
    run_dir.chmod(0o2770)
    place = place_in(run_dir)
    with arbiter(place):
        assert place.socket.stat().st_mode & 0o777 == 0o660


def test_one_arbiter_for_a_device(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place) as first:
        assert process_of(place.lock) == first.pid
        second = subprocess.run(command(place), capture_output=True, timeout=30)
        assert second.returncode == BUSY
        assert b"another arbiter" in second.stderr
        assert isinstance(Raw(place).hello("a"), Welcome)


def test_it_ends_when_idle_and_takes_its_socket_along(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place, idle_s=0.3) as process:
        assert process.wait(20) == 0
        assert not place.socket.exists()


def test_it_stays_while_a_job_is_there(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place, idle_s=0.2) as process:
        client = Raw(place)
        client.hello("a")
        time.sleep(0.6)
        assert process.poll() is None
        client.close()
        assert process.wait(20) == 0


def test_it_leaves_in_order_when_told_to(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place) as process:
        process.terminate()
        assert process.wait(20) == 0
        assert not place.socket.exists()


def test_it_needs_no_torch(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place) as process:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"x",
        b"\x80\x04\x95pickle",
        os.urandom(64),
        b"x" * (MAX_BYTES + 1),
        b"x" * 100_000,
        encode(Request(1)),
        encode(Release(epoch=1)),
        encode(Grant(epoch=1)),
        encode(Welcome()),
    ],
    ids=["empty", "one byte", "pickle", "random", "too long", "much too long", "early", "early 2", "grant", "welcome"],
)
def test_nonsense_ends_the_connection_of_who_sent_it_and_no_other(run_dir: Path, nonsense: bytes) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "good") as good:
        good.take()
        bad = Raw(place)
        bad.send(nonsense)
        if nonsense:
            assert isinstance(bad.receive(), Refused)
        with pytest.raises((EOFError, ConnectionResetError)):
            bad.receive()
        with turn_of(place, "other") as other:
            good.rest()
            other.take()
            assert other.served
            other.rest()


def test_another_version_is_answered_in_words(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place):
        future = Raw(place)
        datagram = bytearray(encode(Hello(job="a")))
        struct.pack_into("<H", datagram, 4, VERSION + 1)
        future.send(bytes(datagram))
        answer = future.receive()
        assert isinstance(answer, Refused)
        assert f"version {VERSION + 1}" in answer.reason


def test_one_that_does_not_read_is_dropped_and_the_turn_goes_on(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place):
        deaf = Raw(place)
        deaf.connection.setblocking(False)
        deaf.send(Hello(job="deaf"))
        dropped = False
        for serial in range(20_000):
            try:
                deaf.send(Request(serial))
                deaf.send(Status())
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                dropped = True
                break
        assert dropped
        good = Raw(place)
        good.hello("good")
        good.send(Request(1))
        assert isinstance(good.receive(), Grant)


def test_one_that_says_nothing_is_sent_away(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place):
        silent = Raw(place)
        with pytest.raises(EOFError):
            silent.receive()


def test_random_clients_do_not_disturb_two_that_are_in_order(run_dir: Path) -> None:
    """Random bytes, random valid messages, random ends of connections, beside two jobs that take turns."""
    place = place_in(run_dir)
    random_numbers = random.Random(0)
    with arbiter(place, lease_s=0.2) as process, turn_of(place, "a") as first, turn_of(place, "b") as second:
        clients: list[Raw] = []
        for step in range(400):
            disturb(place, clients, random_numbers)
            if step % 10 == 0:
                for turn in (first, second):
                    turn.take()
                    turn.rest()
        assert process.poll() is None
        for client in clients:
            client.close()
        assert first.served
        assert second.served
        assert first.tally.alone == second.tally.alone == 0


def disturb(place: object, clients: list[Raw], numbers: random.Random) -> None:
    if len(clients) < 4:
        clients.append(Raw(place))  # type: ignore[arg-type]
        return
    client = numbers.choice(clients)
    messages: list[object] = [
        Hello(job=f"random{numbers.randrange(3)}", weight=numbers.uniform(0.01, 100.0)),
        Request(numbers.randrange(5)),
        Release(epoch=numbers.randrange(400), again=numbers.randrange(2)),
        Status(),
        numbers.randbytes(numbers.randrange(1, 100)),
    ]
    try:
        if numbers.random() < 0.1:
            raise OSError("this one leaves")
        client.send(numbers.choice(messages))  # type: ignore[arg-type]
    except OSError:
        client.close()
        clients.remove(client)


def test_the_report(run_dir: Path) -> None:
    import json

    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a", weight=2.0, rank=1, size=4) as turn:
        turn.take()
        observer = Raw(place)
        observer.send(Status())
        answer = observer.receive()
        assert isinstance(answer, Report)
        facts = json.loads(answer.document)
        assert (facts["host"], facts["device"]) == ("here", "cpu0")
        [row] = facts["jobs"]
        assert (row["job"], row["rank"], row["size"], row["weight"]) == ("a", 1, 4, 2.0)
        assert (row["state"], row["pid"]) == ("holding", os.getpid())


def test_a_recall_comes_once(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place):
        holder, others = Raw(place), [Raw(place) for _ in range(3)]
        holder.hello("holder")
        holder.send(Request(1))
        grant = holder.receive()
        for number, other in enumerate(others):
            other.hello(f"other{number}")
            other.send(Request(1))
        assert holder.receive() == Recall(epoch=grant.epoch)
        holder.connection.settimeout(0.2)
        with pytest.raises(socket.timeout):
            holder.receive()


def test_the_end_of_a_process_is_noticed_though_its_child_keeps_the_connection(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place):
        ends = os.pipe()
        pid = os.fork()
        if not pid:
            client = Raw(place)
            client.hello("dying")
            client.send(Request(1))
            client.receive()
            if not os.fork():
                time.sleep(5)
                os._exit(0)
            os.write(ends[1], b"x")
            time.sleep(30)
            os._exit(0)
        os.read(ends[0], 1)
        partner = Raw(place)
        partner.hello("partner")
        partner.send(Request(1))
        os.kill(pid, signal.SIGKILL)
        partner.connection.settimeout(2)
        assert isinstance(partner.receive(), Grant)
        os.waitpid(pid, 0)


def test_a_stale_socket_is_replaced(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place) as process:
        process.kill()
        process.wait()
        assert place.socket.exists()
    with turn_of(place, "a") as turn:
        turn.take()
        assert turn.served
        until(lambda: process_of(place.lock), "a new arbiter")
