"""Correcting a late gradient for what the weights have done since it was computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossover.buckets import Bucket


class Compensation:
    """Adds ``strength / rms(g) * g * g * (weights now - weights then)`` to a delayed gradient ``g``, elementwise.

    The square stands for the diagonal of the curvature. Source: delay compensation as in DC-ASGD (Zheng et al., 2017);
    dividing by the root mean square of each bucket, so that one strength fits all models, is ours.

    Costs a copy of the weights. Across ranks: equal gradients and weights give equal corrections.

    Args:
        strength: 0 for none, which costs nothing.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength
        self._then: list[Tensor] = []

    @torch.no_grad()
    def remember(self, parameters: Sequence[Tensor]) -> None:
        """The weights on which the generation that has just closed was computed."""
        if not self.strength:
            return
        if len(self._then) != len(parameters):
            self._then = [parameter.detach().clone() for parameter in parameters]
        else:
            torch._foreach_copy_(self._then, [parameter.detach() for parameter in parameters])

    @torch.no_grad()
    def apply(self, buckets: Sequence[Bucket]) -> None:
        """Correct the gradients that are due in ``p.grad``; does nothing before :meth:`remember`."""
        if not self._then:
            return
        place = 0
        for bucket in buckets:
            size = torch.linalg.vector_norm(bucket.gradients) / max(bucket.gradients.numel(), 1) ** 0.5
            strength = self.strength / size.clamp_(min=1e-30)
            for slot in bucket.slots:
                then, place = self._then[place], place + 1
                if slot.parameter.grad is slot.view:
                    slot.view.addcmul_(slot.view * slot.view * strength, slot.parameter.detach() - then)

    def forget(self) -> None:
        """The weights that were remembered are those of no generation any more."""
        self._then = []

    def state_dict(self) -> list[Tensor]:
        """The weights that are remembered."""
        return [tensor.clone() for tensor in self._then]

    def load_state_dict(self, state: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._then = [then.to(parameter.device).clone() for then, parameter in zip(state, parameters, strict=False)]
