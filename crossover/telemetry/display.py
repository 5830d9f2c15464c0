"""A report on screen: a table by rich where there is a terminal, aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from crossover.telemetry.report import Report, percent, seconds, size

_SHOWN_REASONS = 6
_SHOWN_RANKS = 16

Rows = list[tuple[str, ...]]

_RANK_COLUMNS = ("rank", "steps", "median step", "median own work", "mean wait", "waiting", "sent")


def show(report: Report, stream: TextIO | None = None) -> None:
    """Print ``report`` to ``stream``, by default standard output."""
    stream = stream or sys.stdout
    if stream.isatty() and _show_rich(report, stream):
        return
    stream.write(as_text(report))


def as_text(report: Report) -> str:
    """The report as aligned plain text, ending in a line break."""
    parts = [_columns(_overview(report)), _columns([_RANK_COLUMNS, *_rank_rows(report)])]
    parts += ["\n".join(f"note: {note}" for note in _notes(report))] if _notes(report) else []
    return "\n\n".join([*parts, f"advice: {report.advice}"]) + "\n"


def _overview(report: Report) -> Rows:
    reasons = [f"{reason} ({count})" for reason, count in list(report.reasons.items())[:_SHOWN_REASONS]]
    rows: Rows = [
        ("steps", str(report.steps)),
        ("ranks", str(len(report.ranks))),
        ("step, median", seconds(report.median_step_s)),
        ("exposed communication", f"{percent(report.exposed_share)} of the step"),
        ("hidden communication", f"{percent(report.hidden_share)} of all communication"),
        ("synchronised", f"{percent(report.synchronised_share)} of the steps"),
        ("sent", f"{size(report.bytes_sent)} in all, {size(report.bytes_per_step)} a step and rank"),
        ("slowest rank", _slowest(report)),
        ("reasons", ", ".join(reasons)),
    ]
    if report.schedule is not None:
        rows.insert(2, ("schedule", report.schedule))
    return rows


def _slowest(report: Report) -> str:
    if report.slowest_rank is None:
        return "none stands out"
    return f"{report.slowest_rank}, {seconds(report.slowest_lag_s)} a step more work than the others"


def _rank_rows(report: Report) -> Rows:
    return [
        (
            str(item.rank),
            str(item.summary.steps),
            seconds(item.summary.median_step_s),
            seconds(item.summary.median_busy_s),
            seconds(item.summary.mean_exposed_s),
            percent(item.exposed_share),
            size(item.summary.bytes_sent),
        )
        for item in report.ranks[:_SHOWN_RANKS]
    ]


def _notes(report: Report) -> list[str]:
    rest = len(report.ranks) - _SHOWN_RANKS
    return [*report.notes, *([f"{rest} further ranks are not shown; --json has them"] if rest > 0 else [])]


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _show_rich(report: Report, stream: TextIO) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table
    except ImportError:
        return False
    console = Console(file=stream)
    overview = Table.grid(padding=(0, 2))
    overview.add_column(style="bold")
    for name, value in _overview(report):
        overview.add_row(name, value)
    ranks = Table(box=box.SIMPLE_HEAD)
    for column in _RANK_COLUMNS:
        ranks.add_column(column, justify="right")
    for item, row in zip(report.ranks, _rank_rows(report), strict=False):
        ranks.add_row(*row, style="yellow" if item.rank == report.slowest_rank else None)
    console.print(overview, ranks)
    for note in _notes(report):
        console.print(f"note: {note}", style="dim", markup=False)
    console.print(Panel(report.advice, title="advice", title_align="left", expand=False))
    return True
