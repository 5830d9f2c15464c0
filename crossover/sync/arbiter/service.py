"""The arbiter's own command line, used by jobs and by ``crossover arbiter``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from pathlib import Path

from .places import Place
from .policy import LEASE_S
from .server import IDLE_S, Server, log

MAX_LOG_BYTES = 1_000_000
BUSY = 75
"""Exit code: another arbiter serves this device."""


def _terminated(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def serve(place: Place, idle_s: float | None, least_lease_s: float = LEASE_S) -> int:
    """Be the arbiter of a device until it is idle or told to end; the exit code."""
    try:
        server = Server(place, idle_s, least_lease_s)
    except BlockingIOError as error:
        log(error.strerror or str(error))
        return BUSY
    signal.signal(signal.SIGTERM, _terminated)
    try:
        log(f"serving {place.name}, process {os.getpid()}")
        server.serve()
    except (SystemExit, KeyboardInterrupt):
        log(f"{place.name}: told to end")
    finally:
        server.close()
    return 0


def _become_daemon(place: Place) -> None:
    """Leave the job that started this process: its session, its children, its terminal, its directory."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    with contextlib.suppress(OSError):
        if place.log.stat().st_size > MAX_LOG_BYTES:
            place.log.unlink()
    nothing = os.open(os.devnull, os.O_RDWR)
    written = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for source, target in ((nothing, 0), (nothing, 1), (written, 2)):
        os.dup2(source, target)
    os.closerange(3, max(nothing, written) + 1)


def main(words: list[str] | None = None) -> int:
    """Parse the words, serve, and return the exit code."""
    parser = argparse.ArgumentParser(prog="crossover-arbiter")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds without jobs after which it ends; 0: never")
    parser.add_argument(
        "--lease", type=float, default=LEASE_S, help="least seconds that a holder may keep others waiting"
    )
    parser.add_argument("--daemon", action="store_true", help="leave the process that started it")
    options = parser.parse_args(words)
    place = Place(options.directory, options.host, options.device)
    if options.daemon:
        _become_daemon(place)
    return serve(place, options.idle or None, options.lease)
