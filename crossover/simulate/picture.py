"""Pictures and traces of predictions. Pictures need the extra ``plot``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crossover.simulate.run import Result
from crossover.telemetry.files import cannot_write
from crossover.telemetry.style import STYLE
from crossover.telemetry.trace_events import Encoder

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#2f4b7c",
    "update": "#9d755d",
    "exposed": "#e4572e",
    "turn": "#d8dde2",
    "link": "#54a24b",
}
_LINES = ("#4c78a8", "#f58518", "#e4572e", "#54a24b", "#b279a2", "#72b7b2", "#9d755d", "#eeca3b")


def write_trace(results: Sequence[Result], path: str | os.PathLike[str]) -> None:
    """Write a Chrome trace: a process for each result, rows for what rank 0 does and for each link.

    Raises:
        ValueError: the file cannot be written.
    """
    lines: list[str] = []
    for number, result in enumerate(results):
        encoder = Encoder(number)
        name = {"name": f"{result.job}, {result.system} (simulated)"}
        lines.append(json.dumps({"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": name}))
        for track, label, start, end in _spans(result):
            lines += encoder.encode(("X", track, label, round(1e9 * start), round(1e9 * end), None))
    try:
        Path(path).write_text("[\n" + ",\n".join(lines) + "\n]\n")
    except OSError as error:
        raise cannot_write(Path(path), "timeline", error) from error


def _spans(result: Result) -> list[tuple[str, str, float, float]]:
    made = [(span.track, span.name, span.start, span.end) for span in result.spans]
    for link, transfers in result.transfers.items():
        made += [(f"communication {link}", t.name, t.begin, t.end) for t in transfers if t.end is not None]
    return made


def draw_timelines(results: Sequence[Result], path: str | os.PathLike[str], steps: int = 3) -> None:
    """Draw some settled steps of each result, one above the other: what rank 0 does, and its link below.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``path`` cannot be written or has an unknown suffix.
    """
    with _figure(path, (11.0, 1.2 + 0.95 * len(results))) as figure:
        axes = figure.subplots()
        # from the longest common stretch on, all from the start of a step
        longest = max(_window(result, steps)[1] - _window(result, steps)[0] for result in results)
        for row, result in enumerate(results):
            _row(axes, row, result, _window(result, steps)[0], longest)
        axes.set_xlim(0, 1e3 * longest)
        axes.set_ylim(len(results) - 0.35, -0.55)
        axes.set_yticks(range(len(results)), [f"{r.system}\n{1e3 * r.step_s:.0f} ms a step" for r in results])
        axes.set(xlabel="ms", title="Simulated: computing and waiting of one rank above, its link below")
        handles = [_patch(COLOURS[name]) for name in ("forward", "backward", "update", "exposed", "link")]
        labels = ["forward", "backward", "update, data", "waiting (exposed)", "on the link"]
        figure.legend(handles, labels, loc="outside lower center", ncols=5)


def _window(result: Result, steps: int) -> tuple[float, float]:
    first = min(len(result.marks) // 2, max(len(result.marks) - 1 - steps, 0))
    return result.marks[first], result.marks[min(first + steps, len(result.marks) - 1)]


def _row(axes: Any, row: int, result: Result, start: float, length: float) -> None:
    for track, _, begin, end in _spans(result):
        if end <= start or begin >= start + length:
            continue
        on_link = track.startswith("communication")
        place, height = (row + 0.12, 0.22) if on_link else (row - 0.32, 0.4)
        colour = COLOURS["link" if on_link else track]
        bar = (1e3 * (begin - start), 1e3 * (end - begin))
        axes.broken_barh([bar], (place, height), color=colour, linewidth=0.4, edgecolor="white")


def draw_curves(
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    path: str | os.PathLike[str],
    x_label: str,
    y_label: str,
    title: str,
) -> None:
    """Draw ``curves[panel][line] = [(x, y), ...]``, x on a logarithmic scale.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``path`` cannot be written or has an unknown suffix.
    """
    with _figure(path, (3.4 * len(curves) + 0.6, 3.6)) as figure:
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, (name, lines) in zip(panels, curves.items(), strict=True):
            for colour, (label, points) in zip(_LINES, lines.items(), strict=False):
                axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3.5, label=label)
            ticks = sorted({x for points in lines.values() for x, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set(title=name, xlabel=x_label, ylim=(0, None))
            axes.grid(color="#e6eaee")
        panels[0].set_ylabel(y_label)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.suptitle(title, x=0.012, ha="left", fontweight="bold")
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)


@contextmanager
def _figure(path: str | os.PathLike[str], size: tuple[float, float]) -> Iterator[Any]:
    """A figure in our style, saved to ``path`` at the end."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("picture: matplotlib is not installed; pip install 'crossover[plot]'") from error
    place = Path(path)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "crossover"}):
        figure = Figure(figsize=size, layout="constrained")
        known = figure.canvas.get_supported_filetypes()
        if place.suffix[1:] not in known:
            raise ValueError(f"picture: {os.fspath(path)!r} names no format; end it in one of: .{', .'.join(known)}")
        yield figure
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(place, dpi=110, metadata={"Date": None} if place.suffix == ".svg" else None)
        except OSError as error:
            raise cannot_write(place, "picture", error) from error
