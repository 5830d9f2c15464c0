"""Timing real training steps: when forward and backward begin and end, and when each bucket's gradients are ready."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from crossover.autograd import NO_TASK, current_task
from crossover.buckets import Bucket
from crossover.deft.compute_clock import ComputeClock
from crossover.deft.profile import medians


class StepTimer:
    """Watches steps between :meth:`start` and :meth:`stop`; buckets are numbered as they become ready.

    On the CPU it looks at the clock. On a GPU it records events, which are read when the measurement is over, so that
    nothing is synchronised while training runs.

    Args:
        buckets: those to watch.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._count = len(buckets)
        self._clock = ComputeClock(buckets[0].device if buckets else torch.device("cpu"))
        self._process = os.getpid()
        self._owner = {id(slot.parameter): bucket.index for bucket in buckets for slot in bucket.slots}
        self._handles: list[RemovableHandle] = []
        self._steps: list[_Marks] = []
        self._marks: _Marks | None = None

    @property
    def running(self) -> bool:
        """Whether steps are being watched."""
        return bool(self._handles)

    @property
    def steps(self) -> int:
        """Steps that have been watched from end to end."""
        return len(self._steps)

    def start(self) -> None:
        """Begin with the next step."""
        self.stop()
        # On all modules: no model has to be given.
        self._handles = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module),
        ]

    def stop(self) -> None:
        """Watch no more, and forget what was seen: it says nothing of buckets that are cut since."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._steps.clear()
        self._marks = None

    def step_begins(self) -> None:
        """The backward pass of the step before has ended, its waits included."""
        if self.running:
            self._marks = _Marks(self._count, self._clock.mark())

    def bucket_ready(self, index: int) -> None:
        """The gradients of a bucket are there."""
        if self._marks is not None:
            self._marks.ready[index] = self._clock.mark()

    def backward_ended(self) -> None:
        """The backward pass is over; waits follow."""
        marks, self._marks = self._marks, None
        if marks is not None and marks.forward_end is not None and all(mark is not None for mark in marks.ready):
            marks.backward_end = self._clock.mark()
            self._steps.append(marks)

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        marks = self._marks
        if marks is None or not self._in_forward():
            return
        if marks.forward_start is None:
            if not any(id(parameter) in self._owner for parameter in module.parameters()):
                return  # a transform of the data
            marks.forward_start = self._clock.mark()
        for parameter in module._parameters.values():
            index = self._owner.get(id(parameter))
            if index is not None and marks.used[index] is None:
                marks.used[index] = self._clock.mark()

    def _after_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._marks is not None and self._marks.forward_start is not None and self._in_forward():
            self._marks.forward_end = self._clock.mark()

    def _in_forward(self) -> bool:
        """Not in an evaluation, nor within backward, nor in a forked worker, which inherits hooks and has no device."""
        if torch.compiler.is_compiling():
            return False
        return torch.is_grad_enabled() and current_task() == NO_TASK and os.getpid() == self._process

    def result(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Medians over the steps, microseconds: forward and backward of each bucket, input side first, and between.

        Raises:
            ValueError: no step was seen from end to end.
        """
        if not self._steps:
            raise ValueError(
                "profile: no step could be timed; call the model's modules in forward, and measure more than one step"
            )
        forward = medians([self._forward(marks) for marks in self._steps])
        backward = medians([self._backward(marks) for marks in self._steps])
        between = medians([[self._clock.between_us(marks.start, marks.forward_start)] for marks in self._steps])[0]
        return forward, backward, between

    def _forward(self, marks: _Marks) -> list[float]:
        """Each bucket's share lasts until the next one's first module begins."""
        ends = marks.forward_end
        shares = []
        for index in range(self._count):  # the output side first, as buckets are numbered
            begins = marks.used[index]
            if begins is None:  # used without calling the module that owns it
                shares.append(0.0)
                continue
            shares.append(max(self._clock.between_us(begins, ends), 0.0))
            ends = begins if shares[-1] else ends
        shares[-1] += max(self._clock.between_us(marks.forward_start, ends), 0.0)
        return shares[::-1]

    def _backward(self, marks: _Marks) -> list[float]:
        times = [marks.forward_end, *marks.ready]
        shares = [max(self._clock.between_us(times[n], times[n + 1]), 0.0) for n in range(self._count)]
        shares[-1] += max(self._clock.between_us(times[-1], marks.backward_end), 0.0)
        return shares[::-1]


class _Marks:
    """The moments of one step."""

    def __init__(self, count: int, start: Any) -> None:
        self.start = start
        self.forward_start: Any = None
        self.used: list[Any] = [None] * count
        self.forward_end: Any = None
        self.ready: list[Any] = [None] * count
        self.backward_end: Any = None
