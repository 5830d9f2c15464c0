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
from crossover.deft.loss_watch import LossWatch
from crossover.deft.plan import Plan, QueueState, mean_duration, merged_sizes, synchronous_plan
from crossover.deft.planner import Limits, make_plan
from crossover.deft.preserver import Candidate, NoiseScale, choose, efficiency, gain, largest_curvature, walk_ratio

logger = logging.getLogger("crossover")

LADDER = ((1, 1), (11, 10), (5, 4), (3, 2), (2, 1))
MERGINGS = (1, 2, 3)  # steps in an update at most, tried besides what the user allows
_WALK_STEPS = 600


@dataclass(frozen=True, slots=True)
class Preserver:
    """What may be lost in convergence, and what is done when more is lost.

    Attributes:
        tolerance: progress per sample that a plan may lose, estimated from the gradient noise scale; 0.01 is no loss to
            speak of, 1 allows everything. Of what is allowed the plan that makes most progress in time is taken: with
            1 the fastest way to an accuracy, in more steps than without merging.
        prior: noise scale taken before there is an estimate, in batches of one rank. With 0 merged steps are worth no
            more than one, so that none are merged; ``math.inf`` holds nothing against merging.
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
    prior: float = 0.0
    walk_tolerance: float = 0.25
    loss_rise: float = 1.5
    gradient_rise: float = 100.0
    fallback_steps: int = 200
    retries: int = 3
    least_gain: float = 0.03
    least_coverage: float = 0.5

    def __post_init__(self) -> None:
        for name in ("tolerance", "prior", "walk_tolerance", "least_gain", "least_coverage"):
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


class Pilot:
    """Turns measurements into plans.

    Across ranks: all feed it the same numbers at the same steps, so all decide the same; rank 0 logs.

    Attributes:
        preserver: what may be lost.
        limits: what plans may do; the capacity is chosen from the ladder unless ``fixed_capacity``.
        noise: the gradient noise scale.
        loss: the training loss.
        retries_left: how often the delay may still be tried again.
        chosen: what the plan chosen last may do.
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
        self.chosen = limits
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
        plans = self._plans(times, state)
        freest = max(merged_sizes(next(iter(plans.values())).repeated), default=1)
        candidates = [self._synchronous(times)]
        candidates += [self._candidate(limits, plan, times, size) for limits, plan in plans.items()]
        if self.fixed_capacity:
            chosen = candidates[1]
        else:
            chosen = choose(candidates, self.preserver.tolerance, self.preserver.least_gain)
        numbers = {"coverage_rate": coverage, **self._noise(), **{c.name: str(c) for c in candidates}}
        if chosen.limits is None:
            self.log(step, "synchronous: no delay pays for what it loses", **numbers)
            return None
        plan, self.chosen = plans[chosen.limits], chosen.limits
        merged = merged_sizes(plan.repeated)
        held = ": waits rather than merge more steps" if max(merged, default=1) < freest else ""
        action = f"delayed, capacity {chosen.name}{held}"
        self.log(step, action, merged=merged, **numbers)
        return plan

    def _plans(self, times: BucketTimes, state: QueueState) -> dict[Limits, Plan]:
        """What may be done, the freest first."""
        wait, most = self.limits.sync_wait, self.most_merged
        if self.fixed_capacity:
            limits = Limits(self.limits.capacity, wait, most)
            return {limits: make_plan(times, limits, state)}
        plans = {}
        for limits in [Limits(capacity, wait, most) for capacity in LADDER]:
            plans[limits] = make_plan(times, limits, state)
        needed = max(merged_sizes(plans[Limits(LADDER[0], wait, most)].repeated), default=1)
        for limits in [Limits(LADDER[0], wait, fewer) for fewer in MERGINGS if fewer < needed]:
            plans[limits] = make_plan(times, limits, state)
        return plans

    def _noise(self) -> dict[str, Any]:
        """What is known of the noise scale, for the log."""
        known, samples = self.noise.value, self.noise.samples
        if known is None or self.noise.cautious is None:
            return {"noise_scale": f"not known from {samples} samples, taken as {self.preserver.prior:g}"}
        return {"noise_scale": known, "at_least": self.noise.cautious, "samples": samples}

    @property
    def noise_scale(self) -> float:
        """The noise scale that merging is judged by, in batches of one rank: the cautious estimate, or the prior."""
        cautious = self.noise.cautious
        return self.preserver.prior if cautious is None else cautious

    def _synchronous(self, times: BucketTimes) -> Candidate:
        return Candidate("synchronous", None, mean_duration(synchronous_plan(times.buckets), times), 1.0)

    def _candidate(self, limits: Limits, plan: Plan, times: BucketTimes, size: int) -> Candidate:
        merged = merged_sizes(plan.repeated)
        kept = self._efficiency(merged, size) if merged else 0.0
        numerator, denominator = limits.capacity
        name = str(numerator) if denominator == 1 else f"{numerator}/{denominator}"
        if limits.most_merged < self.most_merged:
            name += f" merging {limits.most_merged} at most"
        return Candidate(name, limits, mean_duration(plan, times), kept)

    def _efficiency(self, merged: Sequence[int], size: int) -> float:
        scale = self.noise_scale
        kept = 1.0 if math.isinf(scale) else efficiency(merged, size, scale)
        walk = self.loss.walk()
        if walk is not None and max(merged) > 1:
            ratio = walk_ratio(*walk, merged, [gain(steps, size, scale) for steps in merged], _WALK_STEPS)
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

    def warn_of_momentum(self, step: int, groups: Sequence[dict[str, Any]], spike: bool = False) -> None:
        """Log by how much one update of delay narrows the range of stable learning rates; half or more is not said.

        Args:
            step: training step.
            groups: the optimizer's.
            spike: late gradients are weighted by :mod:`crossover.schedulers.spike`.
        """
        for number, group in enumerate(groups):
            momentum, nesterov = float(group.get("momentum", 0.0) or 0.0), bool(group.get("nesterov", False))
            before = largest_curvature(momentum, delayed=False, nesterov=nesterov)
            after = largest_curvature(momentum, delayed=True, nesterov=nesterov, spike=spike and momentum > 0)
            if after < 0.5 * before:
                self.log(
                    step,
                    f"momentum {momentum:g} in group {number}: one late update narrows the stable range of learning "
                    "rates; a longer warm-up, less momentum or clipping help",
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
