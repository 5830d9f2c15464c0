"""The exchange of an optimizer with a gate and a schedule of late updates: averages of parameters that land later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from crossover.gated import GatedExchange
from crossover.layout import BucketOptions
from crossover.parameters import NamedParameter
from crossover.reduction import Reduction
from crossover.schedulers.delayed import DelayedSchedule
from crossover.selsync.ballot import Ballot, Field
from crossover.selsync.gate import Gate
from crossover.selsync.late_synchronizer import LateSynchronizer
from crossover.telemetry.records import Scalar


class LateExchange(GatedExchange):
    """Every step is local; what the gate shares travels while training goes on, and lands some steps later.

    The schedule says under how many steps an average travels, and makes the first ones synchronous; see
    :mod:`crossover.selsync.late_synchronizer` for what is launched and lands when.

    Across ranks: all launch and land the same averages behind the same steps. Parameters differ after every step but
    the synchronous ones, and are equal after :meth:`flush`.

    Args:
        reduction: how gradients would be combined; its ranks take part.
        schedule: how late averages may land.
        options: of no effect, as gradients stay where they are.
        gate: decides; averages parameters.
        optimizer: the user's.
    """

    _synchronizer: LateSynchronizer

    def __init__(
        self,
        reduction: Reduction,
        schedule: DelayedSchedule,
        options: BucketOptions,
        gate: Gate,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(reduction, schedule, options, gate, optimizer)
        self._travel = schedule.travel()
        self._average_bytes = 0
        self._synchronizer = LateSynchronizer(gate, reduction, optimizer, self._tensors, self._travel)

    def close(self) -> None:
        """See :meth:`Exchange.close`."""
        self._synchronizer.late.close()
        super().close()

    # -- ranks that go on from checkpoints ---------------------------------------------------------------------------

    def adopt(self, newcomers: Sequence[NamedParameter], arrivals: Iterable[int]) -> None:
        """See :meth:`GatedExchange.adopt`; the first time ranks agree on what is on its way, too."""
        first = not self._placed
        super().adopt(newcomers, arrivals)
        if first:
            self._synchronizer.agree()

    def _place(self, newcomers: Sequence[NamedParameter], facts: Sequence[dict[str, Any]]) -> None:
        super()._place(newcomers, facts)
        self._average_bytes = self._synchronizer.wire_bytes(self._tensors())

    def share(self, arrivals: Iterable[int]) -> bool:
        """See :meth:`GatedExchange.share`."""
        if self._placed and self._restored:
            # before the vote, which depends on what is on its way; fails where other ranks have not loaded a state
            Ballot(self.reduction, {Field.RESTORED: 1}).counts()
            self.gate.apart = any(self._agree_on_counters())
            self._synchronizer.agree()
        return super().share(arrivals)

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs, of schedule, gate and what is on its way. Never communicates, but may wait."""
        return {**super().state_dict(), "late": self._synchronizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; ranks agree on it in the next shared pass."""
        super().load_state_dict(state)
        if "late" in state:
            self._synchronizer.load_state_dict(state["late"])

    # -- steps -------------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Land what is due and launch what was decided."""
        self._travel.step_ends()
        super().after_step()
        self._begin_step()

    def after_stand_in(self) -> None:
        """See :meth:`GatedExchange.after_stand_in`."""
        super().after_stand_in()
        self._begin_step()

    def _begin_step(self) -> None:
        self._travel.step_begins(self.gate.steps, self._average_bytes)

    def facts(self) -> tuple[bool, str, dict[str, Scalar]]:
        """See :meth:`GatedExchange.facts`; with what landed behind the step, and what is on its way after it."""
        shared, reason, facts = super().facts()
        share, landed, late = self._synchronizer.late.share, self._synchronizer.landed, self._synchronizer.late
        if landed is not None:
            facts["landed"], facts["landed_from"] = landed.number, landed.launched
            facts["staleness"] = landed.staleness
            if landed.drift is not None:
                facts["drift"] = landed.drift
            reason = f"{reason}; average {landed.number} landed, {landed.staleness} steps late"
        if share is not None:
            facts["travels"], facts["travels_from"], facts["lands"] = share.number, share.launched, share.lands
            if share.launched == self.gate.steps:
                reason = f"{reason}, as average {share.number} that lands after step {share.lands}"
        return shared, reason, {**facts, "averages_launched": late.launched, "averages_dropped": late.dropped}
