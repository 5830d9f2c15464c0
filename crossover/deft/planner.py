"""Making plans: which bucket travels in which window, until the steps repeat.

Source: knapsacks whose capacities are the whole forward and the whole backward time are the paper's (Meng and Sun,
DeFT, arXiv 2503.16815, abstract). Forced steps, the search for a cycle and planning many buckets in units are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossover.deft.cost import BucketTimes, quantise, tick
from crossover.deft.knapsack import pack_links, place_all
from crossover.deft.plan import Plan, QueueState, Sends, StepPlan

HORIZON = 512
_WORK = 2_000  # that a search for a cycle may take: buckets times steps times links and one
_MOST_UNITS = 40  # more buckets than this are planned in units of neighbours


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may do.

    Attributes:
        capacity: numerator and denominator of the factor on both windows; more than 1 sends more and waits a little.
        sync_wait: ticks added to the backward window, so that the last buckets to become ready can still be sent.
        most_merged: steps in a generation at most; reaching it forces a wait.

    Raises:
        ValueError: a number is out of range.
    """

    capacity: tuple[int, int] = (1, 1)
    sync_wait: int = 0
    most_merged: int = 8

    def __post_init__(self) -> None:
        if self.capacity[0] < 1 or self.capacity[1] < 1:
            raise ValueError(f"capacity: is {self.capacity}; give a numerator and a denominator of 1 or more")
        if self.sync_wait < 0:
            raise ValueError(f"sync_wait: is {self.sync_wait}; give 0 or more ticks")
        if self.most_merged < 1:
            raise ValueError(f"most_merged: is {self.most_merged}; give 1 or more steps")


def make_plan(
    times: BucketTimes, limits: Limits | None = None, state: QueueState | None = None, horizon: int | None = None
) -> Plan:
    """Plan steps from ``state`` on until a state comes back.

    Args:
        times: of all buckets, equal on all ranks.
        limits: see :class:`Limits`.
        state: what the first step finds; nothing on its way by default.
        horizon: steps after which the search for a cycle ends; by default 512, fewer for many buckets and links.

    With more than 40 buckets neighbours are planned together, so that planning takes milliseconds for any number.

    Returns:
        A prefix and a cycle. Every bucket of every generation is sent exactly once before that generation is applied.

    Example:
        >>> plan = make_plan(BucketTimes((10,) * 4, (20,) * 4, ((8, 12, 20, 30),)))
        >>> plan.cycle
        (StepPlan(forward=((0, 1), (0, 0)), backward=(), fresh=((0, 3), (0, 2)), close=True, apply=1, forced=False),)
    """
    units = _units(times.buckets)
    limits = limits or Limits()
    stage = _Stage(_by_unit(times, units), limits)
    state = state or QueueState()
    if horizon is None:
        horizon = max(min(HORIZON, _WORK // (len(units) * (1 + times.links))), 16)
    if len(units) < times.buckets:
        return _in_buckets(_search(stage, _in_units(state, units), horizon), units)
    return _search(stage, state, horizon)


def _search(stage: _Stage, state: QueueState, horizon: int) -> Plan:
    seen: dict[QueueState, int] = {}
    steps: list[StepPlan] = []
    while state not in seen and len(steps) < horizon:
        seen[state] = len(steps)
        step, state = stage.plan(state)
        steps.append(step)
    start = seen.get(state, len(steps))
    if start == len(steps) and (closed := stage.close_cycle(steps)) is not None:
        return closed
    return Plan(tuple(steps[:start]), tuple(steps[start:]), state)


def _units(buckets: int) -> list[range]:
    """Neighbours that are sent together: every bucket by itself unless there are very many. Depends on nothing else."""
    count = min(buckets, _MOST_UNITS)
    return [range(unit * buckets // count, (unit + 1) * buckets // count) for unit in range(count)]


def _by_unit(times: BucketTimes, units: Sequence[range]) -> BucketTimes:
    def sums(row: Sequence[int]) -> tuple[int, ...]:
        return tuple(sum(row[bucket] for bucket in unit) for unit in units)

    return BucketTimes(sums(times.forward), sums(times.backward), tuple(map(sums, times.reduce)), times.between)


def _in_units(state: QueueState, units: Sequence[range]) -> QueueState:
    unsent = frozenset(number for number, unit in enumerate(units) if state.unsent.intersection(unit))
    assert sum(len(units[number]) for number in unsent) == len(state.unsent), "a plan sends units as a whole"
    return QueueState(state.current, unsent, state.accumulated)


def _in_buckets(plan: Plan, units: Sequence[range]) -> Plan:
    def sends(row: Sends) -> Sends:
        return tuple((link, bucket) for link, unit in row for bucket in reversed(units[unit]))

    def steps(row: Sequence[StepPlan]) -> tuple[StepPlan, ...]:
        return tuple(
            StepPlan(sends(s.forward), sends(s.backward), sends(s.fresh), s.close, s.apply, s.forced) for s in row
        )

    unsent = frozenset(bucket for unit in plan.final.unsent for bucket in units[unit])
    final = QueueState(plan.final.current, unsent, plan.final.accumulated)
    return Plan(steps(plan.prefix), steps(plan.cycle), final)


class _Stage:
    """The windows, links and releases that every step of a plan has in common."""

    def __init__(self, times: BucketTimes, limits: Limits) -> None:
        wait = limits.sync_wait // tick(times)
        times = quantise(times)
        numerator, denominator = limits.capacity
        self.costs = times.reduce
        self.forward = [times.forward_window * numerator // denominator] * times.links
        self.backward = [times.backward_window * numerator // denominator + wait] * times.links
        self.releases = times.releases()
        self.buckets = times.buckets
        self.most_merged = limits.most_merged

    def plan(self, state: QueueState) -> tuple[StepPlan, QueueState]:
        """What a step that finds ``state`` does, and what it leaves."""
        idle = [0] * len(self.costs)
        unsent = state.unsent
        forward: list[tuple[int, int]] = []
        if unsent:
            forward = pack_links(_launch_order(unsent), self.costs, idle, self.forward)
            unsent = unsent - {bucket for _, bucket in forward}
        placed = place_all([bucket for bucket, _ in _launch_order(unsent)], self.costs, self.backward)
        if placed is not None:
            backward, finish = placed
            every = [(bucket, self.releases[bucket]) for bucket in range(self.buckets - 1, -1, -1)]
            fresh = pack_links(every, self.costs, finish, self.backward)
            return self._close(state, forward, backward, fresh, forced=False)
        backward = pack_links(_launch_order(unsent), self.costs, idle, self.backward)
        # Liveness: every step that closes nothing sends something, and no generation grows without end.
        if state.accumulated + 1 < self.most_merged and (backward or forward):
            left = unsent - {bucket for _, bucket in backward}
            step = StepPlan(tuple(forward), tuple(backward))
            return step, QueueState(True, left, state.accumulated + 1)
        rest = [(0, bucket) for bucket, _ in _launch_order(unsent)]
        return self._close(state, forward, rest, [], forced=True)

    def close_cycle(self, steps: Sequence[StepPlan]) -> Plan | None:
        """End a search without a cycle: a late step sends of its own generation what an early one has sent.

        That leaves the state which the early step left. It is done only where there is time for it.
        """
        closing = [number for number, step in enumerate(steps) if step.close and not step.forced]
        options = [(late, early) for late in closing for early in closing if early < late]
        fitting = [pair for pair in options if self._fits(steps[pair[0]], steps[pair[1]].fresh)]
        if not fitting:
            return None
        late, early = max(fitting, key=lambda pair: (self._value(steps[pair[1]].fresh), pair))
        sent = steps[early].fresh
        step = replace(steps[late], fresh=sent)
        unsent = frozenset(range(self.buckets)) - {bucket for _, bucket in sent}
        final = QueueState(bool(unsent), unsent, 0)
        return Plan(tuple(steps[: early + 1]), (*steps[early + 1 : late], step), final)

    def _fits(self, step: StepPlan, fresh: Sends) -> bool:
        free = [0] * len(self.costs)
        for link, bucket in step.backward:
            free[link] += self.costs[link][bucket]
        for link, bucket in fresh:
            free[link] = max(free[link], self.releases[bucket]) + self.costs[link][bucket]
        complete = len(fresh) == self.buckets
        same = complete == (len(step.fresh) == self.buckets)
        return same and all(end <= window for end, window in zip(free, self.backward, strict=True))

    def _value(self, fresh: Sends) -> int:
        return sum(self.costs[0][bucket] for _, bucket in fresh)

    def _close(
        self,
        state: QueueState,
        forward: list[tuple[int, int]],
        backward: list[tuple[int, int]],
        fresh: list[tuple[int, int]],
        forced: bool,
    ) -> tuple[StepPlan, QueueState]:
        unsent = frozenset(range(self.buckets)) - {bucket for _, bucket in fresh}
        apply = int(state.current) + (not unsent)
        step = StepPlan(tuple(forward), tuple(backward), tuple(fresh), True, apply, forced)
        return step, QueueState(bool(unsent), unsent, 0)


def _launch_order(buckets: frozenset[int]) -> list[tuple[int, int]]:
    """Buckets that are all ready, in the order in which they became so: last first."""
    return [(bucket, 0) for bucket in sorted(buckets, reverse=True)]
