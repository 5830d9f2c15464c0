"""DeFT: when gradients travel and when they are applied, by a plan made from measured times.

Read in this order: :mod:`~crossover.deft.plan` (generations, what a step does), :mod:`~crossover.deft.knapsack` (what
fits under computing), :mod:`~crossover.deft.planner`, :mod:`~crossover.deft.preserver` (what a delay costs), then
:class:`DeFT`, which runs plans.

Source: Meng and Sun, *DeFT: Mitigating Data Dependencies for Flexible Communication Scheduling in Distributed
Training*, arXiv 2503.16815. Its text could not be read beyond the abstract; each module says what is the paper's and
what is ours.
"""

from __future__ import annotations

from crossover.deft.cost import BucketTimes, LinkCost
from crossover.deft.pilot import Decision, Preserver
from crossover.deft.plan import Plan, QueueState, StepPlan, merged_sizes, step_durations, synchronous_plan
from crossover.deft.planner import Limits, make_plan
from crossover.deft.profile import Profile
from crossover.deft.schedule import DeFT
from crossover.schedulers import register_schedule

__all__ = [
    "BucketTimes",
    "DeFT",
    "Decision",
    "Limits",
    "LinkCost",
    "Plan",
    "Preserver",
    "Profile",
    "QueueState",
    "StepPlan",
    "make_plan",
    "merged_sizes",
    "step_durations",
    "synchronous_plan",
]

register_schedule("deft", DeFT)
