"""The recipe: learning rate, which parameters decay, a running average of the weights, seeds.

All of it is a function of the position in training, so that a resumed run needs no more than that position.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LearningRate:
    """Rises linearly for ``warmup_epochs``, then falls along a cosine to ``floor`` or by steps.

    Attributes:
        peak: learning rate at the end of the warm-up.
        steps_per_epoch: optimizer steps in an epoch.
        epochs: length of the training, warm-up included.
        warmup_epochs: length of the warm-up; may be a fraction.
        decay: ``"cosine"`` or ``"step"``.
        floor: where the cosine ends.
        step_epochs: with ``"step"``: the rate is multiplied by ``step_factor`` each time this many epochs have passed.
        step_factor: see ``step_epochs``.

    Example:
        >>> rate = LearningRate(peak=1.0, steps_per_epoch=2, epochs=4, warmup_epochs=2)
        >>> [round(rate(step), 3) for step in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.854, 0.5, 0.146]
    """

    peak: float
    steps_per_epoch: int
    epochs: int
    warmup_epochs: float = 5.0
    decay: str = "cosine"
    floor: float = 0.0
    step_epochs: int = 30
    step_factor: float = 0.1

    def __call__(self, step: int) -> float:
        """The rate of the step with this number, counted from 0 at the start of training."""
        warmup = round(self.warmup_epochs * self.steps_per_epoch)
        if step < warmup:
            return self.peak * (step + 1) / warmup
        if self.decay == "step":
            return self.peak * self.step_factor ** (step // self.steps_per_epoch // self.step_epochs)
        progress = (step - warmup) / max(self.epochs * self.steps_per_epoch - warmup, 1)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: kernels and matrices decay; biases and the parameters of normalisations do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Ema:
    """An exponential moving average of a model's parameters and floating-point buffers, for evaluation.

    The decay starts low and rises towards ``decay``, so that the average does not keep the weights training began with.
    Parameters are equal on all ranks, so their averages are; buffers are not (see ``evaluate.average_buffers``).

    Args:
        model: its present weights are the first average.
        decay: in ``[0, 1)``; the average remembers about ``1 / (1 - decay)`` steps.

    Raises:
        ValueError: ``decay`` is out of range.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay: is {decay!r}; it has to be at least 0 and below 1, such as 0.9999")
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights of ``model`` after the step with this number, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, values = self.module.state_dict(), model.state_dict()
        moving = [name for name, average in averages.items() if average.is_floating_point()]
        torch._foreach_lerp_([averages[n] for n in moving], [values[n] for n in moving], 1 - decay)
        for name in averages.keys() - set(moving):
            averages[name].copy_(values[name])


def seed_of(*position: int) -> int:
    """A seed for one place in training, such as (seed, epoch, image): 63 bits, unrelated for neighbouring places."""
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def top_k_correct(logits: Tensor, targets: Tensor, k: int) -> Tensor:
    """How many of the targets are among the ``k`` largest logits of their row, as a scalar on the same device."""
    best = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (best == targets.unsqueeze(1)).sum()
