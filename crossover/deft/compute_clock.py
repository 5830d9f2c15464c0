"""Moments of a device's computing, and the time between them: events on a GPU, the clock on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class ComputeClock:
    """Marks moments without waiting for the device; only what lies between them may wait, for the later one.

    Args:
        on_gpu: whether events on the current stream are the marks.

    Example:
        >>> clock = ComputeClock(on_gpu=False)
        >>> clock.between_us(clock.mark(), clock.mark()) >= 0
        True
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def mark(self) -> Any:
        """This moment in the order of what has been launched."""
        if not self._on_gpu:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_us(self, start: Any, end: Any) -> float:
        """Microseconds from one mark to a later one."""
        if not self._on_gpu:
            return float(end - start) * 1e-3
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3
