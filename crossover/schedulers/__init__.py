"""Schedules: when gradients travel and when they are applied."""

from __future__ import annotations

from collections.abc import Callable

from crossover.schedulers.fifo_delayed import FifoDelayed
from crossover.schedulers.overlapped import Overlapped
from crossover.schedulers.priority import Priority
from crossover.schedulers.schedule import Schedule

__all__ = ["FifoDelayed", "Overlapped", "Priority", "Schedule", "register_schedule", "schedule_of"]

_BY_NAME: dict[str, Callable[[], Schedule]] = {
    "fifo_delayed": FifoDelayed,
    "overlapped": Overlapped,
    "priority": Priority,
}


def register_schedule(name: str, make: Callable[[], Schedule]) -> None:
    """Let :func:`schedule_of` know a schedule by ``name``; for parts that stand above this one."""
    _BY_NAME[name] = make


def schedule_of(choice: Schedule | str) -> Schedule:
    """The schedule itself, or a new one by name.

    Raises:
        ValueError: neither a schedule nor a known name.
    """
    if isinstance(choice, Schedule):
        return choice
    if isinstance(choice, str) and choice.lower() in _BY_NAME:
        return _BY_NAME[choice.lower()]()
    raise ValueError(
        f"schedule: is {choice!r}; use one of {sorted(_BY_NAME)} or an object such as crossover.schedulers.Overlapped()"
    )
