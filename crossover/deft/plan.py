"""What every training step sends, closes and applies: a plan made once, equal on all ranks, replayed for ever.

Gradients travel in *generations*: the gradients of one or more consecutive steps, summed before they are sent. At any
time there are at most two: the *current* one, closed and on its way, and the one that still *accumulates*. A generation
closes exactly when the current one is complete by the end of backward, so that

* weights change only between steps, for the whole model at once,
* all steps of a generation run on the same weights,
* a generation is applied at most one update late.

Source: delayed updates are the paper's (Meng and Sun, DeFT, arXiv 2503.16815, abstract). Its case analysis could not be
read: generations and the rule for closing are ours. :mod:`crossover.deft.planner` makes plans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crossover.deft.cost import BucketTimes

Sends = tuple[tuple[int, int], ...]
_SETTLING_STEPS = 8


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one training step does; the same on all ranks.

    Attributes:
        forward: ``(link, bucket)`` of the current generation, sent from the end of the step before.
        backward: the same, sent from the start of backward.
        fresh: ``(link, bucket)`` of the generation that closes with this step, each sent once it is ready.
        close: the accumulated gradients, this step's included, become a generation of their own.
        apply: generations complete at the end of backward: 0, 1, or 2 where the one that closes is complete as well.
        forced: more is sent than there is time for, so that somebody waits.
    """

    forward: Sends = ()
    backward: Sends = ()
    fresh: Sends = ()
    close: bool = False
    apply: int = 0
    forced: bool = False


@dataclass(frozen=True, slots=True)
class QueueState:
    """What a step finds.

    Attributes:
        current: whether a closed generation is on its way.
        unsent: its buckets that have not been sent.
        accumulated: steps in the generation that still accumulates.
    """

    current: bool = False
    unsent: frozenset[int] = frozenset()
    accumulated: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps to take once, then steps to repeat for ever.

    Attributes:
        prefix: taken once.
        cycle: repeated; empty where no cycle was found in time: then a new plan starts from ``final``.
        final: the state after the last step given.
    """

    prefix: tuple[StepPlan, ...]
    cycle: tuple[StepPlan, ...]
    final: QueueState

    def step(self, number: int) -> StepPlan | None:
        """What step ``number``, counted from the start of the plan, does; ``None`` past the end of one without cycle.

        Example:
            >>> synchronous_plan(3).step(1000).apply
            1
        """
        if number < len(self.prefix):
            return self.prefix[number]
        return self.cycle[(number - len(self.prefix)) % len(self.cycle)] if self.cycle else None

    @property
    def repeated(self) -> tuple[StepPlan, ...]:
        """The steps that stand for the plan as a whole: the cycle, or the prefix where there is none."""
        return self.cycle or self.prefix

    def updates_per_step(self) -> float:
        """Updates of the weights for each training step, in the long run."""
        return len(merged_sizes(self.repeated)) / len(self.repeated)

    def as_json(self) -> str:
        """A canonical text: equal plans give equal texts."""
        value = asdict(self)
        value["final"]["unsent"] = sorted(self.final.unsent)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`as_json` wrote.

        Raises:
            ValueError: it is no plan.
        """
        try:
            value = json.loads(text)
            state = QueueState(**{**value["final"], "unsent": frozenset(value["final"]["unsent"])})
            return cls(_steps(value["prefix"]), _steps(value["cycle"]), state)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"plan: is {text!r:.80}, which is no plan ({error}); use what as_json() gave") from error

    def digest(self) -> str:
        """A hash of :meth:`as_json`, for comparing plans between ranks."""
        return hashlib.sha256(self.as_json().encode()).hexdigest()


def _steps(rows: Sequence[dict[str, Any]]) -> tuple[StepPlan, ...]:
    sends = ("forward", "backward", "fresh")
    return tuple(StepPlan(**{**row, **{key: tuple(map(tuple, row[key])) for key in sends}}) for row in rows)


def synchronous_plan(buckets: int) -> Plan:
    """Every bucket is sent when it is ready and applied in the same step, as DDP does."""
    fresh = tuple((0, bucket) for bucket in range(buckets - 1, -1, -1))
    return Plan((), (StepPlan(fresh=fresh, close=True, apply=1),), QueueState())


def catch_up(state: QueueState, buckets: int) -> StepPlan:
    """The synchronous step that leaves nothing on its way, from any state."""
    fresh = tuple((0, bucket) for bucket in range(buckets - 1, -1, -1))
    unsent = tuple((0, bucket) for bucket in sorted(state.unsent, reverse=True))
    return StepPlan(forward=unsent, fresh=fresh, close=True, apply=1 + int(state.current), forced=True)


def merged_sizes(steps: Sequence[StepPlan]) -> list[int]:
    """How many steps each generation that closes in ``steps`` has, walking round them as a cycle.

    Example:
        >>> merged_sizes([StepPlan(), StepPlan(close=True, apply=1)])
        [2]
    """
    closing = [number for number, step in enumerate(steps) if step.close]
    return [(number - before - 1) % len(steps) + 1 for before, number in _pairs(closing)]


def _pairs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    for place, number in enumerate(numbers):
        yield numbers[place - 1], number


def step_durations(steps: Sequence[StepPlan], times: BucketTimes, queued: bool = True) -> list[int]:
    """Ticks that each of ``steps`` takes, waits included; the first finds idle links.

    Each link works on one bucket at a time in launch order, and goes on over the ends of stages and steps.

    Args:
        steps: of a plan, one after the other.
        times: of all buckets.
        queued: what is to be sent in backward is queued behind what is sent in forward, as training does it; else it
            starts no sooner than backward.

    Example:
        >>> step_durations(synchronous_plan(2).cycle, BucketTimes((10, 10), (20, 20), ((15, 15),)))
        [75]
    """
    now, free = 0, [0] * times.links
    releases = times.releases()
    complete = fresh_complete = 0
    durations = []
    for step in steps:
        start, backward = now, now + times.forward_window
        for sends, ready in ((step.forward, start), (step.backward, start if queued else backward)):
            for link, bucket in sends:
                free[link] = max(free[link], ready) + times.reduce[link][bucket]
                complete = max(complete, free[link])
        for link, bucket in step.fresh:
            free[link] = max(free[link], backward + releases[bucket]) + times.reduce[link][bucket]
            fresh_complete = max(fresh_complete, free[link])
        now = backward + times.backward_window
        if step.close:
            everything = len(step.fresh) == times.buckets
            waits = [complete if step.apply > int(everything) else 0, fresh_complete if everything else 0]
            now = max(now, *waits)
            complete, fresh_complete = (0 if everything else fresh_complete), 0
        durations.append(now - start)
    return durations


def mean_duration(plan: Plan, times: BucketTimes) -> float:
    """Ticks of a step in the long run, waits included.

    Example:
        >>> mean_duration(synchronous_plan(2), BucketTimes((10, 10), (20, 20), ((15, 15),)))
        75.0
    """
    cycle = plan.repeated
    times_round = max(2, -(-_SETTLING_STEPS // len(cycle)))
    settled = sum(step_durations([*plan.prefix, *cycle * times_round], times)[-len(cycle) :])
    # a link that is behind falls back further from round to round, until steps wait for it
    return max(settled, *_loads(cycle, times)) / len(cycle)


def _loads(steps: Sequence[StepPlan], times: BucketTimes) -> list[int]:
    """Ticks for which each link is busy in ``steps``, and none."""
    loads = [0] * (times.links + 1)
    for step in steps:
        for link, bucket in (*step.forward, *step.backward, *step.fresh):
            loads[link] += times.reduce[link][bucket]
    return loads
