"""``CROSSOVER_PROFILE``: an unchanged script measures itself, and rank 0 writes what all ranks saw."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import torch

from crossover.auto.watched import Seen, Watched
from crossover.reduction import Reduction
from crossover.selsync.smoothing import DEFAULT_FACTOR, DEFAULT_WARMUP_STEPS

PROFILE_VARIABLE = "CROSSOVER_PROFILE"
STEPS_VARIABLE = "CROSSOVER_PROFILE_STEPS"
DEFAULT_STEPS = 40
SKIPPED_STEPS = 5

logger = logging.getLogger("crossover.auto")


def steps_needed(steps: int) -> int:
    """Training steps after which a profile is there, of which ``steps`` are timed.

    Example:
        >>> steps_needed(40)
        110
    """
    return SKIPPED_STEPS + DEFAULT_WARMUP_STEPS + 2 * steps


class Recorder(Watched):
    """The plain schedule, which writes a profile once and then is nothing but plain.

    Buckets are small while it measures, so that the profile shows where computing and sending lie in the model. First
    the norms of ``25 + steps`` steps are watched, then ``steps`` are timed.

    Args:
        path: of the profile. A second optimizer of the process writes beside it, with a number in the name.
        steps: ``None``: ``$CROSSOVER_PROFILE_STEPS``, or 40.

    Raises:
        ValueError: the number of steps is not usable.
    """

    _written: int = 0

    def __init__(self, path: str | Path, steps: int | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self.steps = steps_asked() if steps is None else steps
        self.passes = 0
        self._done = False

    def attach(self, reduction: Reduction, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Watched.attach`."""
        super().attach(reduction, optimizer)
        self.bucket_cap_bytes = None if self._done else self.small_bucket_bytes

    def revise(self) -> bool:
        """See :meth:`Schedule.revise`. Buckets get their usual size when the profile is there."""
        self.passes += 1
        if self._done or not self.buckets or self.passes < SKIPPED_STEPS:
            return False
        if not self.watching:
            self.watch(DEFAULT_WARMUP_STEPS + self.steps, self.steps)
        if not self.complete:
            return False
        self._done = True
        self._keep(self.seen(DEFAULT_FACTOR))
        self.bucket_cap_bytes = None
        return True

    def _keep(self, seen: Seen | None) -> None:
        number, Recorder._written = Recorder._written, Recorder._written + 1
        if self.reduction.communicator.rank != 0:
            return
        path = self.path if number == 0 else self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")
        if seen is None:
            logger.warning("%s: no step could be timed, as no module was called in forward", PROFILE_VARIABLE)
            return
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            seen.profile.save(unfinished)
            unfinished.replace(path)  # who waits for it finds all of it
        except OSError as error:
            logger.warning("%s: cannot write %s (%s); training goes on", PROFILE_VARIABLE, path, error)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return
        logger.info("profile of %d steps written to %s; next: crossover advise %s", self.steps, path, path)


def steps_asked() -> int:
    """What ``$CROSSOVER_PROFILE_STEPS`` says.

    Raises:
        ValueError: it is no whole number of 1 or more.
    """
    text = os.environ.get(STEPS_VARIABLE) or str(DEFAULT_STEPS)
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{STEPS_VARIABLE}: is {text!r}; give a whole number of 1 or more")
    return int(text)
