"""Reads back the JSON lines that the ranks of a run wrote."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crossover.telemetry.records import StepRecord

_RANK = re.compile(r"^(?P<stem>.*)\.rank(?P<rank>\d+)$")


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one run.

    Attributes:
        records: each rank's records, in the order written; ranks ascending.
        notes: what was left out and why.
    """

    records: dict[int, Sequence[StepRecord]]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _File:
    """The last run in one rank's file, and what precedes it."""

    size: int | None = None
    records: list[StepRecord] = field(default_factory=list)
    runs: int = 0
    damaged: int = 0


def load_run(directory: str | os.PathLike[str]) -> Run:
    """The latest run in ``directory``; lines that a kill cut short are left out and noted.

    Raises:
        ValueError: no such directory, no records in it, or records of differently named runs.
    """
    files = _read_all(_find(Path(directory)))
    notes = []
    size = files[min(files)].size
    if size is not None and (left := [rank for rank in files if rank >= size]):
        notes.append(f"files of rank {', '.join(map(str, left))} are from an earlier run with more ranks: left out")
        files = {rank: file for rank, file in files.items() if rank < size}
    if size is not None and (missing := [rank for rank in range(size) if rank not in files]):
        notes.append(f"no file of rank {', '.join(map(str, missing))} of {size}: the figures are of the others")
    if earlier := max(file.runs for file in files.values()) - 1:
        notes.append(f"{earlier} earlier run(s) in the same files: left out")
    if damaged := sum(file.damaged for file in files.values()):
        notes.append(f"{damaged} line(s) cut short or not records: left out")
    records: dict[int, Sequence[StepRecord]] = {rank: file.records for rank, file in files.items() if file.records}
    if not records:
        raise ValueError(f"directory: the files in {os.fspath(directory)!r} hold no step yet; let the job run longer")
    return Run(records, tuple(notes))


def _find(directory: Path) -> dict[int, Path]:
    if not directory.is_dir():
        raise ValueError(
            f"directory: {str(directory)!r} is not a directory; give the one that CROSSOVER_RECORDS named in the job"
        )
    found = [(match, path) for path in directory.glob("*.jsonl") if (match := _RANK.match(path.stem))]
    stems = sorted({match["stem"] for match, _ in found})
    if not stems:
        raise ValueError(
            f"directory: no *.rank0.jsonl in {str(directory)!r}; run the job with CROSSOVER_RECORDS={directory}"
        )
    if len(stems) > 1:
        raise ValueError(
            f"directory: {str(directory)!r} holds records named {', '.join(stems)}; give each run its own directory"
        )
    return dict(sorted((int(match["rank"]), path) for match, path in found))


def _read_all(paths: dict[int, Path]) -> dict[int, _File]:
    try:
        return {rank: _read(path) for rank, path in paths.items()}
    except OSError as error:
        raise ValueError(f"directory: cannot read {error.filename!r} ({error.strerror}); check its owner") from error


def _read(path: Path) -> _File:
    result = _File()
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                _take(result, json.loads(line))
            except (ValueError, KeyError, TypeError):
                result.damaged += 1
    return result


def _take(result: _File, values: dict[str, Any]) -> None:
    if values["kind"] == "run":
        result.runs += 1
        result.size = values["size"]
        result.records.clear()
    elif values["kind"] == "step":
        result.records.append(StepRecord.from_dict(values))
    else:
        raise ValueError("neither a run nor a step")
