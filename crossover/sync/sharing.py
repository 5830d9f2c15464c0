"""``TimeShare``: what a user says about a job that shares its device, and what the optimizer calls while it trains."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from crossover.comm.waiting import around_waits
from crossover.sync import gpu
from crossover.sync.arbiter.messages import MAX_JOB_BYTES
from crossover.sync.client import STALL_S, Turn
from crossover.sync.device import find_device
from crossover.sync.forward import ForwardWatch, in_backward
from crossover.sync.registry import let_go, obtain

_log = logging.getLogger("crossover.sync")
SHARING_VARIABLE = "CROSSOVER_SHARING"
MODES = ("overlap", "defer")


class Sharing:
    """How a job shares its device with others: what the optimizer calls. This one shares with nobody.

    Attributes:
        deferred: whether communication starts only when the job has computed.
    """

    deferred = False

    def facts(self) -> dict[str, str]:
        """What has to be equal on all ranks, for comparing and for messages."""
        return {}

    def attach(self, used: torch.device, rank: int, size: int, local_rank: int, backend: str) -> None:
        """Join the other jobs on the device.

        Args:
            used: where the parameters are.
            rank: of this process in the job.
            size: number of the job's ranks.
            local_rank: place among those on this node.
            backend: what carries the collectives.

        Raises:
            ValueError: the directory for sockets is not safe, or a GPU's UUID cannot be found.
        """

    def detach(self) -> None:
        """Leave the device to the others."""

    def computing(self) -> None:
        """The device is about to be used: for an update, or by a backward pass."""

    def micro_batch(self) -> None:
        """A backward pass has ended that is not shared with other ranks."""

    def communicating(self) -> None:
        """Own computing has been launched to its end; what follows waits for other ranks."""

    def between_steps(self) -> None:
        """An update has been launched; data and the next forward pass follow."""


class TimeShare(Sharing):
    """Take turns on the device with other jobs: one computes while the others wait for their network.

    A turn runs from the optimizer's update through the next forward pass to the end of backward, when the last gradient
    has been computed and before the wait for other ranks. Long steps may be interrupted between micro-batches. Nothing
    but timing changes: weights are bit for bit those of the job without sharing, and where no arbiter can be reached,
    or it dies, the job goes on without.

    Across ranks: every rank takes turns on its own device by itself; ranks need not agree, and no rank waits for
    another while it holds a turn. ``mode`` has to be the same on all ranks.

    Args:
        job: name of the job, the same on its ranks; what ``crossover top`` shows.
        weight: its share of the device against others that keep asking, 0.001 to 1000.
        priority: class, -100 to 100. Higher classes go first; a lower one gets one turn in nine at least.
        mode: ``"overlap"`` starts each bucket's all-reduce as soon as it is full, as without sharing, and other jobs
            fill what is left of the wait. ``"defer"`` starts all of them at the end of backward: more to wait for, and
            worth it only where communication disturbs the computing of the job that has the turn.
        peak_memory: bytes of device memory that the job will need at most. With those of the other jobs more than the
            device has, a warning says so. 0: what it was seen to use.
        device: name of the device for its arbiter; default: ``CROSSOVER_DEVICE``, else the GPU's UUID, or for the CPU
            ``cpu0``, ``cpu1``, ... by local rank.

    Raises:
        ValueError: an argument is not usable.

    Example:
        >>> import crossover as xo
        >>> xo.sync.TimeShare(job="resnet-a", weight=2.0)
        TimeShare(job='resnet-a', weight=2.0)
    """

    def __init__(
        self,
        job: str,
        weight: float = 1.0,
        priority: int = 0,
        mode: str = "overlap",
        peak_memory: int = 0,
        device: str | None = None,
    ) -> None:
        _check(job, weight, priority, mode, peak_memory)
        self.job = job
        self.weight = float(weight)
        self.priority = priority
        self.mode = mode
        self.deferred = mode == "defer"
        self.peak_memory = peak_memory
        self.device = device
        self.turn: Turn | None = None
        self._users = 0
        self._watch: ForwardWatch | None = None
        self._end_aside: Callable[[], None] | None = None

    def __repr__(self) -> str:
        given = {"job": self.job, "weight": self.weight, "priority": self.priority, "mode": self.mode}
        usual = {"weight": None, "priority": 0, "mode": "overlap"}
        words = ", ".join(f"{key}={value!r}" for key, value in given.items() if usual.get(key) != value)
        return f"TimeShare({words})"

    # -- what the optimizer calls ------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """See :meth:`Sharing.facts`. Where communication starts early, others of the job must not start it late."""
        return {"sharing": "deferred"} if self.deferred else {}

    def attach(self, used: torch.device, rank: int, size: int, local_rank: int, backend: str) -> None:
        """See :meth:`Sharing.attach`."""
        self._users += 1
        if self._users > 1:  # by another optimizer of this process, which trains on the same device
            return
        device = find_device(used, local_rank, self.device)
        self.turn = obtain(device, rank, size, self.job, self.weight, self.priority, self.peak_memory)
        if used.type == "cuda" and rank == 0 and (text := gpu.advice(backend, gpu.mps_runs())) is not None:
            _log.warning("job %r shares %s: %s", self.job, device.name, text)
        self._watch = ForwardWatch(self.turn, used)
        self._end_aside = around_waits(self._aside)

    def _aside(self) -> AbstractContextManager[object]:
        """Around a wait on other ranks, such as that of a synchronised batch normalisation within a turn."""
        turn = self.turn
        if turn is None or not (turn.owner == threading.get_ident() or in_backward()):
            return contextlib.nullcontext()
        return turn.aside()

    def detach(self) -> None:
        """See :meth:`Sharing.detach`."""
        self._users = max(self._users - 1, 0)
        if self._users:
            return
        if self._end_aside is not None:
            self._end_aside()
            self._end_aside = None
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        turn, self.turn = self.turn, None
        if turn is not None:
            let_go(turn)

    def computing(self) -> None:
        """See :meth:`Sharing.computing`."""
        if self.turn is not None:
            self.turn.take()

    def micro_batch(self) -> None:
        """See :meth:`Sharing.micro_batch`."""
        if self._watch is not None:
            self._watch.forwarded = False
        if self.turn is not None:
            self.turn.offer()
            self.turn.rest(STALL_S)

    def communicating(self) -> None:
        """See :meth:`Sharing.communicating`."""
        if self._watch is not None:
            self._watch.forwarded = False
        if self.turn is not None:
            self.turn.rest()

    def between_steps(self) -> None:
        """See :meth:`Sharing.between_steps`."""
        if self.turn is not None:
            self.turn.rest(STALL_S)


def sharing_of(wish: Sharing | str | None) -> Sharing | None:
    """A sharing policy by object or text, such as ``"timeshare:job=a,weight=2"``; ``None`` or ``""`` is none.

    Raises:
        ValueError: it is neither, or the text is not understood.

    Example:
        >>> sharing_of("timeshare:job=a,weight=2,priority=1")
        TimeShare(job='a', weight=2.0, priority=1)
    """
    if wish is None or isinstance(wish, Sharing):
        return wish
    if not isinstance(wish, str):
        raise ValueError(f"sharing: is {wish!r}; give a crossover.sync.TimeShare or text like 'timeshare:job=a'")
    if not wish:
        return None
    kind, _, rest = wish.partition(":")
    readers: dict[str, Any] = {
        "job": str,
        "weight": float,
        "priority": int,
        "mode": str,
        "peak_memory": int,
        "device": str,
    }
    options: dict[str, Any] = {}
    try:
        if kind.strip().lower() != "timeshare":
            raise ValueError(f"kind {kind!r} is not known")
        for word in filter(None, rest.split(",")):
            key, _, value = word.partition("=")
            if key.strip() not in readers:
                raise ValueError(f"option {key.strip()!r} is not known")
            options[key.strip()] = readers[key.strip()](value.strip())
        if "job" not in options:
            raise ValueError("the job has no name")
    except ValueError as error:
        raise ValueError(
            f"sharing: is {wish!r}: {error}; write timeshare:job=NAME, with any of {', '.join(list(readers)[1:])} "
            "after it, such as timeshare:job=a,weight=2"
        ) from error
    return TimeShare(**options)


def _check(job: str, weight: float, priority: int, mode: str, peak_memory: int) -> None:
    if not isinstance(job, str) or not job.strip() or not job.isprintable() or len(job.encode()) > MAX_JOB_BYTES:
        raise ValueError(f"job: is {job!r}; give a name of 1 to {MAX_JOB_BYTES} bytes of printable characters")
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 1e-3 <= weight <= 1e3:
        raise ValueError(f"weight: is {weight!r}; it has to be a number from 0.001 to 1000")
    if not isinstance(priority, int) or isinstance(priority, bool) or not -100 <= priority <= 100:
        raise ValueError(f"priority: is {priority!r}; it has to be a whole number from -100 to 100")
    if mode not in MODES:
        raise ValueError(f"mode: is {mode!r}; it has to be one of {', '.join(map(repr, MODES))}")
    if not isinstance(peak_memory, int) or isinstance(peak_memory, bool) or not 0 <= peak_memory < 1 << 62:
        raise ValueError(f"peak_memory: is {peak_memory!r}; it has to be a number of bytes, or 0")
