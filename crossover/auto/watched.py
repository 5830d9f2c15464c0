"""The plain schedule while it is being watched: times, and norms of gradients, of some steps; then nothing of it stays.

First the squared norms of some steps are taken: this rank's own, and that of the average. They give the gradient noise
scale and SelSync's significance. Then other steps are timed, which taking norms would make longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crossover.buckets import Bucket
from crossover.deft.cost import LinkCost
from crossover.deft.preserver import NoiseScale
from crossover.deft.profile import Profile
from crossover.deft.scout import Scout
from crossover.deft.survey import Survey
from crossover.reduction import PendingReduction, Reduction
from crossover.schedulers.generations import Generation, Piece
from crossover.schedulers.overlapped import Overlapped
from crossover.schedulers.transfer import Transfer
from crossover.selsync.significance import squared_norm
from crossover.selsync.smoothing import SignificanceTracker


@dataclass(frozen=True, slots=True)
class Seen:
    """What all ranks saw; equal on all of them but for ``tracker``.

    Attributes:
        profile: times, noise scale and significance.
        noise: state of the :class:`~crossover.deft.preserver.NoiseScale`.
        tracker: state of this rank's own :class:`~crossover.selsync.SignificanceTracker`.
    """

    profile: Profile
    noise: dict[str, float]
    tracker: dict[str, Any]


class TimedReduction(PendingReduction):
    """A whole bucket on its way, whose link tells when it is through."""

    __slots__ = ("transfer",)

    def __init__(self, reduction: Reduction, bucket: Bucket) -> None:
        super().__init__(reduction, bucket)
        whole = (0, bucket.buffer.numel())
        self.transfer = Transfer(reduction, reduction.communicator, bucket, whole, f"{bucket.name}.0", timed=True)

    def wait(self) -> None:
        """See :meth:`PendingReduction.wait`."""
        self.transfer.wait()
        self._reduction.rescale(self.bucket)


class Watch:
    """Follows the steps of one optimizer: ``norms`` of them for their norms, the next ``timed`` for their times."""

    def __init__(self, reduction: Reduction, buckets: Sequence[Bucket], norms: int, timed: int) -> None:
        self.norms, self.timed = norms, timed
        self._reduction, self._buckets = reduction, buckets
        self.survey = Survey(reduction, buckets)
        self._step = 0
        self._own: list[Tensor] = []
        self._averages: list[Tensor] = []
        self._begin()

    @property
    def complete(self) -> bool:
        """Whether all has been seen."""
        return self._step >= self.norms + self.timed

    @property
    def times(self) -> bool:
        """Whether this step is timed."""
        return self.norms <= self._step < self.norms + self.timed

    def ready(self, bucket: Bucket) -> None:
        """This rank's own gradients are in the bucket, which has not been sent."""
        if self.times:
            self.survey.timer.bucket_ready(bucket.index)
        elif self._step < self.norms:
            norm = squared_norm([bucket.gradients]).double()
            self._own[-1] = self._own[-1] + norm.to(self._own[-1].device)

    def step_ends(self, sent: Sequence[PendingReduction]) -> None:
        """Averages are in the buckets."""
        if self._step < self.norms:
            self._averages.append(squared_norm([bucket.gradients for bucket in self._buckets]).double())
        transfers = {(one.bucket.index, 0): one.transfer for one in sent if isinstance(one, TimedReduction)}
        if transfers:
            self.survey.complete(Generation(self._step, 1, transfers=dict(transfers)))
        self._step += 1
        self._begin()

    def leave_out(self) -> None:
        """This step was not seen as a whole."""
        if self._step < self.norms:
            self._own[-1].zero_()

    def _begin(self) -> None:
        if self._step < self.norms:
            self._own.append(torch.zeros((), dtype=torch.float64, device=self._buckets[0].device))
        elif self._step == self.norms:
            self.survey.start()
        if self.times:
            self.survey.timer.step_begins()

    def result(self, cost: LinkCost, factor: float, warmup_steps: int | None) -> Seen | None:
        """What all ranks saw; ``None`` if no rank could time a step. Collective.

        Args:
            cost: of the link, for what the backend did not tell.
            factor: of the significance's average.
            warmup_steps: norms until there is a significance.
        """
        pieces = [Piece(bucket.index, 0, bucket.buffer.numel()) for bucket in self._buckets]
        profile = self.survey.result(pieces, self._buckets, cost)
        reduction, size = self._reduction, self._reduction.communicator.size
        mine = [value / reduction.scaling.before**2 for value in _floats(self._own)]
        whole = 1.0 if reduction.scaling.average else 1.0 / size**2  # a sum over ranks is not their mean
        averages = [value * whole for value in _floats(self._averages)]
        everyone = reduction.communicator.all_gather_object((mine, averages), name=f"{reduction.name}.norms")
        if profile is None:
            return None
        noise = NoiseScale()
        own_by_step = list(zip(*(own for own, _ in everyone), strict=True))
        for own, average in zip(own_by_step, everyone[0][1], strict=True):
            noise.add(1, sum(own) / size, size, average)
        significance = tuple(_significance(own, factor, warmup_steps)[0] for own, _ in everyone)
        known = None if noise.cautious in (None, math.inf) else noise.cautious
        seen = replace(profile, noise_scale=known, significance=significance if self.norms else ())
        return Seen(seen, noise.state_dict(), _significance(mine, factor, warmup_steps)[1])


def _floats(tensors: Sequence[Tensor]) -> list[float]:
    return [float(value) for value in torch.stack(list(tensors)).tolist()] if tensors else []


def _significance(
    norms: Sequence[float], factor: float, warmup_steps: int | None
) -> tuple[tuple[float | None, ...], dict[str, Any]]:
    """Of each step, and the state of the tracker after them."""
    tracker = SignificanceTracker(factor, warmup_steps=warmup_steps)
    return tuple(tracker.update(norm) for norm in norms), tracker.state_dict()


class Watched(Overlapped):
    """:class:`~crossover.schedulers.Overlapped`, of which some steps can be watched. The bits it gives are the same.

    Attributes:
        link: cost of an all-reduce when the link is idle; equal on all ranks.
        small_bucket_bytes: buckets as small as the link's latency allows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watch: Watch | None = None

    def attach(self, reduction: Reduction, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Schedule.attach`. Collective: the link is timed."""
        super().attach(reduction, optimizer)
        scout = Scout(reduction, optimizer, None)
        self.link, self.small_bucket_bytes = scout.cost, scout.bucket_bytes

    def detach(self) -> None:
        """See :meth:`Schedule.detach`."""
        self.stop()
        super().detach()

    def watch(self, norms: int, timed: int) -> None:
        """Watch the next steps: of so many the norms, of the following so many the times."""
        self.stop()
        if self.buckets:
            self._watch = Watch(self.reduction, self.buckets, norms, timed)

    def stop(self) -> None:
        """Watch no more."""
        if self._watch is not None:
            self._watch.survey.timer.stop()
        self._watch = None

    @property
    def watching(self) -> bool:
        """Whether steps are being watched, or have been and :meth:`seen` was not called."""
        return self._watch is not None

    @property
    def complete(self) -> bool:
        """Whether all that was to be watched has been."""
        return self._watch is not None and self._watch.complete

    def seen(self, factor: float, warmup_steps: int | None = None) -> Seen | None:
        """What all ranks saw; see :meth:`Watch.result`. Collective. Nothing is watched afterwards."""
        assert self._watch is not None, "watch() comes first"
        seen = self._watch.result(self.link, factor, warmup_steps)
        self.stop()
        return seen

    def layout(self, buckets: Sequence[Bucket]) -> None:
        """See :meth:`Schedule.layout`. With other buckets a watch begins anew."""
        super().layout(buckets)
        if (watch := self._watch) is not None:
            self.watch(watch.norms, watch.timed)

    def ready(self, bucket: Bucket) -> None:
        """See :meth:`Overlapped.ready`."""
        watch = self._watch
        if watch is None:
            super().ready(bucket)
            return
        watch.ready(bucket)
        if watch.times:
            self._pending.append(TimedReduction(self.reduction, bucket))
        else:
            super().ready(bucket)

    def finish(self) -> None:
        """See :meth:`Overlapped.finish`."""
        watch = self._watch
        if watch is None:
            super().finish()
            return
        watch.survey.timer.backward_ended()
        sent = list(self._pending)
        super().finish()
        if len(sent) == len(self.buckets):
            watch.step_ends(sent)
        else:  # buckets were added in this pass, and the watch has begun anew
            watch.leave_out()
