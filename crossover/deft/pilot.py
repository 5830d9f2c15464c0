"""Decides how a job is scheduled: synchronous or delayed, with how much capacity; again and again, each time logged.

Pure decisions from numbers that all ranks share: no clock, no communication, no torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crossover.deft.cost import BucketTimes
from crossover.deft.plan import Plan, QueueState, mean_duration, merged_sizes, synchronous_plan
from crossover.deft.planner import Limits, make_plan
from crossover.deft.preserver import Candidate, NoiseScale, choose, efficiency, gain, largest_curvature, walk_ratio

logger = logging.getLogger("crossover")

LADDER = ((1, 1), (11, 10), (5, 4), (3, 2), (2, 1))
_WALK_STEPS = 600


@dataclass(frozen=True, slots=True)
class Preserver:
    """What may be lost in convergence, and what is done when more is lost.

    Attributes:
        tolerance: progress per sample that a plan may lose, estimated from the gradient noise scale; 0.01 is no loss to
            speak of, 1 allows everything. Where the noise scale is not known yet, nothing is held against a plan.
        walk_tolerance: the same for the Gaussian walk of the loss, which needs :meth:`DeFT.observe`.
        loss_rise: a smoothed loss this many times its smallest value so far ends the delay.
        gradient_rise: so does a squared gradient norm this many times its running mean.
        fallback_steps: synchronous steps then.
        retries: how often the delay is tried again, each time merging half as many steps at most.
        least_gain: what a delay has to save in time, as a part of the synchronous step.
        least_coverage: below this coverage rate a job stays synchronous: there is nothing to gain.

    Raises:
        ValueError: a number is out of range.
    """

    tolerance: float = 0.1
    walk_tolerance: float = 0.25
    loss_rise: float = 1.5
    gradient_rise: float = 100.0
    fallback_steps: int = 200
    retries: int = 3
    least_gain: float = 0.03
    least_coverage: float = 0.5

    def __post_init__(self) -> None:
        for name in ("tolerance", "walk_tolerance", "least_gain", "least_coverage"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: is {getattr(self, name)!r}; give 0 or more")
        for name in ("loss_rise", "gradient_rise"):
            if not getattr(self, name) > 1:
                raise ValueError(f"{name}: is {getattr(self, name)!r}; give a factor above 1")
        for name in ("fallback_steps", "retries"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"{name}: is {getattr(self, name)!r}; give a whole number of 0 or more")


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and from which numbers.

    Attributes:
        step: training step.
        action: in a few words.
        numbers: by name.
    """

    step: int
    action: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        numbers = ", ".join(f"{key} {_text(value)}" for key, value in self.numbers.items())
        return f"step {self.step}: {self.action}" + (f" ({numbers})" if numbers else "")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class LossWatch:
    """Follows the training loss as all ranks see it.

    Attributes:
        level: smoothed loss; ``None`` before the first.
        lowest: the smallest level so far.
    """

    SMOOTHING = 0.9

    def __init__(self) -> None:
        self.level: float | None = None
        self.lowest = math.inf
        self._changes: list[float] = []

    def add(self, loss: float, synchronous: bool) -> None:
        """Take the mean loss over ranks. Changes between synchronous updates feed the walk."""
        if not math.isfinite(loss):
            self.level = math.inf
            return
        before = self.level
        known = before is not None and math.isfinite(before)
        self.level = self.SMOOTHING * before + (1 - self.SMOOTHING) * loss if known and before is not None else loss
        self.lowest = min(self.lowest, self.level)
        if synchronous and known and before is not None:
            self._changes.append(self.level - before)
            del self._changes[:-500]

    def walk(self) -> tuple[float, float, float] | None:
        """Start, drift and deviation of a walk towards a floor at 0; ``None`` if it is not known or not going down."""
        if len(self._changes) < 20 or self.level is None or not math.isfinite(self.level):
            return None
        mean = sum(self._changes) / len(self._changes)
        spread = sum((change - mean) ** 2 for change in self._changes) / (len(self._changes) - 1)
        return (self.level, -mean, math.sqrt(spread)) if mean < 0 else None


class Pilot:
    """Turns measurements into plans.

    Across ranks: all feed it the same numbers at the same steps, so all decide the same; rank 0 logs.

    Attributes:
        preserver: what may be lost.
        limits: what plans may do; the capacity is chosen from the ladder unless ``fixed_capacity``.
        noise: the gradient noise scale.
        loss: the training loss.
        retries_left: how often the delay may still be tried again.
        capacity: the factor chosen last.
        decisions: all of them, the last one last.
    """

    def __init__(self, preserver: Preserver, limits: Limits, fixed_capacity: bool) -> None:
        self.preserver = preserver
        self.limits = limits
        self.fixed_capacity = fixed_capacity
        self.noise = NoiseScale()
        self.loss = LossWatch()
        self.retries_left = preserver.retries
        self.most_merged = limits.most_merged
        self.capacity = limits.capacity
        self.decisions: list[Decision] = []
        self.silent = False
        self._gradient_mean: float | None = None

    def log(self, step: int, action: str, **numbers: Any) -> None:
        """Keep a decision, and say it on rank 0."""
        self.decisions.append(Decision(step, action, numbers))
        if not self.silent:
            logger.info("DeFT: %s", self.decisions[-1])

    # -- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, step: int, times: BucketTimes, size: int, state: QueueState) -> Plan | None:
        """The plan from ``state`` on; ``None`` to stay synchronous, or to return to it."""
        coverage = times.coverage_rate
        if coverage < self.preserver.least_coverage and not self.fixed_capacity:
            self.log(step, "synchronous: nothing to gain", coverage_rate=coverage)
            return None
        plans = {capacity: make_plan(times, self._limits(capacity), state) for capacity in self._capacities()}
        candidates = [self._synchronous(times)]
        candidates += [self._candidate(capacity, plan, times, size) for capacity, plan in plans.items()]
        if self.fixed_capacity:
            chosen = candidates[1]
        else:
            chosen = choose(candidates, self.preserver.tolerance, self.preserver.least_gain)
        numbers = {
            "coverage_rate": coverage,
            "noise_scale": self.noise.value,
            **{c.name: f"{c.step_ticks:.0f} us at efficiency {c.efficiency:.3f}" for c in candidates},
        }
        if chosen.capacity is None:
            self.log(step, "synchronous: no delay pays for what it loses", **numbers)
            return None
        plan, self.capacity = plans[chosen.capacity], chosen.capacity
        self.log(step, f"delayed, capacity {chosen.name}", merged=merged_sizes(plan.repeated), **numbers)
        return plan

    def _limits(self, capacity: tuple[int, int]) -> Limits:
        return Limits(capacity, self.limits.sync_wait, self.most_merged)

    def _capacities(self) -> Sequence[tuple[int, int]]:
        return [self.limits.capacity] if self.fixed_capacity else LADDER

    def _synchronous(self, times: BucketTimes) -> Candidate:
        return Candidate("synchronous", None, mean_duration(synchronous_plan(times.buckets), times), 1.0)

    def _candidate(self, capacity: tuple[int, int], plan: Plan, times: BucketTimes, size: int) -> Candidate:
        merged = merged_sizes(plan.repeated)
        kept = self._efficiency(merged, size) if merged else 0.0
        name = str(capacity[0]) if capacity[1] == 1 else f"{capacity[0]}/{capacity[1]}"
        return Candidate(name, capacity, mean_duration(plan, times), kept)

    def _efficiency(self, merged: Sequence[int], size: int) -> float:
        known = self.noise.value
        kept = 1.0 if known is None or math.isinf(known) else efficiency(merged, size, known)
        walk = self.loss.walk()
        if walk is not None and max(merged) > 1:
            ratio = walk_ratio(*walk, merged, [gain(steps, size, known) for steps in merged], _WALK_STEPS)
            if ratio < 1.0 - self.preserver.walk_tolerance:
                kept = min(kept, ratio)
        return kept

    # -- guarding ----------------------------------------------------------------------------------------------------

    def alarm(self, squared: float | None) -> str | None:
        """Why the delay has to end now, or ``None``.

        Args:
            squared: squared norm of the gradient applied last, equal on all ranks.
        """
        if squared is not None:
            mean = self._gradient_mean
            if not math.isfinite(squared):
                return "a gradient is not finite"
            if mean is not None and mean > 0 and squared > self.preserver.gradient_rise * mean:
                return f"the squared gradient norm rose to {squared:.3g} from {mean:.3g}"
            self._gradient_mean = squared if mean is None else 0.9 * mean + 0.1 * squared
        level = self.loss.level
        if level is not None and level > self.preserver.loss_rise * self.loss.lowest > 0:
            return f"the loss rose to {level:.4g} from {self.loss.lowest:.4g}"
        return None

    def fall_back(self, step: int, reason: str) -> bool:
        """The delay ends; returns whether it may be tried again after ``fallback_steps``."""
        again = self.retries_left > 0
        self.retries_left -= again
        self.most_merged = max(self.most_merged // 2, 1)
        self._gradient_mean = None
        self.loss.lowest = math.inf
        self.loss.level = None
        numbers = {"retries_left": self.retries_left, "most_merged": self.most_merged}
        self.log(step, f"synchronous: {reason}", **numbers)
        return again

    def warn_of_momentum(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Log by how much one update of delay narrows the range of stable learning rates; half or more is not said."""
        for number, group in enumerate(groups):
            momentum, nesterov = float(group.get("momentum", 0.0) or 0.0), bool(group.get("nesterov", False))
            before = largest_curvature(momentum, delayed=False, nesterov=nesterov)
            after = largest_curvature(momentum, delayed=True, nesterov=nesterov)
            if after < 0.5 * before:
                self.log(
                    step,
                    f"momentum {momentum:g} in group {number}: one late update narrows the stable range of learning "
                    "rates; Nesterov, less momentum or clipping widen it",
                    largest_synchronous=before,
                    largest_delayed=after,
                )

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a bit-equal continuation needs."""
        return {
            "noise": self.noise.state_dict(),
            "level": self.loss.level,
            "lowest": self.loss.lowest,
            "changes": list(self.loss._changes),
            "retries_left": self.retries_left,
            "most_merged": self.most_merged,
            "gradient_mean": self._gradient_mean,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.noise.load_state_dict(state["noise"])
        self.loss.level, self.loss.lowest = state["level"], state["lowest"]
        self.loss._changes = list(state["changes"])
        self.retries_left, self.most_merged = state["retries_left"], state["most_merged"]
        self._gradient_mean = state["gradient_mean"]
