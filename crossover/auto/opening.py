"""The exchange of an optimizer with ``gate="auto"``: plain at first, and from one step on that of a gate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.auto.choice import Choice, choose_gate
from crossover.auto.gate import AutoGate
from crossover.auto.watched import Seen, Watched
from crossover.exchange import Exchange
from crossover.gated import GatedExchange
from crossover.layout import BucketOptions
from crossover.parameters import NamedParameter
from crossover.reduction import Reduction
from crossover.telemetry.records import Scalar

logger = logging.getLogger("crossover.auto")


class OpeningExchange(GatedExchange):
    """Gradients are averaged in buckets until the gate opens; then ranks vote, and buckets go.

    The pass in which it opens is still a plain one, and so is the step after it: ranks vote from the next pass on.

    Args:
        reduction: how gradients are combined.
        schedule: watches the plain steps.
        options: how parameters share buckets.
        gate: to be opened.
        optimizer: the user's.
    """

    def __init__(
        self,
        reduction: Reduction,
        schedule: Watched,
        options: BucketOptions,
        gate: AutoGate,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(reduction, schedule, options, gate, optimizer)
        self._auto, self._watched = gate, schedule
        self.shares_all = True
        self._decided = False
        self._voted = False  # in the gated passes that there were, if any
        self._stood_in = reduction.communicator.size

    @property
    def _gated(self) -> bool:
        """Whether the step to come was voted on."""
        return not self.shares_all and self._voted

    # -- a shared pass -----------------------------------------------------------------------------------------------

    def observer(self, parameter: Tensor) -> Callable[[Tensor], None] | None:
        """See :meth:`Exchange.observer`."""
        return None if self.shares_all else super().observer(parameter)

    def adopt(self, newcomers: Sequence[NamedParameter], arrivals: Iterable[int]) -> None:
        """See :meth:`Exchange.adopt`."""
        adopt = Exchange.adopt if self.shares_all else GatedExchange.adopt
        adopt(self, newcomers, arrivals)

    def _place(self, newcomers: Sequence[NamedParameter], facts: Sequence[dict[str, Any]]) -> None:
        place = Exchange._place if self.shares_all else GatedExchange._place
        place(self, newcomers, facts)

    def share(self, arrivals: Iterable[int]) -> bool:
        """A backward pass ended. Collective."""
        resumed = not self._placed and self._resumes_opened()
        if resumed:
            self.shares_all = False
        if not self.shares_all:
            self._voted = True
            return super().share(arrivals) or resumed
        changed = Exchange.share(self, arrivals)
        if self._opens():
            self._stood_in = self.schedule.stood_in()
            self.buckets, self.sparse = [], []
            self.shares_all = False
            self._smallest_first = sorted(self._tensors(), key=Tensor.numel)
            return True
        return changed

    def _resumes_opened(self) -> bool:
        """Whether any rank goes on from a state with local steps. Collective."""
        opened = self._restored and self._auto.opened
        name = f"{self.reduction.name}.auto.resume"
        return any(self.reduction.communicator.all_gather_object(opened, name=name))

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _opens(self) -> bool:
        """Whether the gate opens with this pass. Collective where that is decided."""
        watched, gate = self._watched, self._auto
        if self._decided or not self.buckets:
            return False
        if not watched.watching:
            watched.watch(gate.tracker.warmup_steps + gate.watch_steps, gate.profile_steps)
        if not watched.complete:
            return False
        self._decided = True
        seen = watched.seen(gate.tracker.factor, gate.tracker.warmup_steps)
        communicator = self.reduction.communicator
        mine = self._choose(seen) if communicator.rank == 0 else None
        choice: Choice = communicator.broadcast_object(mine, name=f"{self.reduction.name}.auto.gate")
        if communicator.rank == 0:
            logger.info("auto: step %d: %s", gate.steps + 1, choice)
        if choice.delta is None or seen is None:
            return False
        gate.open(choice.delta, seen.tracker)
        return True

    def _choose(self, seen: Seen | None) -> Choice:
        if seen is None:
            return Choice("shared: no step could be timed, as no module was called in forward")
        choice = choose_gate(seen.profile, self._watched.link, self._auto.quorum)
        limit = self._auto.max_local_steps
        if choice.changes and limit is not None:
            choice.numbers["at most"] = f"{limit} local steps in a row"
        return choice

    # -- around the step ---------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """See :meth:`Exchange.after_step`."""
        if self._gated:
            super().after_step()
            return
        Exchange.after_step(self)
        self._auto.count(shared=True)
        self._applied = None if self.shares_all else self._witness()

    def after_idle_step(self) -> None:
        """See :meth:`Exchange.after_idle_step`."""
        if self._gated:
            super().after_idle_step()

    def after_stand_in(self) -> None:
        """See :meth:`Exchange.after_stand_in`."""
        if self._gated:
            super().after_stand_in()
        else:
            Exchange.after_stand_in(self)

    @property
    def absent(self) -> int:
        """See :attr:`Exchange.absent`."""
        if self._gated:
            return super().absent
        return self.schedule.stood_in() if self.buckets else self._stood_in

    def flush(self, *, stand_in: bool = False) -> None:
        """See :meth:`GatedExchange.flush`."""
        if self._gated:
            super().flush(stand_in=stand_in)
        else:
            Exchange.flush(self, stand_in=stand_in)

    def unseen_gradients(self) -> list[str]:
        """See :meth:`Exchange.unseen_gradients`."""
        return Exchange.unseen_gradients(self) if self.shares_all else super().unseen_gradients()

    # -- records and checkpoints -------------------------------------------------------------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`GatedExchange.load_state_dict`. A job that trains already and shares all goes on doing so."""
        if self.shares_all and self._placed:
            Exchange.load_state_dict(self, state)
        else:
            super().load_state_dict(state)

    def facts(self) -> tuple[bool, str, dict[str, Scalar]]:
        """See :meth:`GatedExchange.facts`."""
        if self._gated:
            return super().facts()
        return Exchange.facts(self)
