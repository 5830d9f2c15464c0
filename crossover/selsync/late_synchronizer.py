"""Carries out what a gate decides with averages that land later.

A step is local; ranks vote on it; where the vote says so an average of the parameters is launched at the boundary
behind the step, and lands at the boundary behind a later one, after the optimizer's own update of that step. When is
agreed at the launch, so it is the same step on every rank: one to which it comes late waits. The next one may be
launched at the boundary at which it lands, of the parameters with what landed in them.

While an average is on its way nothing can be launched, so there is no vote, which would have to queue behind it on the
link: what a rank would have voted counts in the vote of the step in which it lands. With a ``GradScaler`` ranks have to
hear of each other's infinities all the same, and wait for that.

Buffers are averaged when an average lands, by ranks that wait: they are small, and to add a change to a variance that
has moved on could take it below nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from crossover.errors import RankMismatchError
from crossover.reduction import Reduction
from crossover.schedulers.travel import Travel
from crossover.selsync.averaging import Averaged
from crossover.selsync.ballot import MOST_NAMED_VOTERS, Field
from crossover.selsync.gate import Gate
from crossover.selsync.late import Landed, LateAverager
from crossover.selsync.local_gradients import LocalGradients
from crossover.selsync.synchronizer import Synchronizer


@dataclass(slots=True)
class KeptBack:
    """What this rank has to say while an average is on its way.

    Attributes:
        wants: whether it wanted to share.
        rule: whether a rule asked for it.
        asked: whether it was asked; equal on all ranks.
    """

    wants: int | Tensor = 0
    rule: int | Tensor = 0
    asked: bool = False


class LateSynchronizer(Synchronizer):
    """See :class:`Synchronizer` and the head of this module. Making one is collective.

    Args:
        gate: decides; averages parameters, and leaves the optimizer's state alone.
        reduction: whose ranks take part, and where costs are booked.
        optimizer: the user's; held weakly.
        parameters: gives those that are averaged, in the same order on every rank.
        travel: knows under how many steps an average travels.

    Attributes:
        late: what is on its way.
        landed: what landed behind the step that was taken last, if anything did.
    """

    def __init__(
        self,
        gate: Gate,
        reduction: Reduction,
        optimizer: torch.optim.Optimizer,
        parameters: Callable[[], Sequence[Tensor]],
        travel: Travel,
    ) -> None:
        super().__init__(gate, reduction, optimizer, parameters)
        self.travel = travel
        self.late = LateAverager(reduction, self._packer.packs)
        self.landed: Landed | None = None
        self._kept = KeptBack()
        self._launches = False
        self._loaded: dict[str, Any] | None = None

    @property
    def _lands_now(self) -> bool:
        """Whether what is on its way lands behind the step to come."""
        return self.late.share is not None and self.gate.steps + 1 >= self.late.share.lands

    @property
    def _travels_on(self) -> bool:
        """Whether something is on its way that does not land behind the step to come."""
        return self.late.share is not None and not self._lands_now

    # -- the vote ----------------------------------------------------------------------------------------------------

    def backward_ended(
        self, gradients: LocalGradients | None, *, stepped: bool = False, grown: bool = False, restored: bool = False
    ) -> None:
        """See :meth:`Synchronizer.backward_ended`."""
        if self._lands_now:
            self.late.arrive()  # before the vote, which would have to queue behind it
        if self._travels_on and not self._votes_now():
            self._keep_back(gradients)
        counts = self._votes_now() and not self._travels_on
        super().backward_ended(gradients, stepped=stepped, grown=grown, restored=restored)
        if counts:
            self._kept = KeptBack()

    def _votes_now(self) -> bool:
        """See :meth:`Synchronizer._votes_now`."""
        return self.gate.scales if self._travels_on else self._kept.asked or self.gate.votes_now()

    def _keep_back(self, gradients: LocalGradients | None) -> None:
        """Form an opinion, for a later vote."""
        if self.gate.votes_now():
            self._kept.asked = True
            if gradients is not None:
                self._facts(gradients)

    def _facts(self, gradients: LocalGradients) -> dict[Field, int | Tensor]:
        facts = super()._facts(gradients)
        self._kept.wants, self._kept.rule = self._kept.wants | facts[Field.WANTS], self._kept.rule | facts[Field.RULE]
        counts = not self._travels_on
        facts[Field.WANTS], facts[Field.RULE] = (self._kept.wants, self._kept.rule) if counts else (0, 0)
        self._kept.asked |= not counts
        communicator = self._reduction.communicator
        if communicator.size <= MOST_NAMED_VOTERS:
            facts[Field.VOTERS] = facts[Field.WANTS] * (1 << communicator.rank)
        return facts

    # -- the boundary behind a step ----------------------------------------------------------------------------------

    def stepped(self, *, stand_in: bool = False, measure_drift: bool = False) -> Averaged | None:
        """See :meth:`Synchronizer.stepped`: land what is due, then launch what was decided."""
        self.landed = None
        if not self._skipped_by_others(stand_in) and self._lands_now:
            self.landed = self._land(self.gate.steps + 1, stand_in, measure_drift)
        self._launches = self.travel.steps > 0
        try:
            averaged = super().stepped(stand_in=stand_in, measure_drift=measure_drift)
        finally:
            self._launches = False
        if self.late.share is not None:
            self.gate.apart = True
        return averaged

    def _land(self, now: int, stand_in: bool, measure_drift: bool = False) -> Landed | None:
        """Collective: buffers are averaged."""
        landed = self.late.land(now, measure_drift=measure_drift)
        if landed is not None:
            self.travel.landed(landed.travelled_us)
            if buffers := self.gate.buffers:
                self._averager.run((), buffers, stand_in=stand_in)
        return landed

    def _run(self, others: Sequence[Tensor], stand_in: bool, measure_drift: bool) -> Averaged:
        if not self._launches:
            return super()._run(others, stand_in, measure_drift)
        self._averager.release()
        after = self.gate.steps + 1
        share = self.late.launch(self._parameters(), after=after, under=self.travel.steps, stand_in=stand_in)
        return Averaged(sum(pack.nbytes for pack in share.packs), len(share.packs), None)

    def flush(self, *, stand_in: bool = False) -> None:
        """See :meth:`Synchronizer.flush`. What is on its way lands first."""
        self.late.land(self.gate.steps)
        super().flush(stand_in=stand_in)
        self._kept = KeptBack()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is on its way on this rank, and what it has to say. Waits for transfers; starts none."""
        if self._loaded is not None:
            return self._loaded  # not taken back yet
        communicator, kept = self._reduction.communicator, asdict(self._kept)
        return {
            "rank": communicator.rank,
            "size": communicator.size,
            "kept": {name: int(value) for name, value in kept.items()},
            "travel": self.travel.state_dict(),
            **self.late.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have :meth:`agree` take back what :meth:`state_dict` gave."""
        self._loaded = state

    def agree(self) -> None:
        """Go on from what ranks have loaded since this was last called, by one rule for all of them. Collective.

        With every rank's own state, training goes on bit for bit, or with compression equal to rounding. With
        another's, as that of rank 0 alone, what was on its way is dropped and counted. What was on its way here is
        dropped as well, in favour of that.

        Raises:
            RankMismatchError: on every rank: schedules are set differently.
        """
        state, self._loaded = self._loaded, None
        communicator = self._reduction.communicator
        fits = state is not None and self._own(state)
        names = ("launched", "dropped", "share", "travel")
        shared = None if state is None else {name: state[name] for name in names}
        everyone = communicator.all_gather_object(
            (self.travel.settings(), fits, shared), name=f"{self._reduction.name}.late"
        )
        self._require_equal_settings([settings for settings, _, _ in everyone])
        dropped = self.late.drop()
        self.forget()  # what was on its way has left its average behind
        self._kept = KeptBack()
        known = [facts for _, _, facts in everyone if facts is not None]
        if not known:
            self.late.dropped += dropped
            return
        furthest = max(known, key=lambda facts: int(facts["launched"]))
        self.travel.load_state_dict(furthest["travel"])
        if state is not None and all(fitted for _, fitted, _ in everyone) and all(facts == known[0] for facts in known):
            self.late.load_state_dict(state, self._parameters())
            self._kept = KeptBack(**state["kept"])
        else:
            self.late.launched = furthest["launched"]
            self.late.dropped = furthest["dropped"] + int(furthest["share"] is not None)

    def _own(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` is this rank's, of a job of this size with the same parameters."""
        communicator = self._reduction.communicator
        place = (state["rank"], state["size"])
        return place == (communicator.rank, communicator.size) and self.late.fits(state, self._parameters())

    def _require_equal_settings(self, everyone: Sequence[dict[str, Any]]) -> None:
        for rank, settings in zip(self._reduction.communicator.ranks, everyone, strict=True):
            for name, value in settings.items():
                if value != everyone[0].get(name):
                    raise RankMismatchError(
                        f"schedule: {name} is {value!r} on rank {rank} and {everyone[0].get(name)!r} on rank "
                        f"{self._reduction.communicator.ranks[0]}; pass the same on every rank"
                    )
