"""Collectives under way, known to scripts by an integer as in Horovod."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crossover.comm.communicator import Communicator, Work


@dataclass(frozen=True, slots=True)
class Started:
    """What a collective leaves behind when it is started.

    Attributes:
        works: what has to be waited for, in order.
        finish: turns the received buffers into the result, once all of ``works`` are done.
    """

    works: Sequence[Work]
    finish: Callable[[], Any]


_lock = threading.Lock()
_numbers = itertools.count(1)
_pending: dict[int, tuple[tuple[int, str], Started]] = {}
_in_flight: set[tuple[int, str]] = set()
_unnamed: weakref.WeakKeyDictionary[Communicator, Counter[str]] = weakref.WeakKeyDictionary()


def full_name(communicator: Communicator, kind: str, name: str | None) -> str:
    """The name of a collective on the wire; calls without a name are numbered in the order in which they are made."""
    if name is not None:
        return f"{kind}.{name}"
    with _lock:
        counts = _unnamed.setdefault(communicator, Counter())
        counts[kind] += 1
        return f"{kind}.unnamed.{counts[kind]}"


def start(communicator: Communicator, label: str, launch: Callable[[], Started]) -> int:
    """Start a collective and keep it until :func:`synchronize`.

    Raises:
        ValueError: one of that name is in flight.
    """
    key = (id(communicator), label)
    with _lock:
        if key in _in_flight:
            raise ValueError(
                f"name: {label!r} is already in flight; synchronize(handle) the first one before another of that name "
                "is started, or give it a name of its own"
            )
        _in_flight.add(key)
    try:
        started = launch()
    except BaseException:
        with _lock:
            _in_flight.discard(key)
        raise
    with _lock:
        handle = next(_numbers)
        _pending[handle] = (key, started)
    return handle


def poll(handle: int) -> bool:
    """Whether :func:`synchronize` would return at once. For information: it differs between ranks.

    Raises:
        ValueError: nothing of that handle is in flight.
    """
    with _lock:
        _, started = _pending.get(handle) or _unknown(handle)
    return all(work.is_completed() for work in started.works)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result.

    On a GPU the current stream waits, not the host.

    Args:
        handle: what the ``_async`` call returned. It is used up, also when an error is raised.

    Returns:
        The tensor, list of tensors, or pair of tensors that the call without ``_async`` would have returned.

    Raises:
        ValueError: nothing of that handle is in flight.
        CommunicationError: a rank failed or did not come within the time-out.
    """
    with _lock:
        key, started = _pending.pop(handle) if handle in _pending else _unknown(handle)
    try:
        for work in started.works:
            work.wait()
        return started.finish()
    finally:
        with _lock:
            _in_flight.discard(key)


def _unknown(handle: int) -> tuple[tuple[int, str], Started]:
    raise ValueError(
        f"handle: {handle!r} is not in flight; use what an *_async call returned, once (synchronize uses it up)"
    )


def forget_all() -> None:
    """Drop what is in flight, as after a failure when communication is set up anew."""
    with _lock:
        _pending.clear()
        _in_flight.clear()
