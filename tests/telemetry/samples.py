"""Records with figures that are easy to add up by hand."""

from __future__ import annotations

from typing import Any

from crossover.telemetry import StepRecord


def record(step: int = 0, rank: int = 0, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "start_s": 100.0 + step,
        "wall_s": 1_000_000.0 + step,
        "step_s": 0.010 if step else None,
        "synchronised": True,
        "reason": "every step",
        "bytes_sent": 1000,
        "collectives": 2,
        "communication_s": 0.004,
        "exposed_s": 0.001,
        "hidden_s": 0.003,
        "extra": {},
    }
    return StepRecord(**{**values, **changes})
