"""The discrete events: a virtual clock, links that carry one transfer at a time, devices that one job uses at a time.

A job is a generator that yields what it waits for. All ranks of a job are stepped together, each with a clock of its
own: what is yielded carries the time of the last of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from crossover.simulate.cluster import Floats
from crossover.sync.arbiter.policy import Claim, admit, charge, choose, serve
from crossover.sync.forecast import HAND_OVER_S


@dataclass(eq=False, slots=True)
class Transfer:
    """One collective on a link.

    Attributes:
        name: for pictures.
        job: whose it is.
        seconds: it keeps the link busy.
        ready: when the last rank has started it.
        begin: on the link; known once it is ready.
        end: known at the same time, for links serve in the order of readiness.
    """

    name: str
    job: str
    seconds: float
    ready: float
    begin: float = 0.0
    end: float | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Link:
    """Carries one transfer at a time; ``free`` is when all that is ready will be through.

    Attributes:
        name: for pictures.
        free: see above.
        carried: all transfers so far.
    """

    name: str
    free: float = 0.0
    carried: list[Transfer] = field(default_factory=list)

    def take(self, transfer: Transfer, now: float) -> None:
        """It is ready."""
        transfer.begin = max(now, self.free)
        transfer.end = self.free = transfer.begin + transfer.seconds
        self.carried.append(transfer)
        for notify in transfer.waiting:
            notify()
        transfer.waiting.clear()


@dataclass(frozen=True, slots=True)
class Until:
    """Wait for a moment."""

    moment: float


@dataclass(frozen=True, slots=True)
class Landed:
    """Wait until all of these are through, and no less than until ``moment``."""

    transfers: Sequence[Transfer]
    moment: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Wait for the right to compute on ``device``; ranks ask at the times of ``clock``."""

    device: Device
    claim: Claim
    clock: Floats


Wish = Until | Landed | Turn
Process = Generator[Wish, None, None]
"""A job, or a part of what it does."""


class Device:
    """Every rank's device, of which one job at a time holds the turn; the order is the same on all ranks.

    Args:
        ranks: devices.
    """

    def __init__(self, ranks: int) -> None:
        self.free: Floats = np.zeros(ranks)
        self.holder: Claim | None = None
        self.last: Claim | None = None
        self.asking: list[tuple[Claim, Callable[[], None]]] = []

    def ask(self, claim: Claim, granted: Callable[[], None]) -> None:
        """``claim`` waits for its turn."""
        competing = [other for other, _ in self.asking] + ([self.holder] if self.holder is not None else [])
        admit(claim, competing, returning=False)
        self.asking.append((claim, granted))
        if self.holder is None:
            self._serve()

    def give_up(self, held_s: float, free: Floats) -> None:
        """The holder's turn has ended at ``free`` on each rank."""
        assert self.holder is not None, "only who holds a turn gives it up"
        charge(self.holder, held_s)
        self.last, self.holder, self.free = self.holder, None, free
        if self.asking:
            self._serve()

    def start(self, claim: Claim, clock: Floats) -> Floats:
        """When each rank of the holder begins, having asked at ``clock``."""
        handed_over = HAND_OVER_S if self.last is not None and self.last is not claim else 0.0
        return np.maximum(clock, self.free + handed_over)

    def _serve(self) -> None:
        claims = [claim for claim, _ in self.asking]
        chosen = choose(claims)
        serve(chosen, claims)
        place = claims.index(chosen)
        self.holder = chosen
        _, granted = self.asking.pop(place)
        granted()


class Simulation:
    """Runs processes until all have ended.

    Example:
        >>> def twice(simulation, link):
        ...     first = simulation.send(link, Transfer("a", "job", 2.0, ready=1.0))
        ...     second = simulation.send(link, Transfer("b", "job", 2.0, ready=2.0))
        ...     yield Landed([first, second], 0.0)
        ...     print(simulation.now)
        >>> simulation = Simulation()
        >>> simulation.start(twice(simulation, Link("link")))
        >>> simulation.run()
        5.0
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._running = 0

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Have ``action`` called when the clock reaches ``moment``; of equal moments the first asked for is first."""
        heapq.heappush(self._events, (max(moment, self.now), self._count, action))
        self._count += 1

    def send(self, link: Link, transfer: Transfer) -> Transfer:
        """Put it on the link once it is ready."""
        self.at(transfer.ready, lambda: link.take(transfer, self.now))
        return transfer

    def start(self, process: Process) -> None:
        """Begin a process now."""
        self._running += 1
        self.at(self.now, lambda: self._resume(process))

    def run(self) -> None:
        """Until nothing happens any more."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        assert not self._running, "a process waits for what never comes"

    def _resume(self, process: Process) -> None:
        wish = next(process, None)
        match wish:
            case None:
                self._running -= 1
            case Until(moment):
                self.at(moment, lambda: self._resume(process))
            case Landed(transfers, moment):
                self._await(process, transfers, moment)
            case Turn(device, claim, clock):
                asked = float(clock.max())
                self.at(asked, lambda: device.ask(claim, lambda: self.at(self.now, lambda: self._resume(process))))

    def _await(self, process: Process, transfers: Sequence[Transfer], moment: float) -> None:
        unknown = [transfer for transfer in transfers if transfer.end is None]
        left = len(unknown)

        def go_on() -> None:
            ends = [transfer.end for transfer in transfers if transfer.end is not None]
            self.at(max([moment, *ends]), lambda: self._resume(process))

        def one_more() -> None:
            nonlocal left
            left -= 1
            if not left:
                go_on()

        if not unknown:
            go_on()
        for transfer in unknown:
            transfer.waiting.append(one_more)
