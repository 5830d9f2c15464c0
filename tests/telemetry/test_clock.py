from __future__ import annotations

import threading
import time

import pytest

from crossover.telemetry import clock
from crossover.telemetry.clock import ClockOffset, align_clock
from tests.telemetry.fake_ranks import ThreadRank, on_ranks

HOUR_NS = 3_600_000_000_000


class Hosts:
    """Gives each rank thread the clock of its host, wrong by as much as the test says."""

    def __init__(self, host_of_rank: list[str], error_ns: dict[str, int]) -> None:
        self.host_of_rank = host_of_rank
        self.error_ns = error_ns
        self.here = threading.local()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clock, "now_ns", lambda: time.perf_counter_ns() + self.error_ns[self.here.host])
        monkeypatch.setattr(clock, "clock_identity", lambda: self.here.host)

    def align(self, communicator: ThreadRank) -> ClockOffset:
        self.here.host = self.host_of_rank[communicator.rank]
        return align_clock(communicator, rounds=5)


def test_one_host_is_exact_and_exchanges_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(["a", "a", "a"], {"a": HOUR_NS})
    hosts.install(monkeypatch)
    offsets, meeting = on_ranks(3, hosts.align)
    assert offsets == [ClockOffset(0, 0, "same clock")] * 3
    assert meeting.names[0] == ["clock.identity"]


def test_real_processes_of_this_host_count_as_one_clock() -> None:
    offsets, _ = on_ranks(2, align_clock)
    assert offsets == [ClockOffset(0, 0, "same clock")] * 2


def test_offset_across_hosts_is_found_within_the_stated_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(["a", "a", "b", "c", "b"], {"a": 0, "b": -HOUR_NS, "c": 7 * HOUR_NS})
    hosts.install(monkeypatch)
    offsets, meeting = on_ranks(5, hosts.align)
    assert offsets[0] == offsets[1] == ClockOffset(0, 0, "same clock")
    assert offsets[2] == offsets[4]
    for rank, true in ((2, HOUR_NS), (3, -7 * HOUR_NS)):
        found = offsets[rank]
        assert found.method == "exchange"
        assert found.error_ns is not None
        assert abs(found.offset_ns - true) <= found.error_ns
        assert found.error_ns < 1_000_000_000
    assert all(names == meeting.names[0] for names in meeting.names)


def test_slow_rounds_do_not_spoil_a_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(["a", "b"], {"a": 0, "b": HOUR_NS})
    hosts.install(monkeypatch)
    delay_s = 0.05
    rounds_done = [0, 0]
    broadcast = ThreadRank.broadcast

    def slow_but_once(self: ThreadRank, *arguments: object, **named: object) -> object:
        work = broadcast(self, *arguments, **named)  # type: ignore[arg-type]
        rounds_done[self.rank] += 1
        if self.rank == 1 and rounds_done[1] != 3:
            time.sleep(delay_s)  # the reply is late: half of this would go into a plain mean
        return work

    monkeypatch.setattr(ThreadRank, "broadcast", slow_but_once)
    offsets, _ = on_ranks(2, hosts.align)
    assert offsets[1].error_ns is not None
    assert offsets[1].error_ns < delay_s * 1e9 / 2
    assert abs(offsets[1].offset_ns + HOUR_NS) <= offsets[1].error_ns


def test_no_round_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds: got 0"):
        on_ranks(2, lambda communicator: align_clock(communicator, rounds=0))
