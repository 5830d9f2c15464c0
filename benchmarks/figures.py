"""From the ranks' answers to figures and the lines of tables. Pure functions."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from . import peers
from .harness import Outcome, Results


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Place by place, the largest of the ranks' values."""
    return [max(values) for values in zip(*ranks, strict=True)]


def median_ratio(ours: Sequence[float], base: Sequence[float]) -> float:
    """Median over the repeats of the ratio within a repeat."""
    return statistics.median(a / b for a, b in zip(ours, base, strict=True))


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def reasons(results: Results) -> str:
    """A line for each reason why systems cannot run."""
    by_reason: dict[str, list[str]] = {}
    for name, result in results.items():
        if result.reason:
            by_reason.setdefault(result.reason, []).append(peers.get(name).label)
    return "\n".join(f"- cannot run: {'; '.join(labels)}. {reason}" for reason, labels in by_reason.items())


def choices(results: Results) -> str:
    """What each system ran with; an asterisk where a search on the spot chose it."""
    lines = []
    for name, result in results.items():
        known = result.runs[0][0].get("facts") if result.ran else None
        if known:
            mark = "\\*" if result.choice else ""
            lines.append(f"{peers.get(name).label}{mark}: {', '.join(f'{key} {known[key]}' for key in known)}")
    if not lines:
        return ""
    searched = any(result.choice for result in results.values())
    ending = " (\\* chosen by a search on the spot)" if searched else " (documented defaults, no search)"
    return "Settings: " + "; ".join(lines) + ending + "."


def facts(outcome: Outcome) -> str:
    """What stands above every table of a cell."""
    cell = outcome.cell
    compute = cell.compute
    return (
        f"{outcome.sentence}. {compute.gradient_bytes / 1e6:.2f} MB of gradients; computing, measured here beforehand: "
        f"{milliseconds(compute.step_s)} ms a step, of it forward and backward "
        f"{milliseconds(compute.forward_backward_s)} ms; all-reduce at the full rate: "
        f"{milliseconds(cell.all_reduce_s)} ms."
    )


def as_data(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """All that was measured, for JSON."""
    return [
        {
            "workload": outcome.cell.workload,
            "cr": outcome.cell.cr,
            "hosts": outcome.cell.hosts,
            "rate_bit_s": outcome.cell.rate,
            "compute": dataclasses.asdict(outcome.cell.compute),
            "all_reduce_s": outcome.cell.all_reduce_s,
            "site": outcome.site,
            "refused": outcome.refused,
            "systems": {name: dataclasses.asdict(measured) for name, measured in outcome.systems.items()},
        }
        for outcome in outcomes
    ]
