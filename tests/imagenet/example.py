"""The modules of ``examples/imagenet``, which import each other as a script's neighbours do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "imagenet"


def _missing() -> str | None:
    """Why the example cannot be imported here, or ``None``."""
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a build for another torch fails in several ways, not all of them ImportError
        return f"torchvision is not importable here ({type(error).__name__}: {str(error)[:80]})"
    return None


MISSING = _missing()


class _Absent:
    """Stands for a module while tests are collected only to be skipped."""

    def __getattr__(self, name: str) -> Any:
        raise ModuleNotFoundError(MISSING)


def importable(name: str) -> ModuleType | Any:
    """A module of the example, or a stand-in where torchvision is missing."""
    if MISSING is not None:
        return _Absent()
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)
