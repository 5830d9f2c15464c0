"""Carries out what a gate decides: ballots, averages, and what becomes of steps that were skipped or left out.

The order of what is sent is the same on every rank: a ballot when backward ends, where one is due; then, where the
step is shared, a ballot by which ranks make sure that all have stepped, and the averages.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossover.reduction import Reduction
from crossover.selsync.averaging import Averaged, Averager
from crossover.selsync.ballot import (
    LAYOUT_BITS,
    MOST_NAMED_VOTERS,
    Ballot,
    Decision,
    Field,
    decision_of,
    same_everywhere,
)
from crossover.selsync.gate import Gate
from crossover.selsync.local_gradients import LocalGradients
from crossover.selsync.narrow import Packer, wire_bytes

Entry = tuple[int, str, tuple[int, ...], str]
"""One tensor of the optimizer's state: number of its parameter, key, shape, dtype."""


class Synchronizer:
    """Serves one optimizer over the ranks of ``reduction``.

    Args:
        gate: decides.
        reduction: whose ranks take part, and where costs are booked.
        optimizer: the user's; held weakly.
        parameters: gives those that are averaged, in the same order on every rank.

    Attributes:
        last: what was decided of the step that was taken last.
        absent: how many ranks stood in at the last vote, if there was one since the last flush; equal on all ranks.
    """

    def __init__(
        self,
        gate: Gate,
        reduction: Reduction,
        optimizer: torch.optim.Optimizer,
        parameters: Callable[[], Sequence[Tensor]],
    ) -> None:
        self.gate = gate
        self.last: Decision | None = None
        self._reduction = reduction
        self._optimizer = weakref.ref(optimizer)
        self._parameters = parameters
        self._packer = Packer(reduction.compression if gate.average == "parameters" else None)
        self._averager = Averager(reduction, self._packer.packs)
        self.absent = 0
        self._ballot: Ballot | None = None
        self._pending: Decision | None = None
        self._idle = False

    def backward_ended(
        self, gradients: LocalGradients | None, *, stepped: bool = False, grown: bool = False, restored: bool = False
    ) -> None:
        """Start the vote, if one is due. With a ``GradScaler`` wait for it, and skip if any rank has to.

        Args:
            gradients: this rank's own; ``None`` where it has no data left and stands in.
            stepped: whether the optimizer has stepped since this was last called.
            grown: whether this rank has parameters that others may not have.
            restored: whether this rank has loaded a state.
        """
        self._make_up_for_skipped_step()
        self._idle |= gradients is not None and not stepped  # told in the next vote, where none is due now
        if not self._votes_now():
            self._pending = Decision(shared=False, voted=False)
            return
        facts: dict[Field, int | Tensor] = {Field.ABSENT: 1}
        if gradients is not None:
            facts = self._facts(gradients)
            facts[Field.IDLE if self._idle else Field.STEPPED] = 1
        self._idle = False
        facts |= {Field.GROWN: grown, Field.RESTORED: restored}
        self._ballot = Ballot(self._reduction, facts)
        if self.gate.scales and self.decide().unusable and gradients is not None:
            _spoil(gradients)

    def decide(self) -> Decision:
        """What the ranks decided of the step to come. Waits for the vote, the first time."""
        if self._ballot is not None:
            ballot, self._ballot = self._ballot, None
            self._pending = decision_of(ballot.counts(), self._reduction.communicator.size, self.gate.quorum)
            self.absent = self._pending.absent
        assert self._pending is not None, "backward_ended() comes before each step"
        return self._pending

    def stepped(self, *, stand_in: bool = False, measure_drift: bool = False) -> Averaged | None:
        """The optimizer has stepped: carry the decision out and count the step.

        Args:
            stand_in: this rank has no data left; the optimizers of others have stepped.
            measure_drift: see :meth:`Averager.run`.
        """
        decision = self.decide()
        if self._skipped_by_others(stand_in):
            return None
        self.last, self._pending = decision, None
        averaged = None
        if decision.shared and self.gate.average == "parameters":
            facts: dict[Field, int | Tensor] = {Field.AVERAGING: 1, Field.STEPPED: not stand_in}
            averaged = self._average(facts, stand_in, measure_drift)
            if averaged is None:
                self.gate.owed = True
                return None
        self.gate.count(decision.shared)
        return averaged

    def flush(self, *, stand_in: bool = False) -> None:
        """Average now unless ranks are equal. Collective. Counts neither as a local nor as a shared step.

        Args:
            stand_in: this rank takes the average of those that trained longer, and adds nothing.
        """
        if self._ballot is not None:
            self.decide()
        self._average({Field.FLUSHING: 1, Field.APART: self.gate.apart or stand_in}, stand_in)
        self.gate.since_shared = 0
        self.gate.apart = False
        # All ranks are here: those that stood in may train again, and their steps count from here.
        self.absent, self._idle = 0, False

    def wire_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Size of what is shared of ``tensors`` on its way."""
        return wire_bytes(tensors, self._reduction, widened=self.gate.average == "parameters")

    def forget(self) -> None:
        """Ranks go on from checkpoints: what was agreed on before is no point to measure from. On all ranks at once."""
        self._packer.forget()

    def _votes_now(self) -> bool:
        """Whether ranks vote in this step; the same on all of them."""
        return self.gate.votes_now()

    def _make_up_for_skipped_step(self) -> None:
        """The step decided on before was not taken: a ``GradScaler`` skipped it everywhere, or else ranks differ now.

        Where it was to be shared the next one will be.
        """
        if self._ballot is None and self._pending is None:
            return
        skipped, self._pending = self.decide(), None
        if skipped.shared and self.gate.average == "parameters":
            Ballot(self._reduction, {Field.AVERAGING: 1, Field.IDLE: 1}).counts()
            self.gate.owed = True

    def _facts(self, gradients: LocalGradients) -> dict[Field, int | Tensor]:
        communicator = self._reduction.communicator
        opinion = self.gate.opinion(gradients)
        wants = opinion.reshape(()).to(torch.int64) if isinstance(opinion, Tensor) else int(opinion)
        facts: dict[Field, int | Tensor] = {
            Field.WANTS: wants,
            Field.RULE: self.gate.rule_asks([float(group["lr"]) for group in self._require_optimizer().param_groups]),
        }
        if communicator.size <= MOST_NAMED_VOTERS:
            facts[Field.VOTERS] = wants * (1 << communicator.rank)
        if self.gate.scales:
            facts[Field.UNUSABLE] = gradients.squared_norm().isfinite().logical_not()
        return facts

    # -- averages ----------------------------------------------------------------------------------------------------

    def _average(
        self, facts: dict[Field, int | Tensor], stand_in: bool, measure_drift: bool = False
    ) -> Averaged | None:
        """Make sure that all ranks do the same, and average; not where none has stepped, or flushes and is apart."""
        states = self._state() if self.gate.optimizer_state == "average" else {}
        layout = zlib.crc32(repr(list(states)).encode()) & ((1 << LAYOUT_BITS) - 1)
        counts = Ballot(self._reduction, {**facts, Field.LAYOUT: layout, Field.LAYOUT_SQUARED: layout**2}).counts()
        if not counts[Field.STEPPED] and not counts[Field.APART]:
            return None
        communicator = self._reduction.communicator
        if not same_everywhere(counts[Field.LAYOUT], counts[Field.LAYOUT_SQUARED], communicator.size):
            held = communicator.all_gather_object(list(states), name=f"{self._reduction.name}.state")
            states = {entry: states[entry] for entry in states if all(entry in entries for entries in held)}
        return self._run([*self.gate.buffers, *states.values()], stand_in, measure_drift)

    def _run(self, others: Sequence[Tensor], stand_in: bool, measure_drift: bool) -> Averaged:
        """Average parameters and ``others``."""
        return self._averager.run(self._parameters(), others, stand_in=stand_in, measure_drift=measure_drift)

    def _state(self) -> dict[Entry, Tensor]:
        """What the optimizer keeps of each parameter in the parameter's shape, such as momentum."""
        state = self._require_optimizer().state
        return {
            (number, str(key), tuple(value.shape), str(value.dtype)): value
            for number, parameter in enumerate(self._parameters())
            for key, value in sorted(state.get(parameter, {}).items(), key=lambda item: str(item[0]))
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }

    def _skipped_by_others(self, stand_in: bool) -> bool:
        """Whether this rank only stands in for a step that a ``GradScaler`` has the others skip."""
        return stand_in and self.gate.scales and not self._skips_within_step and self.decide().unusable > 0

    @property
    def _skips_within_step(self) -> bool:
        """Whether ``GradScaler`` leaves it to the optimizer, as a fused one, to skip."""
        return bool(getattr(self._require_optimizer(), "_step_supports_amp_scaling", False))

    def _require_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer


@torch.no_grad()
def _spoil(gradients: LocalGradients) -> None:
    """Make a ``GradScaler`` find an infinity."""
    for gradient in gradients:
        values = gradient if gradient.layout is torch.strided else gradient._values()
        if values.numel():
            values[(0,) * values.dim()] = float("inf")
            return
