"""Whether the links carry what was asked for: TCP goodput of all hosts at once, both ways, as in a ring all-reduce."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import topology
from .errors import BandwidthError, TestbedError
from .rates import format_rate

if TYPE_CHECKING:
    from .bed import Testbed

TOLERANCE = 0.05
WARM_UP_SECONDS = 0.2
VERIFY_SECONDS = 0.6
ATTEMPTS = 6
PAUSE_SECONDS = 2.0
SECONDS_TO_END = 30.0
MESSAGE_BYTES = 1_000_000
CHECK_RATES = ("100mbit", "250mbit", "500mbit", "750mbit", "1gbit", "1.5gbit")
_SCRIPT = str(Path(__file__).with_name("traffic.py"))
_ports = itertools.count(20_000)


def measure(bed: Testbed, seconds: float = VERIFY_SECONDS) -> list[dict[str, Any]]:
    """Each host's received goodput on each link while every host sends to the next one, link by link.

    Returns one entry a link: ``asked`` and ``received`` (bit/s, one a host), ``worst`` (the relative error farthest
    from 0). Measured outside the hosts' share of the cores: it is the link that is asked about.
    """
    return [_measure_link(bed, link, asked, seconds) for link, asked in enumerate(bed.rates)]


def _measure_link(bed: Testbed, link: int, asked: int, seconds: float) -> dict[str, Any]:
    port = str(next(_ports))
    roles = []
    for host in range(bed.hosts):
        own, following = topology.address(host, link), topology.address((host + 1) % bed.hosts, link)
        roles.append((host, ["stream", own, following, port, str(WARM_UP_SECONDS), str(seconds)]))
    received = [float(text) for text in _run_roles(bed, roles)]
    errors = [rate / asked - 1 for rate in received]
    return {"link": link, "asked": asked, "received": received, "worst": max(errors, key=abs)}


def message_seconds(bed: Testbed, size: int = MESSAGE_BYTES, rounds: int = 9, pause: float = 0.03) -> float:
    """Median seconds of one message of ``size`` bytes from host 0 to host 1 over the idle link, with a short answer."""
    port, address = str(next(_ports)), topology.address(1)
    answer = (1, ["answer", address, port, str(size), str(rounds)])
    ask = (0, ["ask", address, port, str(size), str(rounds), str(pause)])
    return float(_run_roles(bed, [answer, ask])[1])


def _run_roles(bed: Testbed, roles: Sequence[tuple[int, list[str]]]) -> list[str]:
    commands = [bed.enter(host, [sys.executable, "-I", "-S", _SCRIPT, *words], shared=False) for host, words in roles]
    processes: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + SECONDS_TO_END
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        answers = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise TestbedError(f"measuring the links took more than {SECONDS_TO_END:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for (host, _), process, (_, stderr) in zip(roles, processes, answers, strict=True):
        if process.returncode != 0:
            raise TestbedError(f"measuring the links failed on {topology.hostname(host)}: {stderr.strip()[-500:]}")
    return [stdout.strip() for stdout, _ in answers]


def verify(bed: Testbed, seconds: float = VERIFY_SECONDS, tolerance: float = TOLERANCE) -> list[dict[str, Any]]:
    """:func:`measure` the links and accept only what is within ``tolerance`` of what was asked.

    Raises:
        BandwidthError: a link was off in all measurements, seconds apart; says which, and by how much.
    """
    measured: list[dict[str, Any]] = []
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_SECONDS if attempt else 0.0)
        measured = measure(bed, seconds)
        if all(abs(entry["worst"]) <= tolerance for entry in measured):
            return measured
    worst = max(measured, key=lambda entry: abs(entry["worst"]))
    received = ", ".join(format_rate(rate) for rate in worst["received"])
    raise BandwidthError(
        f"link {worst['link']} carries {received} (by host) where {format_rate(worst['asked'])} was asked: "
        f"{worst['worst']:+.1%}, allowed {tolerance:.0%}. Is something else running on these cores?"
    )


def check_rates(bed: Testbed, rates: Sequence[str | float], seconds: float) -> list[dict[str, Any]]:
    """Measure the first link at each rate: :func:`measure`'s entry, and the seconds of a 1 MB message when idle.

    The ideal message time is its payload at the asked rate; the token bucket makes it slightly less.
    """
    rows = []
    for rate in rates:
        bed.set_rate(rate)
        row = measure(bed, seconds)[0]
        row["message_s"] = message_seconds(bed)
        row["message_ideal_s"] = MESSAGE_BYTES * 8 / row["asked"]
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], tolerance: float = TOLERANCE) -> str:
    """The rows of :func:`check_rates` as text."""
    header = f"{'asked':>10} {'received, Mbit/s by host':>34} {'worst':>8} {'1 MB, ms':>9} {'ideal':>7}"
    lines = [f"{header}  within {tolerance:.0%}"]
    for row in rows:
        received = " ".join(f"{rate / 1e6:.1f}" for rate in row["received"])
        verdict = "yes" if abs(row["worst"]) <= tolerance else "NO"
        lines.append(
            f"{format_rate(row['asked']):>10} {received:>34} {row['worst']:>+8.1%} "
            f"{row['message_s'] * 1e3:>9.2f} {row['message_ideal_s'] * 1e3:>7.2f}  {verdict}"
        )
    return "\n".join(lines)
