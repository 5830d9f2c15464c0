"""Each test has a directory for sockets of its own, and ends every arbiter that was started in it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sync.arbiters import process_of


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """``CROSSOVER_RUN_DIR``; short, as a socket's path has to be."""
    with tempfile.TemporaryDirectory(prefix="xo-", dir="/tmp") as folder:
        monkeypatch.setenv("CROSSOVER_RUN_DIR", folder)
        monkeypatch.setenv("CROSSOVER_HOST", "here")
        yield Path(folder)
        for lock in Path(folder).glob("*.lock"):
            end(lock)


def end(lock: Path) -> None:
    deadline = time.monotonic() + 10
    while (pid := process_of(lock)) is not None and time.monotonic() < deadline:
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
