"""DeFT as a schedule: synchronous warm-up, measurement, then delayed updates by a plan that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.buckets import Bucket
from crossover.deft.course import Course
from crossover.deft.drift import Drift
from crossover.deft.guard import Guard
from crossover.deft.pilot import Decision, Pilot, Preserver
from crossover.deft.plan import QueueState, StepPlan, catch_up
from crossover.deft.planner import Limits
from crossover.deft.preserver import gain
from crossover.deft.profile import Profile
from crossover.deft.scout import Scout
from crossover.deft.sender import Sender
from crossover.deft.survey import Survey
from crossover.deft.travel import MeasuredTravel
from crossover.reduction import Reduction
from crossover.schedulers.delayed import DelayedSchedule
from crossover.schedulers.generations import Generation, Remark


class DeFT(DelayedSchedule):
    """Gradients travel under the next forward and backward passes and are applied one update late at most.

    The first steps are synchronous, as with ``Overlapped``; the last of these are measured. Then a plan is made: which
    bucket travels in which window, which steps are merged into one update. Where that saves too little time, or costs
    too much convergence, the job stays synchronous; ``decisions`` and the log say so, with the numbers.

    What ``p.grad`` holds when ``backward()`` returns is the average that is due, of an earlier step as a rule: clipping
    and logging see what ``step()`` applies. In steps where nothing is due every ``p.grad`` is ``None``, and ``step()``
    changes nothing. Learning-rate schedules go on with every step; an update uses the rate of the step in which it is
    applied.

    Across ranks: the same transfers in the same order, equal parameters after every step. Evaluate and save within
    ``optimizer.flushed()``, which applies what is on its way.

    With a gate every step is local, and the parameters that it shares travel under as many steps as their all-reduce
    takes by measurement, ``most_merged`` at most, over the first link; ``warmup_steps`` and ``replan_steps`` count as
    ever. What concerns gradients alone (``merge``, ``preserver``, ``compensation``, ...) has no effect then.

    Args:
        profile: one that was saved, instead of measuring. It has to fit the model's buckets. It holds until steps take
            longer than planned from it.
        warmup_steps: synchronous steps at the start. OD-SGD uses 200; a learning-rate warm-up should lie within.
        profile_steps: the last of these, which are measured; fewer if ``warmup_steps`` are fewer.
        merge: what becomes of merged steps: ``"gain"`` (mean gradient, learning rate times :meth:`gain`), ``"mean"``,
            or ``"sum"``.
        most_merged: steps in an update at most.
        capacity: factor on the windows as ``(numerator, denominator)``; ``None`` lets the preserver choose, and lets it
            stay synchronous.
        sync_wait_us: time that may be waited at the end of backward so that more travels early.
        preserver: what may be lost in convergence.
        ramp_updates: after a switch to delayed updates the learning rate rises from half to all over so many updates.
        replan_steps: measure and decide again every so many steps.
        second_link: network interface of a second link (:mod:`crossover.deft.links`), or ``"gloo"`` for Gloo beside
            another backend; ``"auto"`` is ``$CROSSOVER_SECOND_IFACE``, ``None`` none. Used if measurement says so.
        bucket_bytes: size at which buckets are closed; by default as small as the network's latency allows.
        compensation: strength of the correction of late gradients for moved weights, 0 for none.
        spike_compensation: momentum of SGD, Adam and AdamW weights late gradients so that larger learning rates are
            stable (:mod:`crossover.schedulers.spike`).
        grad_scaler: the ``GradScaler`` that steps this optimizer; found by itself during warm-up.
        before_flushed_step: called with the parameters before each update that ``flush()`` applies: clip there.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = xo.DistributedOptimizer(optimizer, schedule=xo.deft.DeFT(warmup_steps=100))

    Source: Meng and Sun, DeFT, arXiv 2503.16815, of which only the abstract could be read; see
    :mod:`crossover.deft.plan`.
    """

    def __init__(
        self,
        profile: Profile | None = None,
        *,
        warmup_steps: int = 200,
        profile_steps: int = 20,
        merge: str = "gain",
        most_merged: int = 8,
        capacity: tuple[int, int] | None = None,
        sync_wait_us: int = 0,
        preserver: Preserver | None = None,
        ramp_updates: int = 100,
        replan_steps: int = 2000,
        second_link: str | None = "auto",
        bucket_bytes: int | None = None,
        compensation: float = 0.0,
        spike_compensation: bool = True,
        grad_scaler: Any = None,
        before_flushed_step: Callable[[list[Tensor]], object] | None = None,
    ) -> None:
        super().__init__(merge, compensation, grad_scaler, before_flushed_step, spike_compensation)
        counts = {"warmup_steps": warmup_steps, "profile_steps": profile_steps, "replan_steps": replan_steps}
        for name, value in {**counts, "bucket_bytes": 1 if bucket_bytes is None else bucket_bytes}.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: is {value!r}; it has to be a whole number of 1 or more")
        if not isinstance(ramp_updates, int) or ramp_updates < 0:
            raise ValueError(f"ramp_updates: is {ramp_updates!r}; it has to be a whole number of 0 or more")
        if profile is None and warmup_steps < 3:
            raise ValueError(f"warmup_steps: is {warmup_steps}; measuring takes 3 or more, or pass a profile")
        self.ramp_updates = ramp_updates
        pilot = Pilot(
            preserver or Preserver(),
            Limits(capacity or (1, 1), sync_wait_us, most_merged),
            fixed_capacity=capacity is not None,
        )
        self.course = Course(pilot, warmup_steps, min(profile_steps, max(warmup_steps - 2, 1)), replan_steps)
        self.warmup_steps = warmup_steps
        self._given = profile
        self._second_link = second_link
        self._wanted_bytes = bucket_bytes
        self._step = StepPlan()
        self._delayed_updates = 0
        self._survey: Survey | None = None
        self._began = False
        self._drift = Drift()

    # -- what users ask ----------------------------------------------------------------------------------------------

    @property
    def decisions(self) -> list[Decision]:
        """What was decided so far, and why."""
        return self.course.pilot.decisions

    @property
    def delayed(self) -> bool:
        """Whether updates come late now."""
        return self.course.plan is not None

    @property
    def profile(self) -> Profile | None:
        """What was measured last, equal on all ranks; ``None`` before."""
        return self.course.profile

    def observe(self, loss: float) -> None:
        """Tell this rank's loss of the step, so that the preserver can watch it; ranks need not all do so."""
        if hasattr(self, "_guard"):  # a lone rank has none
            self._guard.loss = float(loss)

    def gain(self, steps: int) -> float:
        """Factor on the learning rate for ``steps`` merged steps: by the noise scale, and the root of it for Adam."""
        if any("betas" in group for group in self.optimizer.param_groups):
            return super().gain(steps)
        return gain(steps, self.reduction.communicator.size, self.course.pilot.noise.cautious)

    def travel(self) -> MeasuredTravel:
        """See :meth:`DelayedSchedule.travel`: under as many steps as they need, after ``warmup_steps`` that wait."""
        course = self.course
        return MeasuredTravel(
            self.reduction,
            self._scout.cost,
            warmup_steps=self.warmup_steps,
            profile_steps=course.profile_steps,
            replan_steps=course.replan_steps,
            most=course.pilot.limits.most_merged,
            device=self._scout.device,
            log=course.pilot.log,
            given=self._given,
        )

    # -- attaching ---------------------------------------------------------------------------------------------------

    def attach(self, reduction: Reduction, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`Schedule.attach`. Collective: the links are timed."""
        super().attach(reduction, optimizer)
        self.course.pilot.silent = reduction.communicator.rank != 0
        self._scout = Scout(reduction, optimizer, self._second_link)
        summed = self.merge == "sum"
        self._guard = Guard(reduction, self.loss_scale, self.course.pilot, summed, self._scout.device)
        self.bucket_cap_bytes = self._wanted_bytes or self._scout.bucket_bytes

    def detach(self) -> None:
        """See :meth:`Schedule.detach`."""
        super().detach()
        self._scout.close()
        if self._survey is not None:
            self._survey.timer.stop()
        self._survey = None

    def expect_layout(self) -> None:
        """Have buckets of the size that a loaded state has: the link looks different at each start. Collective."""
        mine = None if self._loaded is None else self._loaded.get("bucket_bytes")
        everyone = self.reduction.communicator.all_gather_object(mine, name=f"{self.reduction.name}.deft.size")
        known = [size for size in everyone if size is not None]
        if known and self._wanted_bytes is None:
            self.bucket_cap_bytes = known[0]

    def layout(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets. If some are new, measurement and planning begin anew."""
        known = len(self.buckets)
        self._began = False
        super().layout(buckets)
        if self._survey is not None:
            self._survey.timer.stop()
        self._survey = Survey(self.reduction, self.buckets)
        if known:
            self.course.follow(None)
            self.course.decide_at = self.course.steps + max(self.course.profile_steps + 2, 3)
            self.course.stale = True
            self.course.pilot.log(self.course.steps, "synchronous: the model has other parameters now")
        if not self._began:  # else a checkpoint said how to go on
            self._begin(catch_up(QueueState(), len(self.generations.pieces)), first_bucket=known)

    # -- a backward pass ---------------------------------------------------------------------------------------------

    def _begin(self, step: StepPlan, first_bucket: int = 0) -> None:
        """Take up a step."""
        self._began = True
        self._step = step
        self._sender = Sender(self.generations, self._scout.links)
        self._sender.timed = self._survey is not None and self._survey.timer.running
        self._sender.begin(step, first_bucket)
        self._guard.begin(step.close, self.delayed, self.course.decide_at - self.course.steps)

    def ready(self, bucket: Bucket) -> None:
        """Send what the plan has next."""
        if self._survey is not None:
            self._survey.timer.bucket_ready(bucket.index)
        self._guard.add(bucket)
        self._sender.ready(bucket.index)

    def finish(self) -> None:
        """Leave in ``p.grad`` what is due, and send what travels until the next backward pass ends."""
        assert self._survey is not None
        if self._adopted_from is not None:
            self.end_step(close=True, apply=1)
        else:
            self._survey.timer.backward_ended()
            self._guard.send(self.generations.accumulating)
            due = self.end_step(self._step.close, self._step.apply)
            self._guard.closed += self._step.close
            self.course.advance()
            if due is not None:
                self._survey.complete(due)
                reason = self._guard.look(due, self.buckets, self.delayed)
                if reason is not None and self.delayed:
                    self.course.fall_back(reason)
                    self._survey.timer.stop()
        self._go_on()

    # -- from step to step -------------------------------------------------------------------------------------------

    @property
    def state(self) -> QueueState:
        """What is on its way, as plans see it."""
        if self.generations.current is None:
            return QueueState(False, frozenset(), self.generations.accumulating.steps)
        last = len(self.generations.pieces) - 1
        sent = self.generations.current.transfers
        unsent = frozenset(last - n for n, p in enumerate(self.generations.pieces) if (p.bucket, p.start) not in sent)
        return QueueState(True, unsent, self.generations.accumulating.steps)

    def _go_on(self) -> None:
        course, survey = self.course, self._survey
        assert survey is not None
        self._watch_pace()
        if course.survey_begins:
            survey.start()
        if course.decision_due:
            self._decide()
        name = f"{self.reduction.name}.deft.{course.steps}"
        self._begin(course.step(self.reduction.communicator, name, self.state, len(self.generations.pieces)))
        self._sender.queue(self._step)
        survey.timer.step_begins()

    def _watch_pace(self) -> None:
        """Measure again soon if steps take longer than the plan promised."""
        course = self.course
        if not self.delayed or course.near_decision or self._survey is None or self._survey.timer.running:
            return
        name = f"{self.reduction.name}.deft.pace"
        if self._drift.step(self.reduction.communicator, name, course.promised_us):
            numbers = {"measured_us": self._drift.measured_us, "promised_us": course.promised_us}
            self._given = None
            course.measure_soon("steps take longer than planned: measuring again", **numbers)

    def _decide(self) -> None:
        """Collective."""
        assert self._survey is not None
        communicator, name = self.reduction.communicator, f"{self.reduction.name}.deft.{self.course.steps}"
        pilot, steps = self.course.pilot, self.course.steps
        if not self.delayed:
            self._scout.time_links(name, lambda action, **numbers: pilot.log(steps, action, **numbers))
        profile = self._survey.result(self.generations.pieces, self.buckets, self._scout.cost, self._scout.slow)
        given = self._given
        if given is not None and self._fits(given):
            profile = given.on_links(len(self._scout.links))
        if not all(communicator.all_gather_object(self.suits, name=f"{name}.suits")):
            self.course.stay(f"{self.unstepped} averages were made for which no step() came")
            return
        profile = profile or self.course.profile
        if profile is None:
            self.course.decide_at = self.course.steps + self.course.profile_steps + 2
            self.course.pilot.log(self.course.steps, "synchronous: no step could be measured, trying again")
            return
        was_delayed = self.delayed
        if not was_delayed and given is None:
            self.generations.pieces, profile = self._scout.cut(self.generations.pieces, profile)
        self.course.decide(communicator, name, profile, self.state)
        self._drift.restart()
        if self.delayed and not was_delayed:
            self.loss_scale.require_known()
            self._delayed_updates = 0
            spike = self.spike.knows(self.optimizer)
            self.course.pilot.warn_of_momentum(self.course.steps, self.optimizer.param_groups, spike)

    def _fits(self, profile: Profile) -> bool:
        given, have = len(profile.nbytes), len(self.generations.pieces)
        if given != have:
            why = f"the given profile has {given} buckets and this model {have}: measuring"
            self.course.pilot.log(self.course.steps, why)
        return given == have

    # -- around the user's step --------------------------------------------------------------------------------------

    def _factor(self, due: Generation) -> float:
        """The gain of merged steps, and the ramp after a switch to delayed updates."""
        ramp = 1.0
        if due.late and self._delayed_updates < self.ramp_updates:
            ramp = 0.5 + 0.5 * self._delayed_updates / self.ramp_updates
        return super()._factor(due) * ramp

    def stepped(self) -> None:
        """See :meth:`Schedule.stepped`."""
        self._delayed_updates += self._due is not None and self._due.late
        super().stepped()

    def flush(self) -> None:
        """See :meth:`Schedule.flush`."""
        super().flush()
        if self.buckets and self._adopted_from is None:
            self.course.start_over()
            self._begin(self.course.step(self.reduction.communicator, "", QueueState(), len(self.generations.pieces)))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`DelayedSchedule.state_dict`: with the size of the buckets."""
        state = super().state_dict()
        return {**state, "bucket_bytes": self.bucket_cap_bytes} if state else {}

    def counters(self) -> dict[str, Any]:
        """See :meth:`DelayedSchedule.counters`: the plan, the place in it, and what the preserver knows."""
        mine = {
            "course": self.course.state_dict(),
            "delayed_updates": self._delayed_updates,
            "closed": self._guard.closed,
        }
        return {**super().counters(), **mine}

    def load_counters(self, counters: dict[str, Any], kept: bool) -> None:
        """See :meth:`DelayedSchedule.load_counters`."""
        super().load_counters(counters, kept)
        self.course.load_state_dict(counters["course"])
        self._delayed_updates, self._guard.closed = counters["delayed_updates"], counters["closed"]
        self._given = None
        if not kept:
            self.course.start_over()
            self.course.pilot.log(self.course.steps, "resumed without the gradients that were on their way")
        name = f"{self.reduction.name}.deft.resume"
        self._begin(self.course.step(self.reduction.communicator, name, self.state, len(self.generations.pieces)))

    def saved_remarks(self, generation: Generation) -> list[Any]:
        """See :meth:`DelayedSchedule.saved_remarks`."""
        return self._guard.saved(generation)

    def restored_remarks(self, saved: list[Any]) -> list[Remark]:
        """See :meth:`DelayedSchedule.restored_remarks`."""
        return self._guard.restored(saved)

    def describe(self) -> tuple[str, dict[str, Any]]:
        """See :meth:`Schedule.describe`."""
        reason = "synchronous" if not self.delayed else "delayed by plan"
        return f"DeFT: {reason}", {"accumulating": self.generations.accumulating.steps, "updates": self.updates}
