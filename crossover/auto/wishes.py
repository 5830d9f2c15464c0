"""What becomes of ``"auto"`` and of ``CROSSOVER_PROFILE`` beside the other wishes of a user."""

from __future__ import annotations

import logging
import os

from crossover.auto.gate import AutoGate
from crossover.auto.recorder import PROFILE_VARIABLE, Recorder
from crossover.auto.schedule import Auto
from crossover.auto.watched import Watched
from crossover.schedulers.overlapped import Overlapped
from crossover.schedulers.schedule import Schedule
from crossover.selsync.gate import Gate

logger = logging.getLogger("crossover.auto")


def reconciled(schedule: Schedule, gate: Gate | None) -> tuple[Schedule, Gate | None]:
    """The schedule and the gate to use.

    A profile is taken of plain steps, whatever else is asked for. Beside a gate, which decides what travels, the
    schedule ``"auto"`` is the plain one; the gate ``"auto"`` goes with that one only.

    Raises:
        ValueError: the gate ``"auto"`` is asked for beside a schedule of the user's own choice.
    """
    path = os.environ.get(PROFILE_VARIABLE)
    if path:
        if gate is not None or type(schedule) not in (Overlapped, Auto):
            asked = " and ".join(type(wish).__name__ for wish in (schedule, gate) if wish is not None)
            logger.warning("%s: is set, so this job trains plainly instead of with %s", PROFILE_VARIABLE, asked)
        return Recorder(path), None
    if gate is not None and isinstance(schedule, Auto):
        schedule = Overlapped()
    if isinstance(gate, AutoGate):
        if type(schedule) not in (Overlapped, Watched):
            raise ValueError(
                f"schedule: is {type(schedule).__name__}; the gate 'auto' begins with plain steps: leave the schedule "
                "out, or give a gate of your choice, such as 'selsync:0.3'"
            )
        schedule = Watched()
    return schedule, gate
