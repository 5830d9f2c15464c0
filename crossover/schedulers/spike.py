"""Momentum for gradients that come one update late.

A late gradient meets momentum badly: on a quadratic, one update of delay at momentum 0.9 divides the largest stable
learning rate by 38. Momentum that gives more weight to the gradient that has just come, and less to those before, keeps
three times as much of the range, at the same learning rate in the long run.

Source: spike compensation, Kosson et al., *Pipelined Backpropagation at Scale* (2020), for pipelines; known from memory
and not read again for this. Taking it for twice the delay, which is stable furthest of all weights of this form, the
same for Adam, and its use here are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DELAY = 2
"""Updates that are compensated: twice the one by which a gradient is late."""


def spike_weights(momentum: float, delay: int = DELAY) -> tuple[float, float]:
    """What an update is made of: so much of the momentum buffer, and so much of the gradient by itself.

    In the long run every gradient counts as with plain momentum: ``1 / (1 - momentum)`` times.

    Example:
        >>> [round(weight, 3) for weight in spike_weights(0.9)], spike_weights(0.5, delay=1)
        ([0.81, 1.9], (0.5, 1.0))
    """
    of_buffer = momentum**delay
    return of_buffer, (1.0 - of_buffer) / (1.0 - momentum)


class SpikeCompensation:
    """Completes an optimizer's step with a late gradient: from its own momentum to :func:`spike_weights`.

    It knows ``torch.optim.SGD`` with momentum, Nesterov's as well, and ``Adam`` and ``AdamW``, whose first moment is
    weighted so and whose second moment stays. Other optimizers, and groups without momentum, are left alone. Weight
    decay that is a part of the gradient counts, at the weights after the step.

    Costs a few more passes over the parameters in late updates, with Adam two temporary copies of a group's. Across
    ranks: equal gradients and weights give equal steps.

    Args:
        enabled: whether it does anything.

    Example:
        >>> parameter = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
        >>> parameter.grad = torch.ones(1)
        >>> optimizer.step()
        >>> SpikeCompensation(enabled=True).complete(optimizer)
        >>> parameter.item()  # 0.25 of the buffer and 1.5 of the gradient
        -1.75
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether late steps of this optimizer are completed."""
        return self.enabled and isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW)

    @torch.no_grad()
    def complete(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped with a late gradient, which is in ``p.grad`` still."""
        skipped = getattr(optimizer, "found_inf", None)  # a fused step under a GradScaler skips by itself
        if not self.knows(optimizer) or (skipped is not None and float(skipped)):
            return
        moment = "momentum_buffer" if isinstance(optimizer, torch.optim.SGD) else "exp_avg"
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        for group in optimizer.param_groups:
            known = [p for p in group["params"] if p.grad is not None and optimizer.state[p].get(moment) is not None]
            states = [optimizer.state[p] for p in known]
            if known and "betas" in group:
                _adam(group, known, states, group.get("decoupled_weight_decay", decoupled))
            elif known and group["momentum"]:
                _sgd(group, known, states)


def _sgd(group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Any]]) -> None:
    of_buffer, of_gradient = spike_weights(group["momentum"])
    of_gradient *= 1.0 - group["dampening"]
    if group["nesterov"]:
        of_buffer, of_gradient = of_buffer - group["momentum"], of_gradient - 1.0
    else:
        of_buffer -= 1.0
    rate = float(group["lr"])
    torch._foreach_add_(parameters, [state["momentum_buffer"] for state in states], alpha=-rate * of_buffer)
    gradients = _gradients(parameters)
    torch._foreach_add_(parameters, gradients, alpha=rate * of_gradient if group["maximize"] else -rate * of_gradient)
    if group["weight_decay"]:
        torch._foreach_mul_(parameters, 1.0 - rate * of_gradient * float(group["weight_decay"]))


def _adam(group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Any]], decoupled: bool) -> None:
    first, second = (float(beta) for beta in group["betas"])
    of_moment, _ = spike_weights(first)
    steps = torch.stack([torch.as_tensor(state["step"]) for state in states]).tolist()
    gradients = _gradients(parameters)
    if group["weight_decay"] and not decoupled:
        gradients = list(torch._foreach_add(gradients, parameters, alpha=float(group["weight_decay"])))
    change = torch._foreach_mul([s["exp_avg"] for s in states], [(of_moment - 1.0) / (1.0 - first**n) for n in steps])
    # the first moment holds (1 - first) of each gradient: spike_weights' share of it is 1 - of_moment
    weight = 1.0 - of_moment
    torch._foreach_add_(change, gradients, alpha=-weight if group["maximize"] else weight)
    squares = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    size = torch._foreach_sqrt([state[squares] for state in states])
    torch._foreach_mul_(size, [(1.0 - second**n) ** -0.5 for n in steps])
    torch._foreach_add_(size, float(group["eps"]))
    torch._foreach_addcdiv_(parameters, change, size, value=-float(group["lr"]))


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
