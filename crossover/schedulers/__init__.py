"""Schedules: when gradients travel and when they are applied."""

from __future__ import annotations

from collections.abc import Callable

from crossover.schedulers.overlapped import Overlapped
from crossover.schedulers.priority import Priority
from crossover.schedulers.schedule import Schedule

__all__ = ["Overlapped", "Priority", "Schedule", "schedule_of"]

_BY_NAME: dict[str, Callable[[], Schedule]] = {"overlapped": Overlapped, "priority": Priority}


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
