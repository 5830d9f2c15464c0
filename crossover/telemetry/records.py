"""One record a step, kept in a ring and handed to whoever asked for it."""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from crossover.telemetry.sinks import LoggerSink, Sink

Scalar = float | int | str | bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one call of the user's ``optimizer.step()`` cost and why it did what it did. Local: each rank has its own.

    Attributes:
        step: number of the step, counted from 0.
        rank: global rank.
        start_s: when the step's interval began, in seconds of this process's ``time.perf_counter``.
        wall_s: when the step ended, in seconds since the epoch.
        step_s: seconds since the end of the previous step; ``None`` for the first.
        synchronised: whether anything was shared with other ranks in this step.
        reason: why it was shared, kept local or flushed, in a few words.
        bytes_sent: payload bytes handed to collectives.
        collectives: how many collectives were started.
        communication_s: seconds from launch to completion as this rank saw it, summed over collectives.
        exposed_s: seconds the training thread waited for other ranks. Collectives that a device waits for, as NCCL's,
            are in neither; ``extra["unseen"]`` says how many.
        hidden_s: seconds of communication under computing, summed over collectives.
        extra: what gates and schedules add (``significance``, ``vote``, ``schedule``, ``generation``, ...).
    """

    step: int
    rank: int
    start_s: float
    wall_s: float
    step_s: float | None
    synchronised: bool
    reason: str
    bytes_sent: int
    collectives: int
    communication_s: float
    exposed_s: float
    hidden_s: float
    extra: Mapping[str, Scalar] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, ``extra`` nested. :meth:`from_dict` takes it back."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        """The record that :meth:`as_dict` described; keys of later versions are left out.

        Raises:
            KeyError: a field is missing.
        """
        return cls(**{name: values[name] for name in _FIELDS})

    def flat(self, prefix: str = "crossover/") -> dict[str, Scalar]:
        """The fields and ``extra`` side by side under ``prefix``, for dashboards; unknown times are left out."""
        values = {name: value for name, value in self.as_dict().items() if name != "extra" and value is not None}
        return {prefix + name: value for name, value in {**self.extra, **values}.items()}


_FIELDS = tuple(item.name for item in fields(StepRecord))


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians and totals over some records of one rank. Times in seconds; ``None`` where no record tells.

    Attributes:
        steps: number of records.
        timed_steps: those whose time is known, all but the first as a rule.
        synchronised_steps: those that shared something.
        median_step_s: median time between two steps.
        median_busy_s: median of the step time that was not spent waiting for other ranks.
        median_exposed_s: median wait, over all steps.
        total_s: sum of the step times.
        total_exposed_s: sum of the waits of the steps whose time is known.
        total_hidden_s: sum of hidden communication, over all steps.
        total_communication_s: sum of communication, over all steps.
        bytes_sent: payload bytes in all.
        collectives: collectives in all.
        seen: whether the host knows of all waits; no figure is made of them where it does not.
    """

    steps: int
    timed_steps: int
    synchronised_steps: int
    median_step_s: float | None
    median_busy_s: float | None
    median_exposed_s: float | None
    total_s: float
    total_exposed_s: float
    total_hidden_s: float
    total_communication_s: float
    bytes_sent: int
    collectives: int
    seen: bool

    @property
    def mean_exposed_s(self) -> float | None:
        """Mean wait of a step whose time is known."""
        return self.total_exposed_s / self.timed_steps if self.seen and self.timed_steps else None

    @property
    def exposed_share(self) -> float | None:
        """Part of the time spent waiting, 0 to 1."""
        return self.total_exposed_s / self.total_s if self.seen and self.total_s > 0 else None

    @property
    def synchronised_share(self) -> float | None:
        """Part of the steps that shared something, 0 to 1."""
        return self.synchronised_steps / self.steps if self.steps else None


def summarise(records: Iterable[StepRecord]) -> Summary:
    """Medians and totals of ``records``. The first step's wait is in no share, as its step time is unknown."""
    rows = list(records)
    timed = [(row.step_s, row.exposed_s) for row in rows if row.step_s is not None]
    seen = not any(row.extra.get("unseen") for row in rows)
    return Summary(
        steps=len(rows),
        timed_steps=len(timed),
        synchronised_steps=sum(row.synchronised for row in rows),
        median_step_s=_median(step for step, _ in timed),
        median_busy_s=_median(step - exposed for step, exposed in timed if seen),
        median_exposed_s=_median(row.exposed_s for row in rows if seen),
        total_s=sum(step for step, _ in timed),
        total_exposed_s=sum(exposed for _, exposed in timed),
        total_hidden_s=sum(row.hidden_s for row in rows),
        total_communication_s=sum(row.communication_s for row in rows),
        bytes_sent=sum(row.bytes_sent for row in rows),
        collectives=sum(row.collectives for row in rows),
        seen=seen,
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


class Recorder:
    """Keeps the last records and passes each on. Belongs to one rank and its training thread; never communicates.

    A subscriber that raises is dropped with one warning, so that a full disk or a lost dashboard cannot end a training.

    Args:
        rank: global rank, for messages.
        capacity: records kept; the oldest leave first.

    Example:
        >>> from crossover.telemetry import Recorder, StepRecord
        >>> recorder = Recorder(capacity=100)
        >>> recorder.emit(StepRecord(0, 0, 0.0, 0.0, 0.02, True, "every step", 4096, 1, 0.004, 0.001, 0.003))
        >>> recorder.summary().exposed_share
        0.05
    """

    def __init__(self, rank: int = 0, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity!r}, must be at least 1; the default is 10000")
        self.rank = rank
        self._ring: deque[StepRecord] = deque(maxlen=capacity)
        self._sinks: list[Sink] = []

    def subscribe(self, subscriber: Sink | Callable[[dict[str, Scalar]], Any] | Any) -> Sink:
        """Pass every later record to ``subscriber``; give the returned sink to :meth:`unsubscribe`.

        A :class:`~crossover.telemetry.Sink` gets the record itself. An object with a ``log`` method (a Weights & Biases
        run, for example) or a callable gets the flat dictionary of :meth:`StepRecord.flat`.

        Raises:
            ValueError: it is none of these.
        """
        sink = subscriber if isinstance(subscriber, Sink) else LoggerSink(subscriber)
        self._sinks.append(sink)
        return sink

    def unsubscribe(self, sink: Sink) -> None:
        """Stop passing records to ``sink``. Does nothing if it was dropped already."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    def emit(self, record: StepRecord) -> None:
        """Keep ``record`` and pass it on."""
        self._ring.append(record)
        for sink in tuple(self._sinks):
            try:
                sink.log(record)
            except Exception as error:
                self._drop(sink, error)

    def summary(self) -> Summary:
        """Medians and totals over the records still kept."""
        return summarise(self._ring)

    def flush(self) -> None:
        """Ask every sink to write out what it holds."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Write out and release every sink. The records stay readable."""
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._ring))

    def __len__(self) -> int:
        return len(self._ring)

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                action(sink)
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        self.unsubscribe(sink)
        warnings.warn(
            f"rank {self.rank}: {sink} failed ({type(error).__name__}: {error}) and gets no more records; "
            f"training goes on without it",
            RuntimeWarning,
            stacklevel=3,
        )
