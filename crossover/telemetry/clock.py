"""The offset between this process's clock and rank 0's, so that timelines of several ranks lie on one axis."""

from __future__ import annotations

import os
import platform
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossover.comm.communicator import Communicator

now_ns = time.perf_counter_ns
"""The clock of every timeline. On Linux it is CLOCK_MONOTONIC, which all processes of a host share."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What to add to this process's clock to get rank 0's.

    Attributes:
        offset_ns: nanoseconds to add.
        error_ns: the true offset differs by at most this much; ``None`` if nothing is known.
        method: ``"same clock"``, ``"exchange"`` or ``"not aligned"``.
    """

    offset_ns: int = 0
    error_ns: int | None = None
    method: str = "not aligned"


NOT_ALIGNED = ClockOffset()


def clock_identity() -> str:
    """Equal in two processes if they read the same clock: same boot of the same kernel, same time namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{platform.node()} {uuid.getnode()}"


def align_clock(communicator: Communicator, rounds: int = 10) -> ClockOffset:
    """Find this rank's offset to the clock of group rank 0.

    Collective: every rank calls it, with the same ``rounds``. Exact where a rank runs on rank 0's host. Elsewhere each
    round asks rank 0 for the time and so bounds the offset from both sides, since rank 0 read its clock after the
    question left and before the reply arrived. The rounds' bounds, and those of ranks sharing a host, are intersected:
    the result is at least as narrow as the smallest round trip, and half of what remains is ``error_ns``.

    Args:
        communicator: the ranks to align.
        rounds: exchanges, at least 1.

    Raises:
        ValueError: ``rounds`` is below 1.
        CommunicationError: a rank failed or did not answer within the communicator's time-out.
    """
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds!r}, must be at least 1; the default of 10 takes a few milliseconds")
    identity = clock_identity()
    clocks = communicator.all_gather_object(identity, name="clock.identity")
    if all(clock == clocks[0] for clock in clocks):
        return ClockOffset(0, 0, "same clock")
    bounds = communicator.all_gather_object(_bounds(communicator, rounds), name="clock.bounds")
    if identity == clocks[0]:
        return ClockOffset(0, 0, "same clock")
    mine = [bound for bound, clock in zip(bounds, clocks, strict=True) if clock == identity]
    low, high = max(bound[0] for bound in mine), min(bound[1] for bound in mine)
    return ClockOffset((low + high) // 2, (abs(high - low) + 1) // 2, "exchange")


def _bounds(communicator: Communicator, rounds: int) -> tuple[int, int]:
    """The tightest (low, high) between which rank 0's clock minus this one must lie, in nanoseconds."""
    import torch

    device = communicator.control_device
    lows, highs = [], []
    for _ in range(rounds):
        communicator.barrier(name="clock.ready")  # a late rank would stretch everyone's round trip
        asked = now_ns()
        question = torch.zeros(1, dtype=torch.int64, device=device)
        communicator.all_reduce(question, name="clock.question").wait()
        question.item()  # on a GPU only this makes the host wait: rank 0 must not read its clock before all have asked
        answer = torch.tensor([now_ns()], dtype=torch.int64, device=device)
        communicator.broadcast(answer, 0, name="clock.answer").wait()
        there = int(answer.item())
        answered = now_ns()
        lows.append(there - answered)
        highs.append(there - asked)
    return max(lows), min(highs)
