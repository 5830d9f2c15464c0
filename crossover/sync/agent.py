"""The thread that answers the arbiter while the training thread is busy."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace

from crossover.sync.holding import Holding, Phase
from crossover.sync.link import ANSWER_S, START_S, Unserved, connect

_log = logging.getLogger("crossover.sync")
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 5.0


class Agent:
    """Obeys recalls that come while the job waits for its network, and looks for an arbiter where there is none.

    Args:
        holding: the job's hold on its device.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._closed = False
        self._refused = False
        self._loudness = logging.WARNING
        self._thread = threading.Thread(target=self._run, name=f"crossover-{holding.device.name}", daemon=True)

    def start(self) -> None:
        """Look for an arbiter, then go on in the background."""
        self._dial()
        self._thread.start()

    def close(self) -> None:
        """End the thread. The lock is not held."""
        self._closed = True
        self._holding.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(START_S + ANSWER_S)  # it may be looking for an arbiter
        if not self._thread.is_alive():
            self._holding.attention.close()
            os.close(self._holding.bell)

    @property
    def refused(self) -> bool:
        """Whether looking for an arbiter again is of no use."""
        return self._refused

    def _run(self) -> None:
        holding, retry_s = self._holding, FIRST_RETRY_S
        while not self._closed:
            with holding.lock:
                lost = holding.link is None and not self._refused
                ends = self._rest_ends()
            if lost:
                timeout: float | None = retry_s
            else:
                timeout = None if ends is None else max(ends - time.monotonic(), 0.0)
            holding.attention.poll(timeout)
            holding.quiet()
            if not lost:
                self._mind()
            elif not self._closed:
                retry_s = FIRST_RETRY_S if self._dial() else min(2 * retry_s, LONGEST_RETRY_S)

    def _rest_ends(self) -> float | None:
        """When a rest is over that others wait for the end of."""
        holding = self._holding
        return holding.rest_until if holding.phase is Phase.RESTING and holding.recalled else None

    def _mind(self) -> None:
        """Look at messages and at the time, and give the turn back if it is due."""
        holding = self._holding
        with holding.lock:
            if holding.listening:
                holding.hear()
            ends = self._rest_ends()
            if ends is not None and time.monotonic() >= ends:
                holding.phase = Phase.LEAVING
            leaving, marker, epoch = holding.phase is Phase.LEAVING, holding.left, holding.epoch
        if leaving:
            marker.wait()
            with holding.lock:
                if holding.phase is Phase.LEAVING and holding.epoch == epoch:
                    holding.hand_over()

    def _dial(self) -> bool:
        """Look for an arbiter; whether there is one."""
        holding = self._holding
        hello = holding.hello
        try:
            peak = max(hello.peak_bytes, holding.device.peak_bytes())
            link = connect(holding.place, replace(hello, peak_bytes=peak))
        except (Unserved, ValueError) as reason:
            self._refused = not isinstance(reason, Unserved) or reason.final
            _log.log(self._loudness, "job %r computes without turns: %s", hello.job, reason)
            self._loudness = logging.DEBUG  # once is enough
            return False
        with holding.lock:
            if self._closed:
                link.close()
                return False
            holding.link = link
        if not link.welcome.fits:
            _log.warning(
                "device %s: the jobs on it need %.1f GiB together and it has %.1f GiB; start fewer, or smaller ones",
                holding.device.name,
                link.welcome.needed_bytes / 2**30,
                hello.capacity_bytes / 2**30,
            )
        return True
