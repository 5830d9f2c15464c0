"""Notices that steps take longer than the plan promised."""

from __future__ import annotations

import time

from crossover.comm.communicator import Communicator

CHECKED_STEPS = 100
TOLERATED = 0.15  # of the promised time


class Drift:
    """Compares the time of steps with what was promised, every hundred steps.

    Across ranks: all call :meth:`step` in the same steps, and get the same answer.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._began: float | None = None
        self.measured_us = 0

    def restart(self) -> None:
        """Begin anew: another plan is followed."""
        self._steps = 0
        self._began = None

    def step(self, communicator: Communicator, name: str, promised_us: float) -> bool:
        """A step is over. Whether the last hundred took clearly longer than promised; collective where it is asked.

        Args:
            communicator: the ranks.
            name: of the collective.
            promised_us: time of a step by the plan.
        """
        if self._began is None:
            self._began = time.perf_counter()
            return False
        self._steps += 1
        if self._steps < CHECKED_STEPS:
            return False
        mine = round((time.perf_counter() - self._began) * 1e6 / self._steps)
        self.restart()
        self.measured_us = max(communicator.all_gather_object(mine, name=name))
        return self.measured_us > promised_us * (1.0 + TOLERATED)
