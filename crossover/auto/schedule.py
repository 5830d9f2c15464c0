"""``schedule="auto"``: plain until it is known what a delay would bring, and again where it brings nothing.

It stands above the schedules, which know nothing of it.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any

import torch

from crossover.auto.choice import Choice, choose_schedule, milliseconds
from crossover.auto.delegating import Delegating
from crossover.auto.watched import Seen, Watched
from crossover.deft.course import NEVER
from crossover.deft.drift import Drift
from crossover.deft.pilot import Decision, Preserver
from crossover.deft.plan import QueueState, mean_duration, synchronous_plan
from crossover.deft.schedule import DeFT
from crossover.reduction import Reduction
from crossover.schedulers.schedule import Schedule
from crossover.selsync.smoothing import DEFAULT_FACTOR

logger = logging.getLogger("crossover.auto")

MOST_NORMS = 60
SLOW_WINDOWS = 2
"""Hundreds of steps in a row that take clearly longer than before, after which a plain job is measured again."""


class Auto(Delegating):
    """Chooses between the plain schedule and :class:`~crossover.deft.DeFT` by what your own training shows.

    The first steps are plain: DDP's buckets, the same bits. The last of these are watched, and the cost model of
    ``crossover advise`` predicts both schedules. If a delay is worth it, buckets are made small, some more plain steps
    are measured with them, and DeFT decides by its own plan and Preserver. Else the job stays plain, with nothing
    attached. One line in the log ``crossover.auto`` of rank 0 says what was chosen, with the numbers.

    It decides again every ``replan_steps``, when steps come to take longer, and when DeFT finds no plan any more.

    Across ranks: rank 0 decides, and all get what it decided. ``Priority`` is not chosen: it crosses the barrier
    between steps and refuses what a script may do there (clipping, loss scaling), so a running job cannot go over.

    Beside a gate, which decides what is shared, it is plain.

    Args:
        warmup_steps: plain steps before the first decision; a learning-rate warm-up should lie within.
        profile_steps: steps that are timed, each time.
        replan_steps: decide again after so many steps.
        preserver: what may be lost in convergence.
        deft: further arguments of :class:`~crossover.deft.DeFT`.

    Attributes:
        steps: shared passes so far.
        decisions: all of them, the last one last; DeFT's own are in ``auto.deft.decisions``.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = xo.DistributedOptimizer(optimizer, schedule=xo.auto.Auto(warmup_steps=200))
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 100,
        profile_steps: int = 20,
        replan_steps: int = 2000,
        preserver: Preserver | None = None,
        **deft: Any,
    ) -> None:
        if not isinstance(profile_steps, int) or profile_steps < 1:
            raise ValueError(f"profile_steps: is {profile_steps!r}; it has to be a whole number of 1 or more")
        if not isinstance(warmup_steps, int) or warmup_steps < profile_steps + 1:
            raise ValueError(
                f"warmup_steps: is {warmup_steps!r}; give a whole number above the {profile_steps} profile_steps"
            )
        if {"profile", "capacity"} & deft.keys():
            raise ValueError("profile, capacity: say what auto is to find out; give them to DeFT itself")
        self.preserver = preserver or Preserver()
        self.warmup_steps, self.profile_steps, self.replan_steps = warmup_steps, profile_steps, replan_steps
        self._options = {"replan_steps": replan_steps, "preserver": self.preserver, **deft}
        self._make_deft()  # its arguments are checked now
        self.plain = Watched()
        self.deft: DeFT | None = None
        self.decisions: list[Decision] = []
        self._loaded: dict[str, Any] | None = None
        self._start_over()

    def _start_over(self) -> None:
        self.steps = 0
        self._norms = min(self.warmup_steps - self.profile_steps - 1, MOST_NORMS)
        self._watch_at: float = self.warmup_steps - self.profile_steps - self._norms
        self._on_trial = False
        self._laid_out = False
        self._restart_drift()

    def _make_deft(self, bucket_bytes: int | None = None) -> DeFT:
        options = dict(self._options)
        if bucket_bytes is not None:
            options["bucket_bytes"] = bucket_bytes
        return DeFT(warmup_steps=self._trial_steps, profile_steps=self.profile_steps, **options)

    @property
    def _trial_steps(self) -> int:
        return self.profile_steps + 2

    @property
    def active(self) -> Schedule:
        """See :attr:`Delegating.active`."""
        return self.plain if self.deft is None else self.deft

    @property
    def choice(self) -> str:
        """``"plain"`` or ``"deft"``; while DeFT is tried, still ``"plain"``."""
        return "plain" if self.deft is None or self._on_trial else "deft"

    def observe(self, loss: float) -> None:
        """Tell this rank's loss of the step, so that DeFT's preserver can watch it; ranks need not all do so."""
        if self.deft is not None:
            self.deft.observe(loss)

    # -- attaching ---------------------------------------------------------------------------------------------------

    def attach(self, reduction: Reduction, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Schedule.attach`. Collective: the link is timed."""
        super().attach(reduction, optimizer)
        self._optimizer = weakref.ref(optimizer)
        self.plain.attach(reduction, optimizer)

    def detach(self) -> None:
        """See :meth:`Schedule.detach`."""
        if self.deft is not None:
            self.deft.detach()
            self.deft = None
        self.plain.detach()
        self.bucket_cap_bytes = None
        self._start_over()
        super().detach()

    def expect_layout(self) -> None:
        """Go on with DeFT where a state says so; if only some ranks have one, by the first of them. Collective."""
        if self._laid_out:
            return
        self._laid_out = True
        loaded, self._loaded = self._loaded, None
        mine = None if loaded is None else loaded.get("bucket_bytes")
        states = self._gather((loaded is not None, mine), "resume")
        known = [size for has, size in states if has]
        if known:
            deft = self._try_deft(known[0])
            if loaded is not None:
                deft.load_state_dict(loaded)

    def _gather(self, value: Any, what: str) -> list[Any]:
        name = f"{self.reduction.name}.auto.{what}"
        return self.reduction.communicator.all_gather_object(value, name=name)

    # -- choosing ----------------------------------------------------------------------------------------------------

    def revise(self) -> bool:
        """See :meth:`Schedule.revise`: go over to the other schedule where it is time to."""
        self.steps += 1
        if not self.buckets:
            return False
        return self._revise_plain() if self.deft is None else self._revise_deft(self.deft)

    def _revise_plain(self) -> bool:
        if self.plain.complete:
            return self._decide()
        if self.plain.watching:
            return False
        if self.steps >= self._watch_at or self._slower():
            self.plain.watch(self._norms, self.profile_steps)
        return False

    def _decide(self) -> bool:
        seen = self.plain.seen(DEFAULT_FACTOR)
        communicator, name = self.reduction.communicator, f"{self.reduction.name}.auto.choice"
        mine = self._choose(seen) if communicator.rank == 0 else None
        choice: Choice = communicator.broadcast_object(mine, name=name)
        if choice.changes and seen is not None:
            self._try_deft().course.pilot.noise.load_state_dict(seen.noise)
            return True
        self._say(choice)
        self._stay_plain()
        return False

    def _choose(self, seen: Seen | None) -> Choice:
        if seen is None:
            return Choice("plain: no step could be timed, as no module was called in forward")
        return choose_schedule(seen.profile, self.plain.link, self.preserver)

    def _say(self, choice: Choice) -> None:
        self.decisions.append(Decision(self.steps, choice.action, choice.numbers))
        if self.reduction.communicator.rank == 0:
            logger.info("auto: step %d: %s", self.steps, choice)

    # -- plain -------------------------------------------------------------------------------------------------------

    def _stay_plain(self, again: bool = True) -> None:
        self._watch_at = self.steps + self.replan_steps if again else math.inf
        self._restart_drift()

    def _restart_drift(self) -> None:
        self._drift, self._slow_windows, self._usual_us = Drift(), 0, math.inf

    def _slower(self) -> bool:
        """Whether two hundreds of steps took longer than the first hundred after the decision. Now and then collective.

        Two, as an evaluation may lie in one.
        """
        if self.steps <= self.warmup_steps or self._watch_at == math.inf:
            return False
        known, name = self._drift.measured_us, f"{self.reduction.name}.auto.pace"
        slow = self._drift.step(self.reduction.communicator, name, self._usual_us)
        if self._drift.measured_us != known:
            self._slow_windows = self._slow_windows + 1 if slow else 0
            if self._usual_us == math.inf:
                self._usual_us = float(self._drift.measured_us)
        return self._slow_windows >= SLOW_WINDOWS

    # -- DeFT --------------------------------------------------------------------------------------------------------

    def _try_deft(self, bucket_bytes: int | None = None) -> DeFT:
        """DeFT takes over; buckets follow. Collective."""
        optimizer = self._optimizer()
        assert optimizer is not None
        self.plain.layout(())
        self.deft = deft = self._make_deft(bucket_bytes)
        deft.attach(self.reduction, optimizer)
        self.bucket_cap_bytes = deft.bucket_cap_bytes
        self._on_trial, self._idle_passes = True, 0
        return deft

    def _revise_deft(self, deft: DeFT) -> bool:
        if self._on_trial:
            if deft.course.steps < self._trial_steps:
                return False
            if not deft.delayed:
                return self._leave_deft(deft, "plain: deft, measured with small buckets, is ")
            self._on_trial = False
            self._say(self._described(deft))
        # The first pass after the last late one may bring merged steps, whose learning rate is DeFT's to set.
        idle = not deft.delayed and deft.state == QueueState()
        self._idle_passes = self._idle_passes + 1 if idle else 0
        if self._idle_passes < 2 or not self._rests(deft):
            return False
        return self._leave_deft(deft, "plain: deft is ")

    def _rests(self, deft: DeFT) -> bool:
        """Whether DeFT is synchronous for longer than it falls back for, or measures anew for."""
        course = deft.course
        soon = max(self.preserver.fallback_steps, course.profile_steps + 2)
        return course.decide_at == NEVER or course.decide_at - course.steps > soon

    def _leave_deft(self, deft: DeFT, why: str) -> bool:
        """Nothing is in flight: plain again, and for good where DeFT may not be tried any more."""
        last = _last_choice(deft)
        self._stay_plain(again=deft.course.decide_at != NEVER)
        deft.detach()
        self.deft, self._on_trial, self.bucket_cap_bytes = None, False, None
        self._say(Choice(why + last.action, numbers=last.numbers))
        return True

    def _described(self, deft: DeFT) -> Choice:
        course, last = deft.course, _last_choice(deft)
        assert course.profile is not None, "a plan was made from it"
        times = course.profile.times()
        plain_us = mean_duration(synchronous_plan(times.buckets), times)
        numbers = {
            "plain": milliseconds(1e-6 * plain_us) + " a step",
            "deft": milliseconds(1e-6 * course.promised_us) + " a step",
            "computing": milliseconds(1e-6 * times.compute),
            **last.numbers,
        }
        return Choice(f"deft: {last.action}", changes=True, numbers=numbers)

    # -- records and checkpoints -------------------------------------------------------------------------------------

    def describe(self) -> tuple[str, dict[str, Any]]:
        """See :meth:`Schedule.describe`."""
        reason, facts = self.active.describe()
        return f"auto: {reason}", {**facts, "choice": self.choice}

    def state_dict(self) -> dict[str, Any]:
        """DeFT's, where it is at work; empty while nothing can be in flight."""
        return {} if self.deft is None else self.deft.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`DelayedSchedule.load_state_dict`. A plain job that is training already stays plain for now."""
        if not self._laid_out:
            self._loaded = state or None
        elif self.deft is not None:
            self.deft.load_state_dict(state)


def _last_choice(deft: DeFT) -> Decision:
    """What DeFT chose last; warnings may have followed."""
    chosen = [decision for decision in deft.decisions if decision.action.startswith(("delayed", "synchronous"))]
    return (chosen or deft.decisions or [Decision(0, "goes on from a checkpoint")])[-1]
