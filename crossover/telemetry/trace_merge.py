"""Joins the timelines of several ranks, or of several jobs on one machine, into one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossover.telemetry.files import cannot_write, to_json


@dataclass(frozen=True, slots=True)
class Merged:
    """What :func:`merge` did.

    Attributes:
        files: files read.
        events: events written.
        damaged: lines left out because a kill cut them short.
        not_aligned: files of more than one whose clock was never compared with rank 0's.
    """

    files: int
    events: int
    damaged: int
    not_aligned: tuple[str, ...]


def merge(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Merged:
    """Write the events of all ``paths``, as ``TimelineWriter`` left them, into ``out``. Killed runs' files are fine.

    Each file keeps a process of its own. Where two files claim the same rank, as two jobs do, the later one is
    renumbered and its file name added to the process name.

    Raises:
        ValueError: no path, an unreadable one, one that is no such timeline, or ``out`` among them or not writable.
    """
    sources = [Path(path) for path in paths]
    target = Path(out)
    if not sources:
        raise ValueError("paths: got none; give the files that the ranks wrote, for example run.rank*.json")
    if any(source.resolve() == target.resolve() for source in sources):
        raise ValueError(f"out: {str(target)!r} is also one of the files to merge; give another name")
    damaged, events, not_aligned = 0, [], []
    used: set[int] = set()
    for source in sources:
        own, bad = _read(source)
        damaged += bad
        if len(sources) > 1 and not _aligned(own):
            not_aligned.append(str(source))
        events += _renumbered(own, used, source)
    _write(target, events)
    return Merged(len(sources), len(events), damaged, tuple(not_aligned))


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"paths: cannot read {str(path)!r} ({error.strerror}); give files that exist") from error
    events, damaged = [], 0
    for line in text.splitlines():
        line = line.strip().strip(",")
        if line in ("", "[", "]"):
            continue
        try:
            event = json.loads(line)
        except ValueError:
            damaged += 1
            continue
        if isinstance(event, dict) and "ph" in event and "pid" in event:
            events.append(event)
        else:
            damaged += 1
    if not events:
        raise ValueError(
            f"paths: {str(path)!r} holds no event of a timeline; give files written by CROSSOVER_TIMELINE, "
            f"unchanged, with one event a line"
        )
    return events, damaged


def _aligned(events: Sequence[dict[str, Any]]) -> bool:
    methods = [event["args"]["method"] for event in events if event.get("name") == "crossover_clock"]
    return bool(methods) and methods[-1] != "not aligned"


def _renumbered(events: list[dict[str, Any]], used: set[int], source: Path) -> list[dict[str, Any]]:
    changes: dict[int, int] = {}
    for number in dict.fromkeys(event["pid"] for event in events):
        changes[number] = number if number not in used else max(used) + 1
        used.add(changes[number])
    for event in events:
        new = changes[event["pid"]]
        if new != event["pid"] and event.get("name") == "process_name":
            event["args"] = {"name": f"{event['args']['name']} ({source.name})"}
        if new != event["pid"] and event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": new}
        event["pid"] = new
    return events


def _write(target: Path, events: list[dict[str, Any]]) -> None:
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write("[\n")
            for index, event in enumerate(events):
                file.write((",\n" if index else "") + to_json(event))
            file.write("\n]\n")
        os.replace(partial, target)
    except OSError as error:
        raise cannot_write(target, "out", error) from error
