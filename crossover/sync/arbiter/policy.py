"""Who is next: weighted fair queueing by the time that jobs held the device. Pure functions, no clock of their own.

The currency is *virtual time*: seconds that a job held the device, divided by its weight. The waiting job with the
least goes first, so over time each job that keeps asking holds the device in proportion to its weight. Turns are not
interrupted: the longest wait is one turn of each other job.

Source: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) is the model; classes with ageing, the bound on
arrears and the patience below are ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

AGEING_TURNS = 8
"""A waiting job of a lower class goes first once this many turns were granted past it."""

ARREARS_S = 1.0
"""How much virtual time a job that asked for less than its share may catch up later."""

PATIENCE_S = 0.002
PATIENCE_SHARE = 0.1
"""For how long at most the device may stand still for a job that is due and about to ask again: this many seconds, and
this share of its usual turn. Without it a job that asks again at once would lose every second turn to whoever waits,
whatever its weight."""

LEASE_S = 5.0
LEASE_TURNS = 10.0
"""A holder that others wait for keeps the device for this long at least, or this many of its usual turns."""

SMOOTHING = 0.2


@dataclass(slots=True)
class Claim:
    """What one job has had, and what it is owed.

    Attributes:
        job: its name.
        rank: which of its ranks this is.
        weight: its share against others.
        priority: its class; a higher one goes first.
        virtual_s: seconds held, divided by the weight.
        passed_over: turns granted to others of a higher class while this one waited.
    """

    job: str
    rank: int = 0
    weight: float = 1.0
    priority: int = 0
    virtual_s: float = 0.0
    passed_over: int = 0


def order(claim: Claim) -> tuple[bool, int, float, str, int]:
    """The sort key of a waiting claim; the least goes first. The same on every node for the same claims.

    Example:
        >>> urgent, usual = Claim("a", priority=1, virtual_s=9.0), Claim("b")
        >>> order(urgent) < order(usual)
        True
        >>> order(urgent) < order(Claim("b", passed_over=AGEING_TURNS))
        False
    """
    aged = claim.passed_over >= AGEING_TURNS
    return (not aged, 0 if aged else -claim.priority, claim.virtual_s, claim.job, claim.rank)


def choose(waiting: Iterable[Claim]) -> Claim:
    """The claim that is served next.

    Raises:
        ValueError: nobody waits.
    """
    return min(waiting, key=order)


def serve(chosen: Claim, waiting: Iterable[Claim]) -> None:
    """Note that ``chosen`` gets the turn for which all of ``waiting`` asked."""
    chosen.passed_over = 0
    for claim in waiting:
        if claim is not chosen and claim.priority < chosen.priority:
            claim.passed_over += 1


def charge(claim: Claim, held_s: float) -> None:
    """Book ``held_s`` seconds of the device."""
    claim.virtual_s += held_s / claim.weight


def admit(claim: Claim, competing: Iterable[Claim], returning: bool) -> None:
    """Place a claim that starts to wait among those that compete for the device.

    A newcomer, and a job that comes back from a pause, starts level with the one that had least: it cannot claim for
    the time of its absence. A job that merely waited for its network keeps its arrears, within bounds.

    Example:
        >>> late = Claim("late")
        >>> admit(late, [Claim("a", virtual_s=40.0), Claim("b", virtual_s=42.0)], returning=True)
        >>> late.virtual_s
        40.0
    """
    level = min((other.virtual_s for other in competing if other is not claim), default=None)
    if level is not None:
        claim.virtual_s = max(claim.virtual_s, level if returning else level - ARREARS_S)


def patience_s(usual_turn_s: float | None, usual_gap_s: float | None) -> float:
    """How long to keep the device free for a job that is due and usually asks again after ``usual_gap_s``.

    Returns:
        Seconds; 0 where it is not worth waiting, or nothing is known yet.

    Example:
        >>> patience_s(usual_turn_s=0.1, usual_gap_s=0.0001), patience_s(usual_turn_s=0.1, usual_gap_s=0.05)
        (0.002, 0.0)
    """
    if usual_turn_s is None or usual_gap_s is None:
        return 0.0
    limit = min(PATIENCE_S, PATIENCE_SHARE * usual_turn_s)
    return limit if usual_gap_s <= limit else 0.0


def lease_s(usual_turn_s: float | None, least_s: float = LEASE_S) -> float:
    """How long a holder may keep others waiting before they are served regardless."""
    return max(least_s, LEASE_TURNS * (usual_turn_s or 0.0))


def smoothed(average: float | None, value: float) -> float:
    """The moving average after one more value."""
    return value if average is None else average + SMOOTHING * (value - average)
