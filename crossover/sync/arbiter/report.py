"""What the arbiter knows, for people: who holds, who waits, what sharing gains."""

from __future__ import annotations

from typing import Any

from .table import Seat, State, Table


def describe(table: Table, host: str, device: str, pids: dict[int, int], now: float) -> dict[str, Any]:
    """The table as a JSON object. Times in seconds; averages are moving ones and ``None`` before the first value."""
    return {
        "host": host,
        "device": device,
        "boot": table.boot,
        "epoch": table.epoch,
        "busy_s": table.busy_s,
        "capacity_bytes": table.capacity_bytes,
        "jobs": [_row(client, seat, pids.get(client, 0), now) for client, seat in table.seats.items()],
    }


def _row(client: int, seat: Seat, pid: int, now: float) -> dict[str, Any]:
    present = now - seat.since if seat.state is State.HOLDING else 0.0
    return {
        "job": seat.hello.job,
        "rank": seat.hello.rank,
        "size": seat.hello.size,
        "pid": pid,
        "state": seat.state.value,
        "state_s": now - seat.since,
        "weight": seat.claim.weight,
        "priority": seat.claim.priority,
        "held_s": seat.held_s + present,
        "waited_s": seat.waited_s,
        "present_s": now - seat.joined,
        "turns": seat.turns,
        "turn_s": seat.turn_s,
        "exposed_s": seat.gap_s,
        "wait_s": seat.wait_s,
        "evictions": seat.evictions,
        "peak_bytes": seat.peak_bytes,
    }
