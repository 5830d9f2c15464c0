"""Chooses schedule and gate from what a job's own first steps show. Stands above the methods, which know nothing of it.

Read in this order: :mod:`~crossover.auto.watched` (what is seen of plain steps), :mod:`~crossover.auto.choice` (what is
made of it), :class:`Auto` for the schedule, :class:`AutoGate` and :mod:`~crossover.auto.opening` for the gate.
"""

from __future__ import annotations

from crossover.auto.choice import Choice, choose_gate, choose_schedule
from crossover.auto.gate import AutoGate
from crossover.auto.schedule import Auto
from crossover.schedulers import register_schedule
from crossover.selsync.gates import register_gate

__all__ = ["Auto", "AutoGate", "Choice", "choose_gate", "choose_schedule"]

register_schedule("auto", Auto)
register_gate("auto", AutoGate)
