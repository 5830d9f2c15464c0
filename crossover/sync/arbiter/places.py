"""Where the arbiter of a device is found: a socket in a directory that others cannot meddle with."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DIRECTORY_VARIABLE = "CROSSOVER_RUN_DIR"
LONGEST_SOCKET_PATH = (
    100  # the kernel's limit is 107 bytes, and a moment before a name a few characters longer is bound
)
LONGEST_NAME = 48


@dataclass(frozen=True)
class Place:
    """The files of one device's arbiter.

    Attributes:
        directory: for sockets; see :func:`directory`.
        host: the machine, as jobs on it call it.
        device: a UUID, or the name of a CPU slot.
    """

    directory: Path
    host: str
    device: str

    @property
    def name(self) -> str:
        """File name without an ending: readable, and different for different hosts and devices."""
        readable = f"{_plain(self.host)}.{_plain(self.device)}"
        exact = f"{self.host}\0{self.device}"
        if readable == f"{self.host}.{self.device}" and len(readable) <= LONGEST_NAME and "." not in self.device:
            return readable
        return f"{readable[: LONGEST_NAME - 17]}-{hashlib.sha256(exact.encode()).hexdigest()[:16]}"

    @property
    def socket(self) -> Path:
        """Where to connect."""
        path = self.directory / f"{self.name}.sock"
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
            raise ValueError(
                f"{DIRECTORY_VARIABLE}: {self.directory} makes the socket's path too long; use a short one"
            )
        return path

    @property
    def lock(self) -> Path:
        """Held by the one arbiter that may bind the socket."""
        return self.directory / f"{self.name}.lock"

    @property
    def log(self) -> Path:
        """What the arbiter has to tell."""
        return self.directory / f"{self.name}.log"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text) or "-"


def directory(environ: Mapping[str, str]) -> Path:
    """The directory for sockets, made if need be.

    ``CROSSOVER_RUN_DIR`` if set: for jobs of several users, a directory with a group and mode 2770. Else one of this
    user's own: in ``XDG_RUNTIME_DIR`` or ``/run/user``, whichever way the job was started, or else below ``/tmp``.

    Raises:
        ValueError: somebody else could put a socket of theirs there.
    """
    chosen = environ.get(DIRECTORY_VARIABLE)
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if chosen:
        path = Path(chosen)
    elif os.access(runtime, os.W_OK):
        path = runtime / "crossover"
    else:
        path = Path("/tmp") / f"crossover-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise ValueError(f"{DIRECTORY_VARIABLE}: {path} cannot be used: {error}; name another directory") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise ValueError(f"{DIRECTORY_VARIABLE}: {path} is no directory; name another one")
    if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & stat.S_IWOTH:
        raise ValueError(
            f"{DIRECTORY_VARIABLE}: {path} belongs to user {facts.st_uid} with mode {facts.st_mode & 0o7777:o}, so "
            "others could pose as the arbiter; use one of your own (mode 700), or root's with a group (mode 2770)"
        )
    return path


def is_shared(path: Path) -> bool:
    """Whether a group besides the owner uses the directory."""
    return bool(path.stat().st_mode & stat.S_IWGRP)
