"""Updates that land later than ``step()``: the mark left in ``p.grad``, and a step of some parameters only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_CLEARING = ("zero_", "_foreach_zero_", "detach", "detach_")


class DeferredGradient(torch.Tensor):
    """Stands in ``p.grad`` for an average that has not arrived. Reading it is an error; clearing it is not.

    Args:
        parameter: whose gradient it stands for.
        name: the parameter's name, for the message.
    """

    parameter_name: str

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> DeferredGradient:
        """A tensor like ``parameter`` without memory."""
        mark = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        mark.parameter_name = name
        return mark

    def __init__(self, parameter: Tensor, name: str) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket.__name__ in _CLEARING:
            return args[0] if args else None
        mark = next((leaf for leaf in _leaves(args) if isinstance(leaf, cls)), None)
        raise ValueError(
            f"gradient of {mark.parameter_name if mark is not None else 'a parameter'!r}: is not there yet; the "
            "Priority schedule applies averages layer by layer in the next forward pass, so clipping by the global "
            "norm, GradScaler and gradient logging before step() are not possible; use the Overlapped schedule for them"
        )


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def step_subset(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], options: Sequence[dict[str, Any]]
) -> None:
    """Let the optimizer's own algorithm update some parameters only, without its step hooks.

    Args:
        optimizer: the user's.
        parameters: those to update; their ``grad`` is set.
        options: for each group, the options to use (learning rate, ...), as they were when ``step()`` was called.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    saved = [dict(group) for group in groups]
    try:
        for group, then in zip(groups, options, strict=False):
            group.update(then)
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
        algorithm = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        algorithm(optimizer)
    finally:
        for group, before in zip(groups, saved, strict=True):
            group.update(before)
