"""Link rates, and the token bucket settings that give them. Pure functions.

A rate is always *goodput*: the payload bits a second that one TCP connection delivers. The shaper counts whole Ethernet
frames, so it is set to :func:`wire_rate`, which is 4.6 % more at an MTU of 1500.
"""

from __future__ import annotations

import re

MTU = 1500
ETHERNET_HEADER = 14
IP_TCP_HEADERS = 20 + 32
"""Bytes of IPv4 and TCP headers in a frame: TCP carries the time-stamp option, as Linux does by default."""

GSO_BYTES = 16 * 1024
"""Largest chunk that a host's TCP hands to the link in one go; the shaper lets a chunk pass as a whole."""

_UNITS = {"": 1, "bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_rate(rate: str | float) -> int:
    """Bits a second of ``"500mbit"``, ``"1.5gbit"``, ``"800kbit"`` or a plain number of bit/s.

    Raises:
        ValueError: not a rate, or outside 1 Mbit/s to 10 Gbit/s.

    Example:
        >>> parse_rate("1.5gbit")
        1500000000
    """
    match = _RATE.fullmatch(str(rate).strip().lower()) if isinstance(rate, str) else None
    if isinstance(rate, str) and (match is None or match[2] not in _UNITS):
        raise ValueError(f"rate: got {rate!r}; give a number with one of kbit, mbit, gbit, for example '500mbit'")
    bits = float(match[1]) * _UNITS[match[2]] if match else float(rate)
    if not 10**6 <= bits <= 10**10:
        raise ValueError(f"rate: got {rate!r} = {bits:g} bit/s; the testbed's links go from 1mbit to 10gbit")
    return round(bits)


def format_rate(bits: float) -> str:
    """A rate for people and for :func:`parse_rate`: ``"500mbit"``, ``"1.5gbit"``."""
    return f"{bits / 1e9:.6g}gbit" if bits >= 1e9 else f"{bits / 1e6:.6g}mbit"


def wire_rate(rate: int) -> int:
    """Bits a second, Ethernet frames counted whole, at which TCP's payload flows at ``rate``."""
    return round(rate * (MTU + ETHERNET_HEADER) / (MTU - IP_TCP_HEADERS))


def burst_bytes(rate: int) -> int:
    """Size of the token bucket: what an idle link lets through at once.

    Two chunks, so that a chunk leaves while the next one's tokens gather, and at least 200 us of link time, so that a
    timer that fires late loses no tokens. A 1 MB message on an idle link is at most 3 % early through it.
    """
    return max(2 * GSO_BYTES, wire_rate(rate) // 8 * 200 // 1_000_000)


def queue_bytes(rate: int) -> int:
    """Bytes that wait in front of the shaper before it drops: 50 ms of link time, at least 512 KiB."""
    return max(512 * 1024, wire_rate(rate) // 8 * 50 // 1000)


def shaper(rate: int) -> str:
    """``tc``'s words for a token bucket that gives ``rate``."""
    return f"tbf rate {wire_rate(rate)}bit burst {burst_bytes(rate)} limit {queue_bytes(rate)}"
