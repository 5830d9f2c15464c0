"""Moments of a device's computing, and the time between them: events on a GPU, the clock on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class ComputeClock:
    """Marks moments without waiting for the device; only what lies between them may wait, for the later one.

    Args:
        device: whose computing is timed; on a GPU by events on its current stream.

    Example:
        >>> clock = ComputeClock(torch.device("cpu"))
        >>> clock.between_us(clock.mark(), clock.mark()) >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """This moment in the order of what has been launched."""
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))  # another thread's current device may be another
        return event

    def between_us(self, start: Any, end: Any) -> float:
        """Microseconds from one mark to a later one."""
        if not self._on_gpu:
            return float(end - start) * 1e-3
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
