"""The arbiter's state machine on a virtual clock: who gets what, and what no order of messages can break."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossover.sync.arbiter.messages import Evicted, Grant, Hello, Message, Recall, Welcome
from crossover.sync.arbiter.table import State, Table


def table_of(*jobs: Hello, lease_s: float = 5.0) -> Table:
    table = Table(boot=1, least_lease_s=lease_s)
    for number, hello in enumerate(jobs):
        table.join(number, hello, now=0.0)
    table.take_outbox()
    return table


def sent(table: Table) -> list[tuple[int, type[Message]]]:
    return [(client, type(message)) for client, message in table.take_outbox()]


def test_a_lone_job_is_told_only_when_somebody_comes() -> None:
    table = table_of(Hello(job="a"), Hello(job="b"))
    table.request(0, 1, now=1.0)
    [(_, grant)] = table.take_outbox()
    assert isinstance(grant, Grant)
    assert not grant.wanted
    assert table.deadline() is None, "nobody waits: no lease runs"
    table.request(1, 1, now=50.0)
    assert sent(table) == [(0, Recall)]
    table.release(0, grant.epoch, now=50.1)
    assert sent(table) == [(1, Grant)]


def test_a_grant_says_whether_somebody_waits() -> None:
    table = table_of(*(Hello(job=job) for job in "abc"))
    for client in range(3):
        table.request(client, 1, now=0.0)
    table.take_outbox()
    table.release(0, 1, now=0.1)
    [(_, grant)] = table.take_outbox()
    assert isinstance(grant, Grant)
    assert grant.wanted


def test_a_release_of_an_earlier_turn_changes_nothing() -> None:
    table = table_of(Hello(job="a"), Hello(job="b"))
    table.request(0, 1, now=0.0)
    table.release(0, 1, now=0.1)
    table.request(0, 2, now=0.2)
    table.take_outbox()
    table.release(0, 1, now=0.3)
    assert table.holder == 0
    table.release(1, 2, now=0.3)
    assert table.holder == 0, "nor does one by somebody else"


def test_asking_twice_is_asking_once() -> None:
    table = table_of(Hello(job="a"), Hello(job="b"))
    table.request(0, 1, now=0.0)
    table.request(1, 1, now=0.0)
    table.request(1, 2, now=0.0)
    table.take_outbox()
    table.release(0, 1, now=0.1)
    assert table.take_outbox() == [(1, Grant(2, 2, 0, 5.0))]


def test_a_lease_runs_from_when_others_wait() -> None:
    table = table_of(Hello(job="a"), Hello(job="b"), lease_s=2.0)
    table.request(0, 1, now=0.0)
    table.request(1, 1, now=10.0)
    assert table.deadline() == 12.0
    table.tick(11.9)
    assert table.holder == 0
    table.take_outbox()
    table.tick(12.0)
    assert sent(table) == [(0, Evicted), (1, Grant)]
    assert table.seats[0].state is State.ROGUE
    table.release(0, 1, now=13.0)
    assert table.seats[0].state is State.IDLE
    assert table.holder == 1, "a late release is not the present holder's"


def test_one_that_dies_frees_its_place() -> None:
    table = table_of(Hello(job="a"), Hello(job="b"), Hello(job="c"))
    for client in range(3):
        table.request(client, 1, now=0.0)
    table.take_outbox()
    table.leave(1, now=0.1)
    table.leave(0, now=0.2)
    assert sent(table) == [(2, Grant)]


def test_a_pause_gives_the_turn_up_and_claims_nothing_later() -> None:
    table = table_of(Hello(job="a"), Hello(job="b"))
    table.request(0, 1, now=0.0)
    table.request(1, 1, now=0.0)
    table.pause(0, now=0.1)
    table.take_outbox()
    assert table.holder == 1
    for turn in range(100):
        table.release(1, 2 + turn, now=1.0 + turn, used_s=1.0, again=True)
    table.request(0, 2, now=101.5)
    assert table.seats[0].claim.virtual_s == pytest.approx(table.seats[1].claim.virtual_s, abs=1.6)


def test_memory_that_does_not_fit_is_said() -> None:
    table = Table(boot=1)
    table.join(0, Hello(job="a", peak_bytes=6, capacity_bytes=10), now=0.0)
    table.join(1, Hello(job="b", peak_bytes=6, capacity_bytes=10), now=0.0)
    [(_, first), (_, second)] = table.take_outbox()
    assert isinstance(first, Welcome)
    assert isinstance(second, Welcome)
    assert (first.fits, second.fits, second.needed_bytes, second.others) == (1, 0, 12, 1)


def held_with_gaps(weights: dict[str, float], turn_s: float, gap_s: float, until_s: float) -> dict[str, float]:
    """Seconds held by jobs that ask again ``gap_s`` after giving back."""
    table = table_of(*(Hello(job=job, weight=weight) for job, weight in weights.items()))
    events: list[tuple[float, int, str]] = [(0.0, client, "ask") for client in range(len(weights))]
    now = 0.0
    while now < until_s:
        deadline = table.deadline()
        events.sort()
        if events and (deadline is None or events[0][0] <= deadline):
            now, client, what = events.pop(0)
            if what == "ask":
                table.request(client, 1, now)
            else:
                table.release(client, table.epoch, now, used_s=turn_s)
                events.append((now + gap_s, client, "ask"))
        else:
            assert deadline is not None
            now = deadline
            table.tick(now)
        events += [(now + turn_s, c, "give back") for c, message in table.take_outbox() if isinstance(message, Grant)]
    return {seat.hello.job: seat.held_s for seat in table.seats.values()}


def test_a_weight_counts_also_for_jobs_that_ask_again_only_after_a_moment() -> None:
    held = held_with_gaps({"a": 3.0, "b": 1.0}, turn_s=0.05, gap_s=0.0002, until_s=60.0)
    assert held["a"] / sum(held.values()) == pytest.approx(0.75, rel=0.05)


def test_the_device_does_not_wait_for_a_job_that_waits_for_its_network() -> None:
    held = held_with_gaps({"a": 3.0, "b": 1.0}, turn_s=0.05, gap_s=0.05, until_s=60.0)
    assert sum(held.values()) > 0.99 * 60.0


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["join", "request", "release", "old release", "again", "pause", "leave", "tick"]),
        st.integers(0, 4),
        st.floats(0.0, 3.0),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_no_order_of_events_breaks_the_rules(actions: list[tuple[str, int, float]]) -> None:
    """At most one holder, rising epochs, and whoever waits is served in the end."""
    table, now, epochs = Table(boot=1, least_lease_s=1.0), 0.0, [0]
    for what, client, seconds in actions:
        now += seconds
        act(table, what, client, now)
        epochs += [message.epoch for _, message in table.take_outbox() if isinstance(message, Grant)]
        assert epochs == list(range(len(epochs)))
        check(table)
    for _ in range(12):  # with time alone, every one that waits gets its turn
        if (deadline := table.deadline()) is not None:
            now = max(now, deadline)
            table.tick(now)
        check(table)
    waiting = [seat for seat in table.seats.values() if seat.state is State.WAITING]
    assert not waiting


def act(table: Table, what: str, client: int, now: float) -> None:
    epoch = table.seats[client].epoch if client in table.seats else 0
    if what == "join":
        table.join(client, Hello(job=f"job{client}", priority=client % 2, weight=1.0 + client), now)
    elif what == "request":
        table.request(client, 1, now)
    elif what == "tick":
        table.tick(now)
    elif what == "pause":
        table.pause(client, now)
    elif what == "leave":
        table.leave(client, now)
    else:
        table.release(client, epoch - (what == "old release"), now, again=what == "again")


def check(table: Table) -> None:
    holding = [client for client, seat in table.seats.items() if seat.state is State.HOLDING]
    assert holding == ([] if table.holder is None else [table.holder])
    waiting = any(seat.state is State.WAITING for seat in table.seats.values())
    assert table.deadline() is not None or not waiting, "somebody waits, and nothing will ever happen"
