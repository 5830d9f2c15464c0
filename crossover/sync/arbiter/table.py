"""The arbiter's state machine: who holds the turn, who waits, who is late. No sockets, and time is an argument.

States of a rank: ``IDLE`` (between turns), ``PAUSED``, ``WAITING``, ``HOLDING``, and ``ROGUE``: its lease is over,
others are served, and it is ``IDLE`` again once it gives its turn back. At most one rank is ``HOLDING``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from .messages import Evicted, Grant, Hello, Message, Recall, Welcome
from .policy import (
    LEASE_S,
    Claim,
    admit,
    charge,
    choose,
    lease_s,
    patience_s,
    serve,
    smoothed,
)


class State(enum.Enum):
    """What a rank is doing, as far as its device is concerned."""

    IDLE = "idle"
    PAUSED = "paused"
    WAITING = "waiting"
    HOLDING = "holding"
    ROGUE = "late"


@dataclass(slots=True)
class Seat:
    """One rank at the table.

    Attributes:
        claim: what it is owed.
        hello: how it presented itself.
        state: what it does; ``since`` when, seconds.
        serial: of its present request.
        epoch: of the turn it has, or had last.
        newcomer: whether its next request is the first, or the first since a pause.
        peak_bytes: the most device memory it is known to use.
        turns: turns it has given back.
        held_s, waited_s: in all.
        turn_s, gap_s, wait_s: its usual turn, time from there to its next request, and wait.
        evictions: how often its lease ran out.
    """

    claim: Claim
    hello: Hello
    state: State = State.IDLE
    since: float = 0.0
    serial: int = 0
    epoch: int = 0
    newcomer: bool = True
    peak_bytes: int = 0
    turns: int = 0
    held_s: float = 0.0
    waited_s: float = 0.0
    turn_s: float | None = None
    gap_s: float | None = None
    wait_s: float | None = None
    evictions: int = 0
    joined: float = 0.0
    charged_until: float = field(default=0.0)


class Table:
    """Turns on one device.

    Call a method for each thing that happened, with the time in seconds of any one monotonic clock, then send what is
    in :attr:`outbox`, and call :meth:`tick` at :meth:`deadline` at the latest.

    Args:
        boot: tells this table from others, for clients that come back.
        least_lease_s: the shortest lease.

    Example:
        >>> table = Table(boot=1)
        >>> for number, job in enumerate("ab"):
        ...     table.join(number, Hello(job=job), now=0.0)
        >>> table.request(0, serial=1, now=0.0)
        >>> table.request(1, serial=1, now=0.1)
        >>> [(client, type(message).__name__) for client, message in table.take_outbox()]
        [(0, 'Welcome'), (1, 'Welcome'), (0, 'Grant'), (0, 'Recall')]
        >>> table.release(0, epoch=1, now=0.3, used_s=0.3)
        >>> table.take_outbox()
        [(1, Grant(serial=1, epoch=2, wanted=0, lease_s=5.0))]
    """

    def __init__(self, boot: int, least_lease_s: float = LEASE_S) -> None:
        self.boot = boot
        self.least_lease_s = least_lease_s
        self.epoch = 0
        self.seats: dict[int, Seat] = {}
        self.outbox: list[tuple[int, Message]] = []
        self.capacity_bytes = 0
        self.busy_s = 0.0
        self._holder: int | None = None
        self._wanted_since: float | None = None
        self._kept_for: tuple[int, float] | None = None

    @property
    def holder(self) -> int | None:
        """Who has the turn."""
        return self._holder

    def take_outbox(self) -> list[tuple[int, Message]]:
        """What is to be sent now."""
        outbox, self.outbox = self.outbox, []
        return outbox

    # -- what happens ------------------------------------------------------------------------------------------------

    def join(self, client: int, hello: Hello, now: float) -> None:
        """A rank presented itself. A second hello of the same connection is ignored."""
        if client in self.seats:
            return
        claim = Claim(hello.job, hello.rank, hello.weight, hello.priority)
        others = len({seat.hello.job for seat in self.seats.values()} - {hello.job})
        self.seats[client] = Seat(claim, hello, since=now, joined=now, peak_bytes=hello.peak_bytes)
        self.capacity_bytes = max(self.capacity_bytes, hello.capacity_bytes)
        needed = sum(seat.peak_bytes for seat in self.seats.values())
        fits = not self.capacity_bytes or needed <= self.capacity_bytes
        self.outbox.append((client, Welcome(hello.serial, 0, self.boot, others, min(needed, (1 << 64) - 1), int(fits))))

    def request(self, client: int, serial: int, now: float, peak_bytes: int = 0) -> None:
        """A rank asks for the turn. Asked again while it waits or holds, only the serial number is taken over."""
        seat = self.seats.get(client)
        if seat is None:
            return
        seat.serial = serial
        seat.peak_bytes = max(seat.peak_bytes, peak_bytes)
        if seat.state is State.WAITING:
            return
        if seat.state is State.HOLDING:
            self._give_back(client, now)
        if seat.state is State.IDLE and seat.turns and not seat.newcomer:
            seat.gap_s = smoothed(seat.gap_s, now - seat.since)
        self._wait(client, now)
        self._serve(now)

    def release(
        self, client: int, epoch: int, now: float, used_s: float = 0.0, again: bool = False, serial: int = 0
    ) -> None:
        """A rank gives a turn back. One that is over by now is only taken note of.

        Args:
            client: the rank.
            epoch: the turn.
            now: seconds.
            used_s: how long it computed since it last came from waiting for others, for averages only.
            again: ask for the next turn at once.
            serial: of that request.
        """
        seat = self.seats.get(client)
        if seat is None or seat.epoch != epoch or seat.state not in (State.HOLDING, State.ROGUE):
            return
        holding = seat.state is State.HOLDING
        if holding:
            seat.turn_s = smoothed(seat.turn_s, min(max(used_s, 0.0), now - seat.since))
        if holding:
            self._give_back(client, now)
        else:
            self._become(seat, State.IDLE, now)
        if again:
            seat.serial = serial
            self._wait(client, now)
        elif holding:
            self._keep_for(client, now)
        self._serve(now)

    def pause(self, client: int, now: float) -> None:
        """A rank does not compete until it asks again."""
        seat = self.seats.get(client)
        if seat is None:
            return
        if seat.state is State.HOLDING:
            self._give_back(client, now)
        self._become(seat, State.PAUSED, now)
        seat.newcomer = True
        self._serve(now)

    def leave(self, client: int, now: float) -> None:
        """A rank said goodbye, or is dead."""
        seat = self.seats.get(client)
        if seat is None:
            return
        if seat.state is State.HOLDING:
            self._give_back(client, now)
        del self.seats[client]
        self._serve(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._holder is not None and self._wanted_since is not None:
            seat = self.seats[self._holder]
            if now >= self._wanted_since + lease_s(seat.turn_s, self.least_lease_s):
                self._evict(self._holder, now)
        self._serve(now)

    def deadline(self) -> float | None:
        """When :meth:`tick` has something to do; ``None`` if never."""
        if self._holder is not None and self._wanted_since is not None:
            return self._wanted_since + lease_s(self.seats[self._holder].turn_s, self.least_lease_s)
        return None if self._kept_for is None else self._kept_for[1]

    # -- what comes of it --------------------------------------------------------------------------------------------

    def _become(self, seat: Seat, state: State, now: float) -> None:
        seat.state, seat.since = state, now

    def _waiting(self) -> dict[int, Seat]:
        return {client: seat for client, seat in self.seats.items() if seat.state is State.WAITING}

    def _competing(self) -> Iterable[Claim]:
        return [s.claim for s in self.seats.values() if s.state is not State.PAUSED and not s.newcomer]

    def _wait(self, client: int, now: float) -> None:
        seat = self.seats[client]
        admit(seat.claim, self._competing(), returning=seat.newcomer)
        seat.newcomer = False
        self._become(seat, State.WAITING, now)
        if self._kept_for is not None and self._kept_for[0] == client:
            self._kept_for = None
        if self._holder is not None and self._wanted_since is None:
            self._wanted_since = now
            # What a lone holder had before counts for nothing: nobody missed it.
            self.seats[self._holder].charged_until = now
            self.outbox.append((self._holder, Recall(epoch=self.epoch)))

    def _serve(self, now: float) -> None:
        """Grant the turn if it is free and somebody waits."""
        if self._holder is not None:
            return
        waiting = self._waiting()
        if not waiting or (self._kept_for is not None and self._still_kept(waiting, now)):
            return
        self._kept_for = None
        chosen = choose(seat.claim for seat in waiting.values())
        client = next(client for client, seat in waiting.items() if seat.claim is chosen)
        serve(chosen, (seat.claim for seat in waiting.values()))
        self._grant(client, wanted=len(waiting) > 1, now=now)

    def _grant(self, client: int, wanted: bool, now: float) -> None:
        seat = self.seats[client]
        waited = now - seat.since
        seat.waited_s += waited
        seat.wait_s = smoothed(seat.wait_s, waited)
        self.epoch += 1
        seat.epoch = self.epoch
        self._become(seat, State.HOLDING, now)
        seat.charged_until = now
        self._holder = client
        self._wanted_since = now if wanted else None
        lease = lease_s(seat.turn_s, self.least_lease_s)
        self.outbox.append((client, Grant(seat.serial, self.epoch, int(wanted), lease)))

    def _give_back(self, client: int, now: float) -> None:
        seat = self.seats[client]
        self._account(seat, now)
        seat.turns += 1
        self._become(seat, State.IDLE, now)
        self._holder = self._wanted_since = None

    def _account(self, seat: Seat, now: float) -> None:
        seat.held_s += now - seat.since
        self.busy_s += now - seat.since
        charge(seat.claim, now - max(seat.since, seat.charged_until))

    def _evict(self, client: int, now: float) -> None:
        seat = self.seats[client]
        self._account(seat, now)
        seat.evictions += 1
        self._become(seat, State.ROGUE, now)
        self._holder = self._wanted_since = None
        self.outbox.append((client, Evicted(epoch=seat.epoch)))

    # -- patience ----------------------------------------------------------------------------------------------------

    def _keep_for(self, client: int, now: float) -> None:
        """Keep the device free for a moment for a job that gave it back, is due next, and will ask at once."""
        seat = self.seats[client]
        patience = patience_s(seat.turn_s, seat.gap_s)
        if not patience:
            return
        waiting = [other.claim for other in self._waiting().values()]
        if waiting and choose([*waiting, seat.claim]) is seat.claim:
            self._kept_for = client, now + patience

    def _still_kept(self, waiting: dict[int, Seat], now: float) -> bool:
        assert self._kept_for is not None
        client, until = self._kept_for
        seat = self.seats.get(client)
        if seat is None or seat.state is not State.IDLE or now >= until:
            return False
        return choose([*(other.claim for other in waiting.values()), seat.claim]) is seat.claim
