"""The backward passes that one ``step()`` consumes, and which of them is shared with other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Witness:
    """A gradient as a backward pass left it, by which it is noticed that gradients were cleared since.

    Attributes:
        parameter: whose gradient it is; not likely to be the first of the next pass.
        gradient: the tensor.
        version: how often that was written to.
    """

    parameter: Tensor
    gradient: Tensor
    version: int

    @classmethod
    def of(cls, parameter: Tensor) -> Witness | None:
        """The gradient of ``parameter`` as it is now; ``None`` where its version would tell nothing."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return None
        return cls(parameter, gradient, gradient._version)

    @property
    def untouched(self) -> bool:
        """Whether it is still there as it was."""
        return self.parameter.grad is self.gradient and self.gradient._version == self.version

    def cleared(self, arrived: Tensor) -> bool:
        """Whether it was cleared. ``arrived`` is the parameter that has just been given a gradient."""
        changed = self.parameter is not arrived and self.gradient._version != self.version
        return self.parameter.grad is not self.gradient or (changed and not bool(self.gradient.any()))


class Window:
    """Counts the backward passes since the last one that was shared.

    Attributes:
        length: passes after which gradients are shared.
        passes: those that were not shared.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.passes = 0
        self._local_depth = 0
        self._witness: Witness | None = None

    @property
    def closing(self) -> bool:
        """Whether a pass that begins now is to be shared."""
        return not self._local_depth and self.passes + 1 >= self.length

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Passes inside are not shared, however many there are."""
        self._local_depth += 1
        try:
            yield
        finally:
            self._local_depth -= 1

    def add(self, witness: Witness | None) -> None:
        """A pass ended that was not shared."""
        self.passes += 1
        self._witness = witness

    def clear(self) -> None:
        """Begin anew: what was accumulated has been shared or dropped."""
        self.passes = 0
        self._witness = None

    def notice_cleared(self, arrived: Tensor) -> None:
        """Begin anew if gradients were cleared: ``model.zero_grad()`` tells nobody, but leaves other tensors or zeros.

        Args:
            arrived: the parameter whose gradient is the first of a new pass.
        """
        if self.passes and self._witness is not None and self._witness.cleared(arrived):
            self.clear()
