"""A seam around every wait on other ranks, for what must not go on meanwhile, such as keeping a device from others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

Around = Callable[[], AbstractContextManager[object]]
_around: list[Around] = []
_nothing = contextlib.nullcontext()


def around_waits(make: Around) -> Callable[[], None]:
    """Have the waits of all communicators in this process made within what ``make()`` returns.

    Called in whatever thread waits, also for waits that are over at once. It may not start collectives.

    Returns:
        Call it to end this.

    Example:
        >>> end = around_waits(lambda: contextlib.nullcontext())
        >>> end()
    """
    _around.append(make)
    return lambda: _around.remove(make)


def waiting() -> AbstractContextManager[object]:
    """What a wait on other ranks is made within."""
    if not _around:
        return _nothing
    if len(_around) == 1:
        return _around[0]()
    stack = contextlib.ExitStack()
    for make in _around:
        stack.enter_context(make())
    return stack
