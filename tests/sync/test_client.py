"""A job's side: phases, recalls while it is busy, and everything that can happen to an arbiter."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from crossover.sync.arbiter.messages import Grant, Hello, Recall, Release, Request
from crossover.sync.client import STALL_S, YIELD_S, Turn
from crossover.sync.device import Device, Marker
from crossover.sync.holding import Phase
from crossover.sync.link import Unserved, connect
from tests.sync.arbiters import Raw, arbiter, place_in, process_of, turn_of, until


def in_thread(function: Callable[[], object]) -> Future[object]:
    return ThreadPoolExecutor(1).submit(function)


def wanted(place: object, job: str = "other") -> Raw:
    """Another job that waits for the turn."""
    other = Raw(place)  # type: ignore[arg-type]
    other.hello(job)
    other.send(Request(1))
    return other


def test_a_lone_job_sends_one_message(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        for _ in range(1000):
            turn.take()
            turn.rest(STALL_S)
            turn.take()
            turn.offer()
            turn.rest()
        assert turn.tally.sent == 1
        assert turn.tally.waited_s < 1


def test_the_first_job_starts_the_arbiter_and_it_outlives_the_job(run_dir: Path) -> None:
    place = place_in(run_dir)
    with turn_of(place, "a") as turn:
        turn.take()
        assert turn.served
        pid = process_of(place.lock)
        assert pid is not None
        assert os.getsid(pid) == pid
    assert process_of(place.lock) == pid


def test_a_recall_during_the_wait_for_the_network_is_obeyed_at_once(run_dir: Path) -> None:
    """The first trap of the fast path: the training thread is busy and would look only after its wait."""
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        turn.rest()
        assert turn.phase is Phase.RESTING
        other = wanted(place)
        assert isinstance(other.receive(), Grant)
        until(lambda: turn.phase is Phase.AWAY, "the end of the turn")


def test_a_recall_during_computing_waits_for_its_end(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        other = wanted(place)
        until(lambda: turn.contended, "the recall")
        assert turn.phase is Phase.COMPUTING
        turn.rest()
        assert isinstance(other.receive(), Grant)


def test_a_grant_that_others_wait_for_is_not_given_back_before_it_is_used(run_dir: Path) -> None:
    """The second trap: recalled at once, before the training thread has begun to compute."""
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        holder = wanted(place, "holder")
        grant = holder.receive()
        taken = in_thread(turn.take)
        until(lambda: turn.phase is Phase.ASKING, "the request")
        other = wanted(place)
        assert isinstance(holder.receive(), Recall)
        holder.send(Release(epoch=grant.epoch))
        taken.result(10)
        assert turn.phase is Phase.COMPUTING
        assert turn.contended
        turn.rest()
        assert isinstance(other.receive(), Grant)


def test_a_job_that_waits_for_data_lets_others_go(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        other = wanted(place)
        until(lambda: turn.contended, "the recall")
        turn.rest(STALL_S)
        assert isinstance(other.receive(), Grant)


def test_a_short_rest_keeps_the_turn(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        other = wanted(place)
        until(lambda: turn.contended, "the recall")
        turn.rest(30.0)
        turn.take()
        assert turn.phase is Phase.COMPUTING
        turn.rest()
        assert isinstance(other.receive(), Grant)


def test_long_steps_are_offered_between_micro_batches(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        other = wanted(place)
        until(lambda: turn.contended, "the recall")
        time.sleep(YIELD_S)
        offered = in_thread(turn.offer)
        grant = other.receive()
        assert isinstance(grant, Grant)
        until(lambda: turn.phase is Phase.ASKING, "the wait")  # which may be noted after the arbiter has answered
        other.send(Release(epoch=grant.epoch))
        offered.result(10)
        assert turn.phase is Phase.COMPUTING


def test_a_collective_within_a_turn_is_waited_for_without_it(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        with turn.aside():
            other = wanted(place)
            grant = other.receive()
            other.send(Release(epoch=grant.epoch))
        assert turn.phase is Phase.COMPUTING
        with turn_of(place, "b") as partner:
            started = in_thread(partner.take)
            until(lambda: turn.contended, "the recall")
            assert not started.done()
            turn.rest()
            started.result(10)
            partner.rest()


def test_a_pause_lets_others_go_and_ends_with_the_next_turn(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        turn.pause()
        other = wanted(place)
        grant = other.receive()
        other.send(Release(epoch=grant.epoch))
        turn.take()
        assert turn.phase is Phase.COMPUTING


def test_a_holder_that_is_stopped_keeps_others_for_the_lease_only(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place, lease_s=0.3):
        stopped = wanted(place, "stopped")
        grant = stopped.receive()
        with turn_of(place, "b") as turn:
            turn.take()
            assert turn.served
            assert turn.tally.waited_s >= 0.25
            stopped.send(Release(epoch=grant.epoch))
            turn.rest()
            assert stopped.receive().epoch == grant.epoch, "it was told"


def test_an_evicted_job_goes_on_and_says_so(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = place_in(run_dir)
    with arbiter(place, lease_s=0.2), turn_of(place, "slow") as turn:
        turn.take()
        other = wanted(place)
        grant = other.receive()
        assert isinstance(grant, Grant)
        turn.rest()
        taken = in_thread(turn.take)
        other.send(Release(epoch=grant.epoch))
        taken.result(10)
        assert turn.tally.evictions == 1
        assert "longer than its lease" in caplog.text


@pytest.mark.parametrize("phase", ["asking", "computing", "resting"])
def test_the_arbiter_is_killed_and_the_job_goes_on(run_dir: Path, phase: str) -> None:
    place = place_in(run_dir)
    with arbiter(place) as process, turn_of(place, "a") as turn:
        if phase == "asking":
            holder = wanted(place, "holder")
            holder.receive()
            taken = in_thread(turn.take)
            until(lambda: turn.phase is Phase.ASKING, "the request")
        else:
            turn.take()
        if phase == "resting":
            turn.rest()
        process.kill()
        process.wait()
        if phase == "asking":
            taken.result(5)
        turn.take()
        turn.rest()
        until(lambda: turn.served, "a new arbiter")
        turn.take()
        assert turn.phase is Phase.COMPUTING
        assert process_of(place.lock) != process.pid


def test_jobs_take_turns_again_after_the_arbiter_was_killed(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place) as process, turn_of(place, "a") as first, turn_of(place, "b") as second:
        process.kill()
        process.wait()
        for turn in (first, second):
            turn.take()
            turn.rest()
            until(lambda turn=turn: turn.served, "a new arbiter")
        first.take()
        taken = in_thread(second.take)
        until(lambda: first.contended, "the recall")
        assert not taken.done()
        first.rest()
        taken.result(10)
        second.rest()


def test_an_arbiter_that_is_stopped_keeps_nobody(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossover.sync.client.ANSWER_S", 0.2)
    place = place_in(run_dir)
    with arbiter(place) as process, turn_of(place, "a") as turn:
        os.kill(process.pid, signal.SIGSTOP)
        turn.take()
        assert turn.phase is Phase.COMPUTING
        assert turn.tally.alone == 1
        os.kill(process.pid, signal.SIGCONT)


def test_no_arbiter_to_be_had(run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("crossover.sync.link.START_S", 0.1)
    monkeypatch.setattr("crossover.sync.link.start_arbiter", lambda place: None)
    monkeypatch.setattr("crossover.sync.agent.connect", lambda place, hello: connect(place, hello, timeout=0.1))
    with turn_of(place_in(run_dir), "a") as turn:
        turn.take()
        turn.offer()
        turn.rest()
        assert not turn.served
        assert caplog.text.count("computes without turns") == 1


def test_what_answers_is_no_arbiter(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    import socket

    place = place_in(run_dir)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place.socket))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.send(b"hello yourself")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Unserved, match="no arbiter"):
            connect(place, Hello(job="a"))
        thread.join()


def test_another_version_is_at_once_and_for_good(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_in(run_dir)
    with arbiter(place):
        monkeypatch.setattr("crossover.sync.arbiter.protocol.VERSION", 2)
        with turn_of(place, "a") as turn:
            assert not turn.served
            turn.take()
            assert turn.phase is Phase.COMPUTING
            turn.rest()
            assert turn.refused


def test_a_forked_child_has_no_part_in_it(run_dir: Path) -> None:
    place = place_in(run_dir)
    with arbiter(place), turn_of(place, "a") as turn:
        turn.take()
        pid = os.fork()
        if not pid:
            turn.rest()
            turn.take()
            turn.pause()
            turn.close()
            os._exit(0 if turn.inert else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert turn.phase is Phase.COMPUTING
        other = wanted(place)
        turn.rest()
        assert isinstance(other.receive(), Grant)


def test_turns_never_overlap(run_dir: Path) -> None:
    place = place_in(run_dir)
    stamps: list[tuple[int, int]] = []

    def train(job: str) -> None:
        with turn_of(place, job) as turn:
            for _ in range(60):
                turn.take()
                began = time.monotonic_ns()
                time.sleep(0.0005)
                stamps.append((began, time.monotonic_ns()))
                turn.rest()

    with arbiter(place), ThreadPoolExecutor(3) as pool:
        list(pool.map(train, "abc"))
    stamps.sort()
    assert len(stamps) == 180
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(stamps))


def test_shares_are_as_the_weights(run_dir: Path) -> None:
    place = place_in(run_dir)
    held = {"a": 0.0, "b": 0.0}
    stop = threading.Event()

    def train(job: str, weight: float) -> None:
        with turn_of(place, job, weight=weight) as turn:
            while not stop.is_set():
                turn.take()
                began = time.monotonic()
                time.sleep(0.005)
                held[job] += time.monotonic() - began
                turn.rest()

    with arbiter(place), ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(train, "a", 3.0), pool.submit(train, "b", 1.0)]
        time.sleep(4)
        stop.set()
        for job in jobs:
            job.result(10)
    assert held["a"] / sum(held.values()) == pytest.approx(0.75, rel=0.05)


class _Gate(Marker):
    def __init__(self) -> None:
        self.event = threading.Event()

    def passed(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        assert self.event.wait(10)


class SlowDevice(Device):
    """Runs behind the host as a GPU does: every mark is passed when the test says so."""

    name = "slow"

    def __init__(self) -> None:
        self.marks: list[_Gate] = []
        self.ahead = False

    def mark(self) -> Marker:
        gate = _Gate()
        if not self.ahead:
            gate.event.set()
        self.marks.append(gate)
        return gate


def test_the_turn_is_given_back_when_the_device_has_finished_and_not_before(run_dir: Path) -> None:
    place = place_in(run_dir, "slow")
    device = SlowDevice()
    with arbiter(place):
        turn = Turn(place, device, Hello(job="a"))
        turn.take()
        other = wanted(place)
        until(lambda: turn.contended, "the recall")
        device.ahead = True
        turn.rest()
        other.connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.receive()
        device.marks[-1].event.set()
        other.connection.settimeout(10)
        assert isinstance(other.receive(), Grant)
        turn.close()


def test_a_lone_host_that_ran_ahead_gives_back_while_its_device_waits_for_other_ranks(run_dir: Path) -> None:
    """Backward is computed, the all-reduce waits on the device, and the host has launched the next step behind it."""
    place = place_in(run_dir, "slow")
    device = SlowDevice()
    with arbiter(place):
        turn = Turn(place, device, Hello(job="a"))
        turn.take()
        device.ahead = True
        turn.rest()
        computed = device.marks[-1]
        turn.take()
        turn.rest(STALL_S)
        turn.take()
        other = wanted(place)
        computed.event.set()
        assert isinstance(other.receive(), Grant), "the all-reduce has not come to its end, and need not"
        for mark in device.marks:
            mark.event.set()
        turn.close()


def test_the_turn_is_asked_for_when_the_device_no_longer_waits_for_other_ranks(run_dir: Path) -> None:
    place = place_in(run_dir, "slow")
    device = SlowDevice()
    with arbiter(place):
        turn = Turn(place, device, Hello(job="a"))
        turn.take()
        other = wanted(place)
        until(lambda: turn.contended, "the recall")
        turn.rest()
        grant = other.receive()
        other.send(Release(epoch=grant.epoch))
        device.ahead = True
        taken = in_thread(turn.take)
        until(lambda: len(device.marks) and not device.marks[-1].passed(), "the mark")
        time.sleep(0.05)
        assert turn.phase is Phase.AWAY
        device.ahead = False
        device.marks[-1].event.set()
        taken.result(10)
        assert turn.phase is Phase.COMPUTING
        turn.close()
