"""Files that telemetry writes: one per rank, in whole lines, in JSON that every reader accepts."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def rank_path(path: str | os.PathLike[str], rank: int, default: str) -> Path:
    """Where ``rank`` writes: ``run.json`` becomes ``run.rank0.json``; in a directory, ``default`` is so renamed.

    A path without a suffix is a directory, whether it is there yet or not.
    """
    target = Path(path)
    if target.is_dir() or not target.suffix:
        target = target / default
    return target.with_name(f"{target.stem}.rank{rank}{target.suffix}")


def open_for_writing(path: Path, argument: str, *, append: bool) -> int:
    """A descriptor open for writing; missing directories are made.

    Raises:
        ValueError: the file cannot be written, with ``argument`` named.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise cannot_write(path, argument, error) from error


def cannot_write(path: str | os.PathLike[str], argument: str, error: OSError) -> ValueError:
    """The error for a path that a user gave as ``argument`` and that cannot be written."""
    return ValueError(
        f"{argument}: cannot write {os.fspath(path)!r} ({error.strerror or error}); "
        f"give a path in a directory that exists or can be made, that this user may write to, on a disk with room"
    )


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_first(descriptor: int, data: bytes, path: Path, argument: str) -> None:
    """Write a file's beginning, so that a disk that takes nothing shows at once.

    Raises:
        ValueError: it could not be written; the descriptor is closed.
    """
    try:
        write_all(descriptor, data)
    except OSError as error:
        os.close(descriptor)
        raise cannot_write(path, argument, error) from error


def to_json(value: Any) -> str:
    """One line of JSON. Numbers that JSON has no word for become strings; unknown objects become their ``str``."""
    try:
        return _ENCODER.encode(value)
    except (ValueError, TypeError):
        return _ENCODER.encode(_plain(value, depth=8))


_ENCODER = json.JSONEncoder(allow_nan=False, default=str, separators=(",", ":"))


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if depth and isinstance(value, dict):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [_plain(item, depth - 1) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
