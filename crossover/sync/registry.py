"""The turns of this process: one for each device and job, however many optimizers use it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from crossover.sync.arbiter.messages import Hello
from crossover.sync.arbiter.places import Place, directory
from crossover.sync.client import Turn
from crossover.sync.device import Device, host_name

_turns: dict[tuple[Place, str, int], tuple[Turn, int]] = {}


def obtain(device: Device, rank: int, size: int, job: str, weight: float, priority: int, peak_bytes: int) -> Turn:
    """The process's turn on a device. Several optimizers have it in common, or one would wait for the other.

    Raises:
        ValueError: the directory for sockets is not safe.
    """
    place = Place(directory(os.environ), host_name(), device.name)
    key = (place, job, rank)
    if key in _turns:
        turn, users = _turns[key]
    else:
        capacity = device.capacity_bytes()
        hello = Hello(0, 0, rank, size, priority, weight, peak_bytes, capacity, job)
        turn, users = Turn(place, device, hello), 0
    _turns[key] = turn, users + 1
    return turn


def let_go(turn: Turn) -> None:
    """One user of the turn less; the last one closes it."""
    for key, (known, users) in list(_turns.items()):
        if known is turn and users > 1:
            _turns[key] = turn, users - 1
        elif known is turn:
            del _turns[key]
            turn.close()


def present() -> Sequence[Turn]:
    """This process's turns."""
    return [turn for turn, _ in _turns.values()]
