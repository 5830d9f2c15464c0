"""What a job knows of its turn, and every change of it: one state machine under one lock. Nothing here waits."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import select
import threading
import time
from dataclasses import dataclass

from crossover.sync.arbiter.messages import Evicted, Grant, Hello, Message, Pause, Recall, Release, Request
from crossover.sync.arbiter.places import Place
from crossover.sync.arbiter.protocol import ProtocolError
from crossover.sync.device import Device, Marker
from crossover.sync.link import Link

_log = logging.getLogger("crossover.sync")
_BROKEN = (OSError, ProtocolError)


class Phase(enum.Enum):
    """What a job does with its device."""

    AWAY = "away"
    ASKING = "asking"
    COMPUTING = "computing"
    RESTING = "resting"  # has the turn, and nothing under way that needs it
    LEAVING = "leaving"  # gives the turn back as soon as the device has finished


@dataclass(slots=True)
class Tally:
    """What taking turns has cost. Times in seconds.

    Attributes:
        turns: turns given back.
        waited_s: waited for the turn.
        computed_s: between taking the turn up and laying it down.
        sent: messages to the arbiter after the hello.
        evictions: leases that ran out.
        alone: times that the job went on without an arbiter.
    """

    turns: int = 0
    waited_s: float = 0.0
    computed_s: float = 0.0
    sent: int = 0
    evictions: int = 0
    alone: int = 0


class Holding:
    """A job's hold on one device. All methods but :meth:`ring` and :meth:`quiet` want the lock held.

    Args:
        place: where the arbiter is.
        device: what is computed on.
        hello: who this is.

    Attributes:
        lock: guards everything here.
        phase: what the job does.
        epoch: the turn that it has; 0 where it has none.
        recalled: whether somebody is known to wait for it.
        rest_until: while resting: when to obey a recall; ``None``: at once.
        pausing: whether the job will not ask again soon.
        left: the end of what the device was given in this turn.
        link: to the arbiter, ``None`` where there is none.
        bell: an eventfd that wakes the agent.
        attention: what the agent sleeps on: the bell, and the link while messages are the agent's.
        listening: whether they are. They are the job's own while it asks, and can wait after a recall.
    """

    def __init__(self, place: Place, device: Device, hello: Hello) -> None:
        self.place = place
        self.device = device
        self.hello = hello
        self.tally = Tally()
        self.lock = threading.Lock()
        self.phase = Phase.AWAY
        self.epoch = 0
        self.recalled = False
        self.rest_until: float | None = None
        self.pausing = False
        self.began = 0.0
        self._used_s = 0.0  # computed since the job last came from waiting for other ranks
        self._lap_began = 0.0
        self.link: Link | None = None
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.listening = False
        self.attention = select.epoll()
        self.attention.register(self.bell, select.EPOLLIN)
        self.left: Marker = device.mark()
        self._own_work: Marker = self.left  # what was computed before the last wait for other ranks
        self._resumed: Marker = self.left  # the end of that wait
        self._serial = 0

    # -- the job's own changes ---------------------------------------------------------------------------------------

    def compute_alone(self) -> None:
        """Compute without a turn: there is no arbiter."""
        self._begin()
        self.tally.alone += 1

    def stop_alone(self) -> None:
        """Nothing more is launched without a turn."""
        self._end_lap()
        self.phase = Phase.AWAY

    def resume(self) -> None:
        """Go on with the turn that was kept."""
        if self.rest_until is None:  # it rested to wait for other ranks, and the device may still do so
            self._resumed = self.device.mark()
            self._begin()
        self.phase = Phase.COMPUTING
        self._lap_began = time.monotonic()
        self.rest_until = None
        self.pausing = False

    def _begin(self) -> None:
        """Begin to compute, after a wait for other ranks or for the turn."""
        self.phase = Phase.COMPUTING
        self.began = self._lap_began = time.monotonic()
        self._used_s = 0.0

    def _end_lap(self) -> None:
        lap = time.monotonic() - self._lap_began
        self._used_s += lap
        self.tally.computed_s += lap

    def lay_down(self, until_s: float) -> None:
        """Nothing more is launched in this turn: keep it while nobody wants it, and for ``until_s`` in any case."""
        if self.phase is Phase.COMPUTING:
            self.left = self.device.mark()
            self._end_lap()
        if not until_s:
            self._own_work = self.left
        self.phase = Phase.RESTING
        self.rest_until = time.monotonic() + until_s if until_s else None
        if not self.recalled:
            return
        if until_s:
            self.ring()
        elif self.left.passed():
            self.hand_over()
        else:
            self.phase = Phase.LEAVING
            self.ring()

    def hand_over(self, again: bool = False) -> None:
        """Give the turn back; with ``again``, ask for the next one in the same message."""
        if self.phase is Phase.COMPUTING:
            self._end_lap()
        if self.pausing and not again:
            self.send(Pause())
        else:
            self._serial += again
            self.send(Release(self._serial, self.epoch, int(again), self._used_s))
        self._listen(False)
        self.tally.turns += 1
        self.phase = Phase.AWAY
        self.epoch = 0
        self.recalled = self.pausing = False
        self.rest_until = None
        if again:
            self._expect_grant()

    def ask(self) -> None:
        """Ask for a turn."""
        self._serial += 1
        self.pausing = False
        self.send(Request(self._serial, 0, self.device.peak_bytes()))
        self._expect_grant()

    def _expect_grant(self) -> None:
        if self.link is None:
            self.compute_alone()
        else:
            self.phase = Phase.ASKING

    # -- the arbiter's -----------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Tell the arbiter something, if there is one."""
        if self.link is None:
            return
        try:
            self.link.send(message)
            self.tally.sent += 1
        except _BROKEN as error:
            self.lose(str(error))

    def hear(self) -> None:
        """Act on all messages that are there."""
        while self.link is not None:
            try:
                message = self.link.receive()
            except _BROKEN as error:
                self.lose(str(error))
                return
            if message is None:
                return
            self._understand(message)

    def lose(self, reason: str) -> None:
        """The arbiter is gone: go on without, and have the agent look for one."""
        _log.info("%s: %s; going on without turns until an arbiter is back", self.place.name, reason)
        self.drop_link()
        self.ring()

    def drop_link(self) -> None:
        """Be without an arbiter."""
        self._listen(False)
        link, self.link = self.link, None
        if link is not None:
            link.close()
        self.epoch = 0
        self.recalled = False
        if self.phase in (Phase.RESTING, Phase.LEAVING):
            self.phase = Phase.AWAY

    def _understand(self, message: Message) -> None:
        if isinstance(message, Grant):
            self._granted(message)
        elif isinstance(message, Recall) and message.epoch == self.epoch:
            self._recalled()
        elif isinstance(message, Evicted):
            self.tally.evictions += 1
            _log.warning(
                "job %r rank %d held %s longer than its lease while others waited; they are served meanwhile",
                self.hello.job,
                self.hello.rank,
                self.device.name,
            )

    def _granted(self, grant: Grant) -> None:
        if self.phase is not Phase.ASKING or grant.serial != self._serial:
            self.send(Release(0, grant.epoch))
            return
        # One step with taking the message: a turn that is granted and recalled at once must not look like a rest.
        self._begin()
        self.epoch = grant.epoch
        self.recalled = bool(grant.wanted)
        self._resumed = self.device.mark()
        self.rest_until = None
        self._listen(not grant.wanted)

    def _recalled(self) -> None:
        self.recalled = True
        self._listen(False)
        if not self._resumed.passed():
            # The host has gone ahead, and the device still waits for other ranks: no turn is kept during that, so it
            # goes back now. What the device was given since runs beside the next holder's work, once.
            self.left = self._own_work
            self.phase = Phase.LEAVING
        elif self.phase is Phase.RESTING and self.rest_until is None:
            self.phase = Phase.LEAVING

    # -- the agent ---------------------------------------------------------------------------------------------------

    def _listen(self, wanted: bool) -> None:
        """Have the agent sleep on the link too, or no longer; this does not wake it."""
        if wanted != self.listening and self.link is not None:
            if wanted:
                self.attention.register(self.link, select.EPOLLIN)
            else:
                self.attention.unregister(self.link)
            self.listening = wanted

    def ring(self) -> None:
        """Have the agent look at the state anew."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.bell, 1)

    def quiet(self) -> None:
        """The agent is about to look."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
