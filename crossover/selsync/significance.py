"""The statistic behind SelSync's vote, on the device: squared norm of the gradient, smoothed, and its relative change.

The rule is that of :mod:`crossover.selsync.smoothing`, which says what is the paper's and what is our choice. Here it
is in the form that a training step can afford: :func:`squared_norm` reads the gradients once, in fused operations, and
:class:`TensorSignificanceTracker` follows the rule without ever waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.selsync.smoothing import (
    DEFAULT_FACTOR,
    DEFAULT_WARMUP_STEPS,
    SignificanceTracker,
    Smoothing,
    check_delta,
    is_significant,
    paper_factor,
    relative_change,
    votes_needed,
)

__all__ = [
    "DEFAULT_FACTOR",
    "DEFAULT_WARMUP_STEPS",
    "SignificanceTracker",
    "TensorSignificanceTracker",
    "is_significant",
    "paper_factor",
    "relative_change",
    "squared_norm",
    "votes_needed",
]

# On a CPU torch adds up the squares of one tensor in a few float32 sums: over tens of millions of elements these grow
# so large that small squares no longer count (0.6 % were missing at 40 million). Shorter pieces keep the error below
# 1e-4.
CPU_PIECE = 1 << 18


@torch.no_grad()
def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The squared L2 norm over all of ``gradients``, in one pass and without waiting for the device.

    Sums in float32, so that half precision neither overflows nor rounds, and in float64 as soon as one gradient is
    float64. Complex numbers count with both parts. Sparse gradients are coalesced first (on a GPU that, and only that,
    makes the host wait). Give local, unscaled, unclipped gradients; flat buckets do as well as single tensors.

    Args:
        gradients: tensors of any shapes, dtypes, layouts and devices; may be empty.

    Returns:
        A tensor without dimensions, float32 or float64, on the gradients' device (on the first accelerator where they
        lie on several devices). Zero for no elements; infinite or NaN where a gradient is, or where the sum overflows.

    Example:
        >>> squared_norm([torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.float16)])
        tensor(25.)
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = _real_values(gradient)
        if values.numel():
            groups.setdefault((values.device, values.dtype), []).extend(_pieces(values))
    if not groups:
        return torch.zeros((), dtype=torch.float32, device=gradients[0].device if gradients else None)
    double = any(dtype is torch.float64 for _, dtype in groups)
    partial = [_sum_of_squares(tensors, torch.float64 if double else torch.float32) for tensors in groups.values()]
    partial.sort(key=lambda tensor: tensor.device.type == "cpu")
    total = partial[0]
    for other in partial[1:]:
        total = total + other.to(total.device)
    return total


def _real_values(gradient: Tensor) -> Tensor:
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce().values()
    elif gradient.layout is not torch.strided:
        gradient = gradient.values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.device.type != "cpu" or tensor.numel() <= CPU_PIECE:
        return [tensor]
    axis = 0
    if tensor.is_contiguous():
        tensor, rows = tensor.view(-1), CPU_PIECE
    else:
        # Cut along the outermost axis in memory, so that each piece is read in order.
        axis = max((axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1), key=tensor.stride)
        rows = max(tensor.shape[axis] * CPU_PIECE // tensor.numel(), 1)
    return list(torch.split(tensor, rows, dim=axis))


def _sum_of_squares(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square_().sum()


class TensorSignificanceTracker(Smoothing):
    """:class:`SignificanceTracker` on tensors: an update is a small, fixed number of tiny operations, without any wait.

    State is float64 and lives where the last squared norm lived. In the recursive form all numbers equal those of the
    float form bit for bit; with a window they differ in the last digits, as the order of the sum does.

    Local: each rank follows its own gradient. Only what is voted on may steer collectives.

    Args:
        factor: as in :class:`SignificanceTracker`.
        window: as in :class:`SignificanceTracker`.
        warmup_steps: as in :class:`SignificanceTracker`.

    Raises:
        ValueError: a setting is out of its range.

    Example:
        >>> tracker = TensorSignificanceTracker(factor=0.5, warmup_steps=2)
        >>> for gradient in (torch.tensor([2.0]), torch.tensor([4.0])):
        ...     tracker.update(squared_norm([gradient]))
        >>> tracker.vote(delta=0.3), tracker.value()
        (tensor([1], dtype=torch.int32), 1.5)
    """

    def __init__(
        self, factor: float = DEFAULT_FACTOR, *, window: int | None = None, warmup_steps: int | None = None
    ) -> None:
        super().__init__(factor, window=window, warmup_steps=warmup_steps)
        self._place(torch.device("cpu"), 0.0, 0, [])

    @property
    def significance(self) -> Tensor:
        """Of the last sample: float64 without dimensions, NaN where unknown. The next update overwrites it."""
        return self._significance

    @property
    def smoothed(self) -> Tensor:
        """The average: float64 without dimensions, 0 before the first sample. The next update overwrites it."""
        return self._smoothed

    @torch.no_grad()
    def update(self, sample: Tensor) -> None:
        """Take one step's squared norm: one element, not negative, as :func:`squared_norm` gives it."""
        if sample.device != self._smoothed.device:
            self._place(sample.device, *self.checked(self.state_dict()))
        sample = sample.reshape(()).to(torch.float64)
        finite = sample < math.inf
        smoothed = self._smooth(sample, finite)
        change = (smoothed - self._smoothed).abs_().div_(self._smoothed)
        self._seen.add_(finite)
        known = (change < math.inf).logical_and_(finite).logical_and_(self._seen >= self.warmup_steps)
        torch.where(known, change, self._unknown, out=self._significance)
        torch.where(finite, smoothed, self._smoothed, out=self._smoothed)

    def vote(self, delta: float) -> Tensor:
        """This rank's vote on the last sample: a new int32 tensor of one element, 1 to share, on the state's device.

        Raises:
            ValueError: ``delta`` is negative or NaN.
        """
        check_delta(delta)
        return torch.where(self._significance < delta, self._no, self._yes)

    def value(self) -> float | None:
        """The significance as a float, ``None`` where unknown. Waits for the device: for records, after the vote."""
        value = float(self._significance.item())
        return None if math.isnan(value) else value

    def state_dict(self) -> dict[str, Any]:
        """As that of :class:`SignificanceTracker`. Waits for the device; never communicates."""
        seen = int(self._seen.item())
        samples = self._samples.tolist()[: min(seen, self.window or 0)]
        return {"smoothed": float(self._smoothed.item()), "seen": seen, "samples": samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` of either form returned.

        Raises:
            ValueError: ``state`` is not such a dictionary, or lacks samples that this window needs.
        """
        self._place(self._smoothed.device, *self.checked(state))

    def _smooth(self, sample: Tensor, finite: Tensor) -> Tensor:
        if self.window is None:
            moved = (sample - self._smoothed).mul_(self.factor).add_(self._smoothed)
            return torch.where(self._smoothed > 0, moved, sample)
        shifted = torch.cat([sample.reshape(1), self._samples[:-1]])
        torch.where(finite, shifted, self._samples, out=self._samples)
        divisor = self._weight_sums.take(self._seen.clamp(max=self.window - 1))
        return (self._samples * self._weights).sum().div_(divisor)

    def _place(self, device: torch.device, smoothed: float, seen: int, samples: list[float]) -> None:
        def double(values: float | list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        self._smoothed = double(smoothed)
        self._significance = double(math.nan)
        self._unknown = double(math.nan)
        self._samples = double(samples + [0.0] * ((self.window or 0) - len(samples)))
        self._weights = double(self.weights())
        self._weight_sums = self._weights.cumsum(0)
        self._seen = torch.tensor(seen, dtype=torch.int64, device=device)
        self._no = torch.zeros(1, dtype=torch.int32, device=device)
        self._yes = torch.ones(1, dtype=torch.int32, device=device)
