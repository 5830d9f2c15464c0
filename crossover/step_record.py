"""One optimizer's record of each step, for telemetry."""

from __future__ import annotations

import time

from crossover import telemetry
from crossover.engine import Engine
from crossover.reduction import Traffic
from crossover.telemetry import StepRecord
from crossover.telemetry.records import Scalar

ALONE: tuple[bool, str, dict[str, Scalar]] = (False, "one rank only", {})


class StepRecords:
    """Emits a record a step where telemetry is on, and costs nothing where it is off."""

    def __init__(self) -> None:
        self._last_step_s: float | None = None

    def emit(self, engine: Engine | None, step: int, shares: int) -> None:
        """The step is over.

        Args:
            engine: what brought gradients together, ``None`` for a lone rank.
            step: number of the step.
            shares: backward passes that were shared for it.
        """
        recorder = telemetry.active()
        if recorder is not None:
            recorder.emit(self._record(engine, step, shares))

    def _record(self, engine: Engine | None, step: int, shares: int) -> StepRecord:
        now = time.perf_counter()
        begin, self._last_step_s = self._last_step_s, now
        traffic = Traffic() if engine is None else engine.reduction.take_traffic()
        synchronised, reason, facts = ALONE if engine is None else engine.exchange.facts()
        return StepRecord(
            step=step,
            rank=0 if engine is None else engine.communicator.ranks[engine.communicator.rank],
            start_s=now if begin is None else begin,
            wall_s=time.time(),
            step_s=None if begin is None else now - begin,
            synchronised=synchronised,
            reason=reason,
            bytes_sent=traffic.nbytes,
            collectives=traffic.collectives,
            communication_s=traffic.communication_s,
            exposed_s=traffic.exposed_s,
            hidden_s=traffic.hidden_s,
            extra={
                "shared_passes": shares,
                "schedule": "none" if engine is None else type(engine.schedule).__name__,
                **({"unseen": traffic.unseen} if traffic.unseen else {}),
                **facts,
            },
        )
