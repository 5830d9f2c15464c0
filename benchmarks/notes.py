"""Tables, and the dated notes in ``benchmarks/results/`` that say on what and how they were measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(_pad(row, widths)) + " |" for row in cells]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]])


def _pad(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if n == 0 else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def machine() -> dict[str, str]:
    """What a reader needs to judge the figures."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("horovod", "torchvision", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cores": str(os.cpu_count()), "processor": _processor(), "memory": f"{memory:.0f} GiB", **versions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def save(name: str, title: str, sections: Sequence[str], data: Any) -> Path:
    """Write ``results/DATE-name.md`` and ``.json``.

    Args:
        name: of the benchmark, for the file name.
        title: the question that was measured.
        sections: Markdown: tables, and what they show.
        data: what the tables were made from.

    Returns:
        Path of the note.
    """
    RESULTS.mkdir(exist_ok=True)
    today = datetime.date.today().isoformat()
    facts = ", ".join(f"{key} {value}" for key, value in machine().items())
    command = "python -m " + " ".join([f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    note = RESULTS / f"{today}-{name}.md"
    note.write_text("\n\n".join([f"# {title}", f"{today}. {facts}.", f"    {command}", *sections]) + "\n")
    note.with_suffix(".json").write_text(
        json.dumps({"machine": machine(), "command": command, "data": data}, indent=1) + "\n"
    )
    return note
