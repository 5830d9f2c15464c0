"""Who holds which device, who waits, and what sharing gains: the arbiters of this machine asked and shown."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossover.sync.arbiter.messages import Report, Status
from crossover.sync.arbiter.protocol import ProtocolError, encode
from crossover.sync.forecast import JobProfile, forecast
from crossover.sync.link import ANSWER_S, await_answer

HEADER = ("job", "rank", "state", "queue", "share", "turn", "exposed", "waits", "weight", "class", "turns", "late")


@dataclass(frozen=True)
class Look:
    """One device at one time.

    Attributes:
        facts: what its arbiter reported.
        moment: when, seconds.
    """

    facts: Mapping[str, Any]
    moment: float

    @property
    def key(self) -> tuple[str, str]:
        """Host and device."""
        return str(self.facts["host"]), str(self.facts["device"])

    @property
    def jobs(self) -> list[Mapping[str, Any]]:
        """One entry a rank; whoever holds the turn first, then who waits, longest first."""
        order = {"holding": 0, "late": 1, "waiting": 2}
        return sorted(self.facts["jobs"], key=lambda job: (order.get(job["state"], 3), -float(job["state_s"])))


def look(directory: Path) -> list[Look]:
    """Ask every arbiter whose socket is in ``directory``; those that do not answer are left out."""
    looks = []
    for path in sorted(directory.glob("*.sock")):
        with contextlib.suppress(OSError, ProtocolError, ValueError):
            looks.append(_ask(path))
    return looks


def _ask(path: Path) -> Look:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
        connection.connect(str(path))
        connection.send(encode(Status()))
        answer = await_answer(connection, time.monotonic() + ANSWER_S)
    if not isinstance(answer, Report):
        raise ProtocolError(f"{path}: answers with {type(answer).__name__}")
    return Look(json.loads(answer.document), time.monotonic())


@dataclass(frozen=True)
class Gain:
    """Work done together over the work done by one job after the other.

    Attributes:
        predicted: by the forecast from the jobs' usual turns; ``None`` before they are known.
        achieved: between two looks; ``None`` after the first.
        reason: the forecast's sentence.
    """

    predicted: float | None
    achieved: float | None
    reason: str


def gain(now: Look, before: Look | None) -> Gain:
    """What sharing a device gains.

    Args:
        now: the present.
        before: an earlier look at the same device.
    """
    ranks = [job for job in now.jobs if job["turn_s"] and job["exposed_s"] is not None]
    if len(ranks) < 2:
        return Gain(None, None, "one job has the device to itself" if len(now.jobs) == 1 else "not known yet")
    profiles = [
        JobProfile(f"{job['job']} {job['rank']} {number}", job["turn_s"], job["exposed_s"], 0.0, job["peak_bytes"])
        for number, job in enumerate(ranks)
    ]
    result = forecast(profiles, capacity_bytes=now.facts["capacity_bytes"])
    achieved = None
    if before is not None and before.facts["boot"] == now.facts["boot"] and now.moment > before.moment:
        past = {(job["job"], job["rank"], job["pid"]): job["turns"] for job in before.jobs}
        done = [
            (job["turns"] - past.get((job["job"], job["rank"], job["pid"]), 0)) * (job["turn_s"] + job["exposed_s"])
            for job in ranks
        ]
        achieved = sum(done) / (now.moment - before.moment)
    return Gain(result.gain, achieved, result.reason)


def rows(now: Look, before: Look | None = None) -> list[tuple[str, ...]]:
    """The table's rows, as :data:`HEADER` names the columns. Shares are of the time between two looks."""
    past = {} if before is None else {(job["job"], job["rank"], job["pid"]): job for job in before.jobs}
    waiting = [id(job) for job in now.jobs if job["state"] == "waiting"]
    made = []
    for job in now.jobs:
        earlier = past.get((job["job"], job["rank"], job["pid"]))
        held, over = job["held_s"], job["present_s"]
        if before is not None and earlier is not None:
            held, over = held - earlier["held_s"], now.moment - before.moment
        made.append(
            (
                str(job["job"]),
                f"{job['rank']}/{job['size']}",
                str(job["state"]),
                str(waiting.index(id(job)) + 1) if id(job) in waiting else "",
                f"{min(held / over, 1.0):.0%}" if over > 0 else "",
                *(_milliseconds(job[name]) for name in ("turn_s", "exposed_s", "wait_s")),
                f"{job['weight']:g}",
                str(job["priority"]),
                str(job["turns"]),
                str(job["evictions"]),
            )
        )
    return made


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.1f} ms"


def headline(now: Look, before: Look | None = None) -> str:
    """A device's name and gain in one line."""
    found = gain(now, before)
    figures = [
        f"{name} {value:.2f}x"
        for name, value in (("predicted", found.predicted), ("achieved", found.achieved))
        if value is not None
    ]
    host, device = now.key
    return f"{host} {device}: {', '.join(['gain ' + figure for figure in figures] or [found.reason])}"


def show_plain(looks: Sequence[Look], before: Mapping[tuple[str, str], Look]) -> str:
    """Plain text, for files and pipes."""
    lines = []
    for one in looks:
        table = [HEADER, *rows(one, before.get(one.key))]
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
        lines.append(headline(one, before.get(one.key)))
        lines += ["  " + "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines) or "no arbiter is running here"


def show_live(directory: Path, every_s: float) -> None:
    """A table that keeps itself up to date until Ctrl-C."""
    from rich.console import Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def picture(looks: Sequence[Look], before: Mapping[tuple[str, str], Look]) -> Group:
        parts: list[Any] = [] if looks else [Text("no arbiter is running here")]
        for one in looks:
            table = Table(*HEADER, title=Text(headline(one, before.get(one.key))), title_justify="left", expand=False)
            for row in rows(one, before.get(one.key)):
                style = {"holding": "bold green", "waiting": "yellow", "late": "bold red"}.get(row[2], "")
                table.add_row(*(Text(cell) for cell in row), style=style)  # as text: a job's name is not ours
            parts.append(table)
        return Group(*parts)

    with Live(refresh_per_second=4, screen=False) as live, contextlib.suppress(KeyboardInterrupt):
        for looks, before in _watch(directory, every_s):
            live.update(picture(looks, before))


def _watch(directory: Path, every_s: float) -> Iterator[tuple[list[Look], dict[tuple[str, str], Look]]]:
    before: dict[tuple[str, str], Look] = {}
    while True:
        looks = look(directory)
        yield looks, before
        before = {one.key: one for one in looks}
        time.sleep(every_s)


def run(directory: Path, every_s: float, once: bool, as_json: bool) -> None:
    """What ``crossover top`` does.

    Args:
        directory: of the arbiters' sockets.
        every_s: seconds between two looks.
        once: two looks and out, as for a pipe.
        as_json: print what the arbiters report.
    """
    if as_json:
        print(json.dumps([dict(one.facts) for one in look(directory)], indent=2))
    elif once or not sys.stdout.isatty():
        first = {one.key: one for one in look(directory)}
        if first:
            time.sleep(every_s)
        print(show_plain(look(directory), first))
    else:
        show_live(directory, every_s)
