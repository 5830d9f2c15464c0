"""What the records of a run say: where the time went, which rank is slow, and what is worth trying."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from crossover.telemetry.records import StepRecord, Summary, summarise
from crossover.telemetry.run import Run, load_run

LITTLE_TO_GAIN = 0.05
"""Exposed share below which the report advises nothing."""

UNSEEN = (
    "the device waited for communication, as it does for NCCL, and not the host: how much of the step that took is not "
    "known here; crossover profile measures it, and torch's profiler shows it"
)

STRAGGLER = 0.05
"""Part of a step by which a rank's own work must exceed that of the others to be called slow."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank of a run.

    Attributes:
        rank: its global rank.
        summary: its medians and totals.
        exposed_share: part of its time spent waiting for others, 0 to 1.
    """

    rank: int
    summary: Summary
    exposed_share: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """A run in a few figures. Times in seconds, shares from 0 to 1, ``None`` where the records do not tell.

    Attributes:
        steps: steps that every rank recorded.
        median_step_s: median over the steps of all ranks.
        exposed_share: waiting time / step time, over all ranks.
        hidden_share: part of the communication that was hidden under computing.
        synchronised_share: steps that shared something / all steps.
        bytes_sent: payload bytes handed to collectives, over all ranks.
        bytes_per_step: the same for one step of one rank.
        slowest_rank: the rank with most work of its own in a step, if it stands out; the others wait for it.
        slowest_lag_s: how much more than the median of the others.
        schedule: name of the schedule, if the records carry it.
        reasons: how often each reason was given, most frequent first.
        ranks: each rank.
        notes: what was left out of the account.
        advice: one line.
    """

    steps: int
    median_step_s: float | None
    exposed_share: float | None
    hidden_share: float | None
    synchronised_share: float | None
    bytes_sent: int
    bytes_per_step: float | None
    slowest_rank: int | None
    slowest_lag_s: float | None
    schedule: str | None
    reasons: dict[str, int]
    ranks: tuple[RankReport, ...]
    notes: tuple[str, ...]
    advice: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def report(directory: str | os.PathLike[str]) -> Report:
    """The report on the run whose records are in ``directory``.

    Raises:
        ValueError: there are none, or they cannot be read.
    """
    return analyse(load_run(directory))


def analyse(run: Run) -> Report:
    """The report on ``run``."""
    summaries = {rank: summarise(records) for rank, records in run.records.items()}
    everything = summarise(record for records in run.records.values() for record in records)
    slowest, lag = _slowest(summaries)
    moved = everything.total_hidden_s + sum(row.exposed_s for rows in run.records.values() for row in rows)
    schedule = _schedule(run.records)
    reasons = Counter(record.reason for records in run.records.values() for record in records)
    return Report(
        steps=min(summary.steps for summary in summaries.values()),
        median_step_s=everything.median_step_s,
        exposed_share=everything.exposed_share,
        hidden_share=everything.total_hidden_s / moved if everything.seen and moved > 0 else None,
        synchronised_share=everything.synchronised_share,
        bytes_sent=everything.bytes_sent,
        bytes_per_step=everything.bytes_sent / everything.steps if everything.steps else None,
        slowest_rank=slowest,
        slowest_lag_s=lag,
        schedule=schedule,
        reasons=dict(reasons.most_common()),
        ranks=tuple(RankReport(rank, summary, summary.exposed_share) for rank, summary in summaries.items()),
        notes=run.notes,
        advice=advise(everything, len(summaries), slowest, lag, schedule),
    )


def advise(everything: Summary, ranks: int, slowest: int | None, lag: float | None, schedule: str | None) -> str:
    """One line on what to try, from the figures of all ranks together."""
    if not everything.seen:
        return UNSEEN
    share, step = everything.exposed_share, everything.median_step_s
    if share is None or step is None:
        return "fewer than two steps were recorded: nothing can be said yet"
    if everything.collectives == 0:
        return "nothing was communicated: " + ("there is one rank" if ranks == 1 else "no step shared anything")
    finding = f"communication exposed is {share:.0%} of the step"
    if share < LITTLE_TO_GAIN:
        return f"{finding}: there is little to gain"
    if slowest is not None and lag is not None and lag >= share * step / 2:
        return (
            f"{finding}, but mostly the others wait for rank {slowest}, whose own work takes {seconds(lag)} a step "
            f"longer: look at its input pipeline and its device first"
        )
    if schedule is not None and schedule.lower() == "priority":
        return (
            f"{finding} with the Priority schedule: compare with crossover.schedulers.Overlapped(); "
            f"beyond that, a larger batch per step sends less often"
        )
    return (
        f"{finding}: consider schedule=crossover.schedulers.Priority(), which also hides communication under the next "
        f"forward pass"
    )


def _slowest(summaries: dict[int, Summary]) -> tuple[int | None, float | None]:
    """Step times are equal on synchronous ranks; the slow one is the one that does not wait."""
    busy = {rank: summary.median_busy_s for rank, summary in summaries.items() if summary.median_busy_s is not None}
    steps = [summary.median_step_s for summary in summaries.values() if summary.median_step_s is not None]
    if len(busy) < 2:
        return None, None
    slowest = max(busy, key=lambda rank: busy[rank])
    lag = busy[slowest] - statistics.median(value for rank, value in busy.items() if rank != slowest)
    return (slowest, lag) if lag >= STRAGGLER * statistics.median(steps) else (None, None)


def _schedule(records: dict[int, Sequence[StepRecord]]) -> str | None:
    names = (record.extra.get("schedule") for rows in records.values() for record in reversed(rows))
    name = next(names, None)
    return name if isinstance(name, str) else None


def seconds(value: float | None) -> str:
    """A duration with a unit that suits it: ``1.25 s``, ``18.3 ms``, ``640 µs``."""
    if value is None:
        return "unknown"
    for limit, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs")):
        if abs(value) >= limit:
            return f"{value * factor:.3g} {unit}"
    raise AssertionError("unreachable: the last limit is 0")


def size(nbytes: float | None) -> str:
    """Bytes with a decimal unit: ``33.6 MB``."""
    if nbytes is None:
        return "unknown"
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def percent(share: float | None) -> str:
    """A share in whole per cent, or one decimal below 10."""
    if share is None:
        return "unknown"
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
