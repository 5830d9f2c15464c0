"""Where a job stands in its plan, and when it is time to decide anew. The same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crossover.comm.communicator import Communicator
from crossover.deft.pilot import Decision, Pilot
from crossover.deft.plan import Plan, QueueState, StepPlan, catch_up, mean_duration
from crossover.deft.planner import Limits, make_plan
from crossover.deft.profile import Profile
from crossover.errors import RankMismatchError

NEVER = -1


class Course:
    """Follows a plan step by step.

    Attributes:
        plan: followed now; ``None``: every step is synchronous.
        position: steps taken of it.
        steps: training steps so far.
        decide_at: after how many steps a decision is due; ``NEVER`` for none.
        profile: the plan was made from it.
        stale: steps before the next decision are to be measured; else it is made with what is known of times.
        limits: with which it was made.
        promised_us: time of a step by the plan.
    """

    def __init__(self, pilot: Pilot, first_decision: int, profile_steps: int, replan_steps: int) -> None:
        self.pilot = pilot
        self.profile_steps = profile_steps
        self.replan_steps = replan_steps
        self.plan: Plan | None = None
        self.position = 0
        self.steps = 0
        self.decide_at = first_decision
        self.profile: Profile | None = None
        self.stale = True
        self.limits = pilot.limits
        self.promised_us = 0.0
        self._from_nothing: Plan | None = None

    @property
    def survey_begins(self) -> bool:
        """Whether the steps from now on are to be measured: one more, as the first is seen from its middle."""
        due = self.steps == max(self.decide_at - self.profile_steps - 1, 0)
        return due and self.stale and self.decide_at != NEVER

    @property
    def decision_due(self) -> bool:
        """Whether it is time to decide."""
        return self.steps == self.decide_at

    @property
    def near_decision(self) -> bool:
        """Whether steps are about to be measured anyway."""
        return self.decide_at != NEVER and self.decide_at - self.steps <= self.profile_steps + 1

    def measure_soon(self, reason: str, **numbers: Any) -> None:
        """Measure the next steps and decide then."""
        self.pilot.log(self.steps, reason, **numbers)
        self.decide_at = self.steps + self.profile_steps + 1
        self.stale = True

    def advance(self) -> None:
        """A step has been taken."""
        self.steps += 1
        self.position += 1

    def step(self, communicator: Communicator, name: str, state: QueueState, pieces: int) -> StepPlan:
        """What the next step does. Collective where a plan without a cycle has come to its end."""
        if self.plan is None:
            return catch_up(state, pieces)
        step = self.plan.step(self.position)
        if step is None:
            self.follow(self._solved(communicator, name, state))
            assert self.plan is not None
            step = self.plan.step(0)
            assert step is not None
        return step

    def follow(self, plan: Plan | None) -> None:
        """Follow another plan from its first step on."""
        self.plan = plan
        self.position = 0

    def start_over(self) -> None:
        """Nothing is on its way any more: begin the plan anew."""
        if self.plan is not None:
            self.follow(self._from_nothing)

    def _solved(self, communicator: Communicator, name: str, state: QueueState) -> Plan:
        assert self.profile is not None
        times, limits = self.profile.times(), self.limits
        plan = agree_on_plan(communicator, name, lambda: make_plan(times, limits, state))
        assert plan is not None
        return plan

    # -- decisions ---------------------------------------------------------------------------------------------------

    def decide(self, communicator: Communicator, name: str, profile: Profile, state: QueueState) -> None:
        """Choose how to go on, from ``state``. Collective: rank 0 decides, all compare what they got."""
        pilot, before = self.pilot, len(self.pilot.decisions)
        self.profile = profile

        def choose() -> Plan | None:
            return pilot.choose(self.steps, profile.times(), communicator.size, state)

        plan = agree_on_plan(communicator, name, choose)
        said = communicator.broadcast_object(
            ([(d.step, d.action, d.numbers) for d in pilot.decisions[before:]], pilot.chosen), name=f"{name}.decision"
        )
        pilot.decisions[before:] = [Decision(*entry) for entry in said[0]]
        self.limits = pilot.chosen = said[1]
        self.follow(plan)
        self.promised_us = mean_duration(plan, profile.times()) if plan is not None else 0.0
        self._from_nothing = plan
        if plan is not None and state != QueueState():
            self._from_nothing = self._solved(communicator, f"{name}.anew", QueueState())
        settled = plan is None or pilot.fixed_capacity
        # else after as many steps as were taken: what is learnt early of the noise scale is used soon
        wait = self.replan_steps if settled else min(max(self.steps, self.profile_steps + 2), self.replan_steps)
        self.stale = wait == self.replan_steps
        self.decide_at = self.steps + wait

    def stay(self, reason: str) -> None:
        """Be synchronous until the next decision is due."""
        self.pilot.log(self.steps, f"synchronous: {reason}")
        self.follow(None)
        self.stale = True
        self.decide_at = self.steps + self.replan_steps

    def fall_back(self, reason: str) -> None:
        """End the delay now, for some time or for good. Every rank calls it in the same step."""
        again = self.pilot.fall_back(self.steps, reason)
        self.follow(None)
        self.stale = True
        self.decide_at = self.steps + max(self.pilot.preserver.fallback_steps, 1) if again else NEVER

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs."""
        return {
            "plan": None if self.plan is None else self.plan.as_json(),
            "from_nothing": None if self._from_nothing is None else self._from_nothing.as_json(),
            "position": self.position,
            "steps": self.steps,
            "decide_at": self.decide_at,
            "stale": self.stale,
            "profile": None if self.profile is None else self.profile.as_json(),
            "promised_us": self.promised_us,
            "limits": [*self.limits.capacity, self.limits.sync_wait, self.limits.most_merged],
            "pilot": self.pilot.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.plan = None if state["plan"] is None else Plan.from_json(state["plan"])
        self._from_nothing = None if state["from_nothing"] is None else Plan.from_json(state["from_nothing"])
        self.position, self.steps, self.decide_at = state["position"], state["steps"], state["decide_at"]
        self.profile = None if state["profile"] is None else Profile.from_json(state["profile"])
        self.promised_us, self.stale = state["promised_us"], state.get("stale", True)
        numerator, denominator, wait, most = state["limits"]
        self.limits = Limits((numerator, denominator), wait, most)
        self.pilot.load_state_dict(state["pilot"])


def agree_on_plan(communicator: Communicator, name: str, solve: Callable[[], Plan | None]) -> Plan | None:
    """Rank 0 solves, and all get its plan. Collective.

    Raises:
        RankMismatchError: on every rank: they hold different plans after all.
    """
    mine = solve() if communicator.rank == 0 else None
    text = communicator.broadcast_object(None if mine is None else mine.as_json(), name=f"{name}.plan")
    plan = None if text is None else Plan.from_json(text)
    digests = communicator.all_gather_object("" if plan is None else plan.digest(), name=f"{name}.digest")
    for rank, digest in zip(communicator.ranks, digests, strict=True):
        if digest != digests[0]:
            raise RankMismatchError(
                f"DeFT: rank {rank} holds another plan than rank {communicator.ranks[0]} ({digest[:12]} and "
                f"{digests[0][:12]}); run the same version of the library on every rank"
            )
    return plan
