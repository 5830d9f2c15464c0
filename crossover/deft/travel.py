"""Under how many steps DeFT lets an average of parameters travel: as many as it takes, by measurement.

Ours: the paper delays gradients, and has no gate.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from crossover.deft.compute_clock import ComputeClock
from crossover.deft.cost import LinkCost
from crossover.deft.profile import Profile
from crossover.reduction import Reduction
from crossover.schedulers.travel import Travel

_REMEMBERED = 20  # averages of which it is known how long they were on their way


def steps_under_way(reduce_us: int, compute_us: int, most: int) -> int:
    """Steps of computing under which an all-reduce is hidden: rounded up, 1 to ``most``.

    Example:
        >>> steps_under_way(250, 100, 8), steps_under_way(10, 100, 8), steps_under_way(10_000, 100, 8)
        (3, 1, 8)
    """
    return min(max(-(-reduce_us // max(compute_us, 1)), 1), most)


class MeasuredTravel(Travel):
    """Averages are waited for in the warm-up, whose last steps are timed; then they travel under as many as they need.

    Every ``replan_steps`` steps the number is worked out anew, from steps timed again and from how long averages were
    on their way. Computing takes as long as on the slowest rank, a transfer as on the rank where it was shortest: on
    the others part of it was waiting for that rank.

    Args:
        reduction: whose ranks agree.
        cost: of an all-reduce while the link is idle; equal on all ranks.
        warmup_steps: in which averages are waited for.
        profile_steps: the last of them, which are timed.
        replan_steps: from one decision to the next.
        most: the most steps that an average travels under; for what takes longer ranks wait.
        device: whose computing is timed.
        log: told of each decision: step, action, numbers by name.
        given: used for the first decision in place of what was measured.
    """

    def __init__(
        self,
        reduction: Reduction,
        cost: LinkCost,
        *,
        warmup_steps: int,
        profile_steps: int,
        replan_steps: int,
        most: int,
        device: torch.device,
        log: Callable[..., None],
        given: Profile | None = None,
    ) -> None:
        self._reduction = reduction
        self._cost = cost
        self._warmup_steps, self._profile_steps, self._replan_steps = warmup_steps, profile_steps, replan_steps
        self._most = most
        self._clock = ComputeClock(device)
        self._log = log
        self._given = given
        self._decide_at: int | None = None
        self._began: Any = None
        self._computing: list[tuple[Any, Any]] = []
        self._travelled_us: deque[float] = deque(maxlen=_REMEMBERED)

    def settings(self) -> dict[str, Any]:
        """See :meth:`Travel.settings`."""
        return {
            "warmup_steps": self._warmup_steps,
            "profile_steps": self._profile_steps,
            "replan_steps": self._replan_steps,
            "most_merged": self._most,
            "profile": None if self._given is None else self._given.as_json(),
        }

    def step_ends(self) -> None:
        """See :meth:`Travel.step_ends`."""
        if self._began is not None:
            self._computing.append((self._began, self._clock.mark()))
            self._began = None

    def landed(self, travelled_us: float | None) -> None:
        """See :meth:`Travel.landed`."""
        if travelled_us is not None:
            self._travelled_us.append(travelled_us)

    def step_begins(self, taken: int, nbytes: int) -> None:
        """See :meth:`Travel.step_begins`."""
        if self._decide_at is None:
            self._decide_at = max(taken - 1, 0) + self._warmup_steps
        if taken >= self._decide_at:
            self._decide(taken, nbytes)
        if taken >= self._decide_at - self._profile_steps:
            self._began = self._clock.mark()

    def _decide(self, taken: int, nbytes: int) -> None:
        """Collective."""
        compute_us, reduce_us = self._measured(taken, nbytes)
        self._computing.clear()
        if compute_us is None:
            self._decide_at = taken + self._profile_steps + 1
            self._log(taken, "averages are waited for: no step could be measured, trying again")
            return
        self.steps = steps_under_way(reduce_us, compute_us, self._most)
        self._decide_at = taken + self._replan_steps
        action = f"averages of parameters travel under {self.steps} steps"
        self._log(taken, action, reduce_us=reduce_us, compute_us=compute_us)

    def _measured(self, taken: int, nbytes: int) -> tuple[int | None, int]:
        """Time of a step's computing, if it is known, and of an average; the same on all ranks, microseconds."""
        given, self._given = self._given, None
        if given is not None:
            times = given.times()
            return times.compute, sum(times.reduce[0])
        mine = (
            statistics.median(self._clock.between_us(*marks) for marks in self._computing) if self._computing else None,
            statistics.median(self._travelled_us) if self._travelled_us else None,
        )
        everyone = self._reduction.communicator.all_gather_object(mine, name=f"{self._reduction.name}.travel.{taken}")
        computing = [compute for compute, _ in everyone if compute is not None]
        travelling = [reduce for _, reduce in everyone if reduce is not None]
        known = len(travelling) == len(everyone)
        reduce_us = round(min(travelling)) if known else self._cost.microseconds(nbytes)
        return (round(max(computing)) if computing else None), reduce_us

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Travel.state_dict`. Measurements are not in it."""
        return {**super().state_dict(), "decide_at": self._decide_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Travel.load_state_dict`."""
        super().load_state_dict(state)
        self._decide_at = state["decide_at"]
        self._began = None
        self._computing.clear()
        if self.steps:
            self._given = None
