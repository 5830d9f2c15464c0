"""A job's side of turn taking: when it asks, when it gives back, and what happens in between.

The turn is a lock for speed only. Whatever goes wrong - no arbiter, a lease that ran out, an arbiter that died - the
job computes without it: sharing can make a job slower, never wrong or dead.

Two rules keep jobs on several nodes from waiting for each other in a circle, without any order among the nodes:

1. A job that holds the turn does not wait for another rank. It gives the turn back first, so every turn ends by itself.
2. That holds for a lone job too, which keeps its turn over many steps: it goes on holding while it waits for the
   network, so a recall is obeyed by a thread of its own, at once, if no computing is under way.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator

from crossover.sync.agent import Agent
from crossover.sync.arbiter.messages import Bye, Hello, Pause, Status
from crossover.sync.arbiter.places import Place
from crossover.sync.device import Device
from crossover.sync.holding import Holding, Phase, Tally
from crossover.sync.link import ANSWER_S, Link

STALL_S = 0.005
"""A job that has the turn but launches nothing for this long, as while it waits for data, gives it to who waits."""
YIELD_S = 0.02
"""A turn that is at least this long is offered to others between the micro-batches of a step."""


class Turn:
    """The right to compute on one device, as seen by one process.

    Its methods are called by the training thread, or by autograd's. They do nothing in a forked child, such as a
    DataLoader's worker.

    Args:
        place: where its arbiter is.
        device: what is computed on.
        hello: who this is.

    Attributes:
        inert: whether it is closed, or this is a forked child.
        owner: the thread that took it up last.
    """

    def __init__(self, place: Place, device: Device, hello: Hello) -> None:
        self.device = device
        self.inert = False
        self.owner: int | None = None
        self._holding = Holding(place, device, hello)
        self._lock = self._holding.lock
        self._agent = Agent(self._holding)
        self._agent.start()
        _living.add(self)

    @property
    def phase(self) -> Phase:
        """What the job does with its device."""
        return self._holding.phase

    @property
    def tally(self) -> Tally:
        """What taking turns has cost."""
        return self._holding.tally

    @property
    def served(self) -> bool:
        """Whether there is an arbiter."""
        return self._holding.link is not None

    @property
    def refused(self) -> bool:
        """Whether there will be none for this process."""
        return self._agent.refused

    @property
    def contended(self) -> bool:
        """Whether somebody was known to wait when the turn was last looked at."""
        return self._holding.recalled

    def take(self) -> None:
        """Return with the turn in hand, or without an arbiter. At once, and without a message, if it is still held.

        Nothing that other ranks wait for may be left undone by the caller, but collectives may be under way.
        """
        holding = self._holding
        if self.inert or holding.phase is Phase.COMPUTING:
            return
        with self._lock:
            self.owner = threading.get_ident()
            if holding.phase is Phase.RESTING:
                holding.resume()
                return
            if holding.link is None and holding.phase is not Phase.LEAVING:
                holding.compute_alone()
                return
        # The device may still be waiting for other ranks. To hold the turn then would break the first rule.
        self.device.mark().wait()
        with self._lock:
            if holding.phase is Phase.LEAVING:
                holding.hand_over()
            holding.ask()
        self._await_grant()

    def rest(self, until_s: float = 0.0) -> None:
        """What needs the turn is launched. It is given to whoever waits, once the device is done.

        Args:
            until_s: seconds during which :meth:`take` is likely to follow, so that the turn is kept that long.
        """
        if self.inert:
            return
        holding = self._holding
        with self._lock:
            if holding.phase is Phase.COMPUTING and not holding.epoch:
                holding.stop_alone()
            elif holding.phase is Phase.COMPUTING or (holding.phase is Phase.RESTING and not until_s):
                holding.lay_down(until_s)

    def offer(self) -> None:
        """Between two micro-batches: let whoever waits go first if the policy says so. Returns with the turn."""
        holding = self._holding
        if self.inert or not self._is_long(holding):
            return
        self.device.mark().wait()
        with self._lock:
            if not self._is_long(holding):
                return
            holding.hand_over(again=True)
        self._await_grant()

    @staticmethod
    def _is_long(holding: Holding) -> bool:
        computing = holding.phase is Phase.COMPUTING and holding.epoch and holding.recalled
        return bool(computing) and time.monotonic() >= holding.began + YIELD_S

    def pause(self) -> None:
        """Stop competing until :meth:`take` is called, as for a checkpoint."""
        if self.inert:
            return
        with self._lock:
            self._holding.pausing = True
        self.rest()
        with self._lock:
            if self._holding.phase is Phase.AWAY and self._holding.pausing:
                self._holding.pausing = False
                self._holding.send(Pause())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within a turn: wait for other ranks inside. The turn is laid down before and taken up again after."""
        if self.inert or self._holding.phase is not Phase.COMPUTING:
            yield
            return
        self.rest()
        try:
            yield
        finally:
            self.take()

    def close(self) -> None:
        """Leave for good."""
        if self.inert:
            return
        self.inert = True
        with self._lock:
            self._holding.send(Bye())
            self._holding.drop_link()
        self._agent.close()

    def _await_grant(self) -> None:
        """Wait until the turn is granted or there is no arbiter: at most ``ANSWER_S`` twice after one fell silent."""
        holding, began, probed = self._holding, time.monotonic(), False
        while True:
            with self._lock:
                if holding.link is None and holding.phase is Phase.ASKING:
                    holding.compute_alone()
                if holding.phase is not Phase.ASKING or holding.link is None:
                    holding.tally.waited_s += time.monotonic() - began
                    return
                poll = _poll_of(holding.link)
            heard = bool(poll.poll(ANSWER_S * 1000))
            with self._lock:
                if heard:
                    probed = False
                    holding.hear()
                elif probed:
                    holding.lose(f"no answer in {ANSWER_S:g} s")
                else:  # others may have long turns: see whether the arbiter is alive
                    probed = True
                    holding.send(Status())

    def _abandon(self) -> None:
        """In a forked child: its parent's turn is none of its business. Locks may be held by threads that are no more.

        Its copy of the connection is closed: a child that lives on must not speak for the parent.
        """
        self.inert = True
        with contextlib.suppress(OSError):
            self._holding.attention.close()
            os.close(self._holding.bell)
        if self._holding.link is not None:
            self._holding.link.close()
            self._holding.link = None


def _poll_of(link: Link) -> select.poll:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return poll


_living: weakref.WeakSet[Turn] = weakref.WeakSet()


def _in_child() -> None:
    for turn in list(_living):
        turn._abandon()


os.register_at_fork(after_in_child=_in_child)
