"""Crossover Synchronization: several jobs take turns on a device, one computing while the others wait for the network.

With ``DistributedOptimizer(sharing=TimeShare(job="a"))`` or ``CROSSOVER_SHARING=timeshare:job=a`` nothing else is
needed. Loops without our optimizer use :func:`turn`; what stops training for a while goes into :func:`paused`, and
collectives of one's own within forward or backward into :func:`waiting`.

Source: Luo et al., CrossoverScheduler (arXiv 2103.07974), of which only the abstract is public: several applications
time-share a GPU alternately, one's computing in the other's communication. The protocol here is ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from crossover.sync.ddp import share_ddp
from crossover.sync.forecast import Forecast, JobProfile, forecast
from crossover.sync.holding import Phase
from crossover.sync.loops import turns_of_process
from crossover.sync.registry import present
from crossover.sync.sharing import Sharing, TimeShare, sharing_of

__all__ = [
    "Forecast",
    "JobProfile",
    "Sharing",
    "TimeShare",
    "forecast",
    "paused",
    "share_ddp",
    "sharing_of",
    "turn",
    "waiting",
]


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Compute inside with the turn in hand; for hand-written loops and for evaluation.

    End it before waiting for other ranks. Uses the turn of an optimizer with ``sharing``, else what
    ``CROSSOVER_SHARING`` describes; without either it does nothing. May be nested.

    Example:
        >>> import crossover as xo
        >>> with xo.sync.turn():
        ...     pass  # forward and backward
    """
    fresh = [one for one in turns_of_process() if one.phase is not Phase.COMPUTING]
    for one in fresh:
        one.take()
    try:
        yield
    finally:
        for one in fresh:
            one.rest()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Stand back inside: a checkpoint, or anything long that does not need the device.

    Example:
        >>> import crossover as xo
        >>> with xo.sync.paused():
        ...     pass  # torch.save(...)
    """
    for one in present():
        one.pause()
    yield


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Wait for other ranks inside, within a turn: it is given back before, if somebody wants it, and taken after.

    Example:
        >>> import crossover as xo
        >>> with xo.sync.waiting():
        ...     pass  # torch.distributed.all_reduce(statistics)
    """
    with contextlib.ExitStack() as stack:
        for one in present():
            stack.enter_context(one.aside())
        yield
