"""A run at a glance: step time, where it goes on each rank, communication, and bytes. Needs the extra ``plot``."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossover.telemetry.files import cannot_write
from crossover.telemetry.records import StepRecord
from crossover.telemetry.report import Report, percent, seconds, size
from crossover.telemetry.run import Run
from crossover.telemetry.style import GREY, GRID, STYLE

OWN_WORK, HIDDEN, EXPOSED = "#4c78a8", "#9ecae9", "#e4572e"
_RANK_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#9d755d", "#eeca3b", "#ff9da6")
_LINES = 4  # with more ranks, a band from fastest to slowest replaces one line a rank
_BARS = 8  # with more ranks, bars go without gaps and figures
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def draw(run: Run, report: Report, path: str | os.PathLike[str]) -> None:
    """Draw ``run``, analysed as ``report``, into ``path``; the suffix gives the format (png, svg, pdf).

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``path`` cannot be written or has an unknown suffix.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("picture: matplotlib is not installed; pip install 'crossover[plot]'") from error
    with matplotlib.rc_context({**STYLE, **GRID}):
        figure = Figure(figsize=(11.5, 7.2), layout="constrained")
        known = figure.canvas.get_supported_filetypes()
        if Path(path).suffix[1:] not in known:
            raise ValueError(f"picture: {os.fspath(path)!r} names no format; end it in one of: .{', .'.join(known)}")
        axes = figure.subplots(2, 2)
        figure.suptitle(_title(report), x=0.012, ha="left", fontsize=13, fontweight="bold")
        _step_time(axes[0, 0], run, report)
        _shares(axes[0, 1], report)
        _communication(axes[1, 0], run, report)
        _bytes(axes[1, 1], run)
        _save(figure, Path(path))


def _title(report: Report) -> str:
    advice = report.advice[0].upper() + report.advice[1:]
    return "\n".join(textwrap.wrap(advice, 105))


def _save(figure: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise cannot_write(path, "picture", error) from error


def _step_time(axes: Any, run: Run, report: Report) -> None:
    import numpy as np

    timed = {rank: [row for row in rows if row.step_s is not None] for rank, rows in run.records.items()}
    series = {rank: ([row.step for row in rows], _milliseconds(rows, "step_s")) for rank, rows in timed.items() if rows}
    if len(series) <= _LINES:
        for index, (rank, (steps, values)) in enumerate(series.items()):
            colour = _RANK_COLOURS[index % len(_RANK_COLOURS)]
            axes.plot(steps, values, color=colour, alpha=0.22, linewidth=0.8)
            width = 1.5 + 1.6 * (len(series) - 1 - index)  # synchronous ranks coincide: each line shows beside the next
            axes.plot(steps, _smooth(values), color=colour, linewidth=width, label=f"rank {rank}")
    else:
        shared = sorted(set.intersection(*(set(steps) for steps, _ in series.values())))
        rows = np.array([_at(shared, steps, _smooth(values)) for steps, values in series.values()])
        axes.fill_between(shared, rows.min(0), rows.max(0), color=OWN_WORK, alpha=0.25, label="fastest to slowest rank")
        axes.plot(shared, np.median(rows, 0), color=OWN_WORK, linewidth=1.7, label=f"median of {len(series)} ranks")
    if series:
        # single long steps (start-up, checkpoints) must not flatten everything else
        axes.set_ylim(0, 1.5 * max(_smooth(values).max() for _, values in series.values()))
        axes.legend(loc="lower left", ncols=4)
    title = f"Step time: median {seconds(report.median_step_s)}, {report.steps} steps (bold: running median)"
    axes.set(title=title, xlabel="step", ylabel="ms per step")


def _shares(axes: Any, report: Report) -> None:
    known = [item for item in report.ranks if item.summary.total_s > 0]
    places = range(len(known))
    waiting = [1e3 * item.summary.total_exposed_s / item.summary.timed_steps for item in known]
    whole = [1e3 * item.summary.total_s / item.summary.timed_steps for item in known]
    own = [total - wait for total, wait in zip(whole, waiting, strict=True)]
    height = 0.62 if len(known) <= _BARS else 0.9
    axes.barh(places, own, height, color=OWN_WORK, label="own work")
    axes.barh(places, waiting, height, left=own, color=EXPOSED, label="waiting for other ranks (exposed)")
    if len(known) <= _BARS:
        for place, total, item in zip(places, whole, known, strict=True):
            label = f"  {percent(item.exposed_share)} waiting{', slowest' if item.rank == report.slowest_rank else ''}"
            axes.text(total, place, label, va="center", color=GREY, fontsize=8.5)
        axes.set_yticks(list(places), [f"rank {item.rank}" for item in known])
    else:
        axes.set_yticks(places[:: -(-len(known) // 16)], [str(item.rank) for item in known[:: -(-len(known) // 16)]])
        axes.set_ylabel("rank")
    axes.set_xlim(0, 1.36 * max(whole, default=1.0))
    axes.set_ylim(len(known) + 0.15 * len(known) - 0.3, -0.6)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower left", ncols=2)
    axes.set(title="Where each rank's step goes, on average", xlabel="ms per step")


def _communication(axes: Any, run: Run, report: Report) -> None:
    import numpy as np

    shared = sorted(set.intersection(*({row.step for row in rows} for rows in run.records.values())))
    mean = {}
    for name in ("exposed_s", "hidden_s"):
        rows = [_at(shared, [row.step for row in rows], _milliseconds(rows, name)) for rows in run.records.values()]
        mean[name] = _smooth(np.mean(rows, 0), np.mean) if rows else np.zeros(0)
    axes.stackplot(
        shared,
        mean["exposed_s"],
        mean["hidden_s"],
        colors=(EXPOSED, HIDDEN),
        labels=("exposed: the step waits", "hidden under computing"),
        linewidth=0,
    )
    top = np.max(mean["exposed_s"] + mean["hidden_s"], initial=0.0)
    if top > 0:
        axes.set_ylim(0, 1.25 * top)
    axes.legend(loc="upper right", ncols=2)
    axes.set(
        title=f"Communication: {percent(report.hidden_share)} hidden (running mean of all ranks)",
        xlabel="step",
        ylabel="ms per step, summed over collectives",
    )


def _bytes(axes: Any, run: Run) -> None:
    import numpy as np

    rank, rows = next(iter(run.records.items()))
    steps, sent = [row.step for row in rows], np.cumsum([row.bytes_sent for row in rows])
    unit, name = next((pair for pair in _UNITS if sent[-1] >= pair[0]), _UNITS[-1])
    axes.plot(steps, sent / unit, color=OWN_WORK, linewidth=1.9, label=f"rank {rank}")
    share = sum(row.synchronised for row in rows) / len(rows)
    if share < 1:
        full = sent[-1] / max(share, 1 / len(rows)) / unit
        axes.plot(
            (steps[0], steps[-1]), (0, full), color=GREY, linestyle=":", linewidth=1.2, label="if every step shared"
        )
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    title = f"Sent by rank {rank}: {size(float(sent[-1]))}, in {percent(share)} of its steps"
    axes.set(title=title, xlabel="step", ylabel=f"{name} handed to collectives, cumulative")


def _milliseconds(rows: Sequence[StepRecord], name: str) -> Any:
    import numpy as np

    return np.array([1e3 * getattr(row, name) for row in rows], dtype=float)


def _at(wanted: Sequence[int], steps: Sequence[int], values: Any) -> Any:
    import numpy as np

    places = dict(zip(steps, range(len(steps)), strict=True))
    return np.asarray(values)[[places[step] for step in wanted]]


def _smooth(values: Any, statistic: Any = None) -> Any:
    """Running median (or ``statistic``) over about a fortieth of the run."""
    import numpy as np

    half = len(values) // 80
    windows = (values[max(0, place - half) : place + half + 1] for place in range(len(values)))
    return np.array([(statistic or np.median)(window) for window in windows])
