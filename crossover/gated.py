"""The exchange of an optimizer with a gate: ranks vote when backward ends, and share only what the vote says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossover import telemetry
from crossover.adoption import agree_on_newcomers
from crossover.exchange import Exchange
from crossover.layout import BucketOptions
from crossover.parameters import NamedParameter, checksum
from crossover.reduction import Reduction
from crossover.schedulers.schedule import Schedule
from crossover.selsync.averaging import Averaged
from crossover.selsync.ballot import Decision
from crossover.selsync.gate import Gate
from crossover.selsync.local_gradients import Observation
from crossover.selsync.synchronizer import Synchronizer
from crossover.telemetry.records import Scalar
from crossover.window import Witness


class GatedExchange(Exchange):
    """Leaves gradients where they are, unless the gate averages gradients and the ranks have voted for it.

    Across ranks: all vote in the same passes, and all share the same steps. Parameters are equal after a step in which
    they were averaged.

    Args:
        reduction: how gradients are combined.
        schedule: how they travel, where the gate averages gradients.
        options: how they share buckets then.
        gate: decides.
        optimizer: the user's.
    """

    shares_all = False

    def __init__(
        self,
        reduction: Reduction,
        schedule: Schedule,
        options: BucketOptions,
        gate: Gate,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(reduction, schedule, options)
        gate.serve(optimizer)
        self.gate = gate
        self.averaged: Averaged | None = None
        self._synchronizer = Synchronizer(gate, reduction, optimizer, self._tensors)
        self._observation = Observation(lambda: gate.reads_norm and gate.votes_now())
        self._sums: dict[int, int] = {}
        self._restored = False
        self._applied: Witness | None = None
        self._smallest_first: list[Tensor] = []

    def observer(self, parameter: Tensor) -> Callable[[Tensor], None] | None:
        """Gradients are read while they are in the processor's cache."""
        return self._observation.arrived if Observation.worthwhile(parameter) else None

    def reset(self) -> None:
        """Expect every gradient anew."""
        super().reset()
        self._observation.clear()

    def adopt(self, newcomers: Sequence[NamedParameter], arrivals: Iterable[int]) -> None:
        """Agree with all ranks on ``newcomers``; the first time on the gate's counters too. Collective."""
        resumed = not self._placed and all(self._agree_on_counters())  # from checkpoints of each rank's own parameters
        name = f"{self.reduction.name}.adopt"
        facts = agree_on_newcomers(
            self.reduction.communicator, newcomers, arrivals, name=name, sums=self._sums, may_differ=resumed
        )
        if not self._placed:
            self.gate.apart = resumed
        self._sums.clear()
        self._place(newcomers, facts)

    def _agree_on_counters(self) -> list[bool]:
        """Let all ranks count alike; whether each of them says that replicas may differ. Collective."""
        self._restored = False
        states = self.reduction.communicator.all_gather_object(
            self.gate.state_dict(), name=f"{self.reduction.name}.adopt.gate"
        )
        self.gate.agree(states)
        self._synchronizer.forget()
        return [state["apart"] for state in states]

    def _place(self, newcomers: Sequence[NamedParameter], facts: Sequence[dict[str, Any]]) -> None:
        if self.gate.average == "gradients":
            super()._place(newcomers, facts)
            self.sent = 0  # buckets that there were before have not been sent in this pass either
        self._placed.update(self.parameters)
        self._smallest_first = sorted(self._tensors(), key=Tensor.numel)

    def share(self, arrivals: Iterable[int]) -> bool:
        """A backward pass ended: vote, and average gradients if they are what is shared. Collective."""
        if not self._placed:
            self.adopt(self.newcomers(), arrivals)
        for new in self.newcomers():  # compared after the vote, by which time they have been trained
            self._sums.setdefault(id(new.tensor), checksum(new.tensor))
        own = None if self.joined else self._observation.gradients_of(p.tensor for p in self.parameters.values())
        self._synchronizer.backward_ended(own, stepped=self.stepped, grown=self.grown, restored=self._restored)
        if self.gate.average == "gradients" and self._decision(arrivals).shared:
            self.finish()
        return False

    def _decision(self, arrivals: Iterable[int]) -> Decision:
        """What ranks decided, after they have agreed on what it brought to light."""
        decision = self._synchronizer.decide()
        if decision.grown:
            self.adopt(self.newcomers(), arrivals)
        if decision.restored:
            self.gate.apart = any(self._agree_on_counters())
        return decision

    def after_step(self) -> None:
        """Carry out what was decided."""
        super().after_step()
        self._carry_out(stand_in=False)
        self._applied = self._witness()

    def after_idle_step(self) -> None:
        """Gradients that were voted on before have been applied once more, by each rank its own."""
        self.gate.apart = True

    def _witness(self) -> Witness | None:
        """The smallest gradient there is: what is held lives on after ``zero_grad()``."""
        return next((witness for tensor in self._smallest_first if (witness := Witness.of(tensor)) is not None), None)

    def after_stand_in(self) -> None:
        """Take part in what the others carry out now."""
        super().after_stand_in()
        self._carry_out(stand_in=True)

    def _carry_out(self, stand_in: bool) -> None:
        if self.gate.average == "parameters":
            self._decision(())
        measure_drift = telemetry.active() is not None
        self.averaged = self._synchronizer.stepped(stand_in=stand_in, measure_drift=measure_drift)

    @property
    def absent(self) -> int:
        """How many ranks stood in when there was a vote last."""
        return self._synchronizer.absent

    def flush(self, *, stand_in: bool = False) -> None:
        """Average parameters unless ranks are equal. Collective."""
        super().flush(stand_in=stand_in)
        self._synchronizer.flush(stand_in=stand_in)

    def unseen_gradients(self) -> list[str]:
        """Names of parameters with a gradient, unless it was applied in the step before: those were not voted on."""
        if self._applied is not None and self._applied.untouched:
            return []
        return [parameter.name for parameter in self.parameters.values() if _holds_something(parameter.tensor.grad)]

    def flush_at_shutdown(self) -> None:
        """:meth:`flush` if ranks differ."""
        if self.gate.apart:
            self.flush()

    @property
    def apart(self) -> bool:
        """Whether replicas may differ."""
        return self.gate.apart

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs, of schedule and gate. Never communicates."""
        return {**super().state_dict(), "gate": self.gate.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; ranks agree on it in the next vote."""
        super().load_state_dict(state)
        if "gate" in state:
            self.gate.load_state_dict(state["gate"])
            self._restored = True

    def facts(self) -> tuple[bool, str, dict[str, Scalar]]:
        """Of the step that was just taken: whether anything was shared, why, and what else there is to record."""
        decision = self._synchronizer.last
        assert decision is not None
        facts: dict[str, Scalar] = {
            "gate": type(self.gate).__name__,
            "lssr": self.gate.lssr,
            "since_shared": self.gate.since_shared,
            "bytes_saved": 0 if decision.shared else self._synchronizer.wire_bytes(self._tensors()),
            **self.gate.facts(),
        }
        if decision.voted:
            facts["votes"] = decision.votes
            facts["vote"] = self.reduction.communicator.rank in decision.voters
            facts["voters"] = ",".join(str(self.reduction.communicator.ranks[voter]) for voter in decision.voters)
        if self.averaged is not None and self.averaged.drift is not None:
            facts["drift"] = self.averaged.drift
        return decision.shared, decision.reason, facts

    def _tensors(self) -> list[Tensor]:
        return [self.parameters[key].tensor for key in self.parameters if key in self._placed]


def _holds_something(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    values = gradient if gradient.layout is torch.strided else gradient._values()
    return bool(values.any())
