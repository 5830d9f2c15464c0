"""This rank's own gradients of one step, and their squared norm, taken while they are in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from crossover.selsync.significance import squared_norm

WORTH_A_CALL_BYTES = 256 * 1024  # a call for a gradient by itself costs about as much as reading so much from memory


class LocalGradients(Sequence[Tensor]):
    """The gradients that ``step()`` is about to apply: local, scaled by a ``GradScaler`` if there is one, unclipped.

    Args:
        gradients: the tensors.
        partial: sums of squares that are known, by ``id`` of the tensor they belong to.
    """

    def __init__(self, gradients: Iterable[Tensor], partial: dict[int, Tensor] | None = None) -> None:
        self._gradients = list(gradients)
        self._partial = partial or {}
        self._squared_norm: Tensor | None = None

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        """One or some of the gradients."""
        return self._gradients[index]

    def __len__(self) -> int:
        """How many parameters have a gradient."""
        return len(self._gradients)

    def __iter__(self) -> Iterator[Tensor]:
        """The gradients one by one."""
        return iter(self._gradients)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """As :func:`crossover.selsync.squared_norm` of all; computed once."""
        if self._squared_norm is None:
            known = [self._partial[id(gradient)] for gradient in self._gradients if id(gradient) in self._partial]
            total = squared_norm([gradient for gradient in self._gradients if id(gradient) not in self._partial])
            self._squared_norm = total + torch.stack(known).sum() if known else total
        return self._squared_norm


class Observation:
    """Sums of squares of gradients as they arrive, where reading them again later would be dear: large, on the CPU.

    On other devices one fused pass at the end is cheaper.

    Args:
        wanted: asked once a pass whether the norm will be.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._ask = wanted
        self._wanted: bool | None = None
        self._partial: dict[int, tuple[Tensor, Tensor]] = {}
        self._refused: set[int] = set()

    @staticmethod
    def worthwhile(parameter: Tensor) -> bool:
        """Whether the gradient of ``parameter`` is better read at once."""
        large = parameter.numel() * parameter.element_size() >= WORTH_A_CALL_BYTES
        return large and parameter.device.type == "cpu" and not parameter.is_complex()

    def arrived(self, parameter: Tensor) -> None:
        """``parameter.grad`` has its value, unless this is called a second time in the same pass."""
        if self._wanted is None:
            self._wanted = self._ask()
        gradient = parameter.grad
        if not self._wanted or gradient is None or gradient.layout is not torch.strided:
            return
        if id(parameter) in self._partial or id(parameter) in self._refused:
            self._partial.pop(id(parameter), None)
            self._refused.add(id(parameter))
        else:
            self._partial[id(parameter)] = (gradient, squared_norm([gradient]))

    def clear(self) -> None:
        """Expect every gradient anew."""
        self._wanted = None
        self._partial.clear()
        self._refused.clear()

    def gradients_of(self, parameters: Iterable[Tensor]) -> LocalGradients:
        """The gradients that ``parameters`` have now."""
        present = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return LocalGradients(present, {id(gradient): squares for gradient, squares in self._partial.values()})
