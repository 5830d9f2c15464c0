"""The models that every benchmark trains, and the arithmetic of how much their communication weighs.

Example::

    from benchmarks import workloads

    workload = workloads.get("resnet")
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    inputs, targets = workload.batch(rank=0, step=0, size=2)
    workload.loss(model(inputs), targets).backward()
    optimizer.step()
    print(workload.accuracy(model), workload.gradient_bytes)
"""

from __future__ import annotations

from .gpt import GPT
from .vision import MLP, VGG, ResNet
from .workload import Workload

_WORKLOADS: dict[str, type[Workload]] = {kind.name: kind for kind in (MLP, ResNet, VGG, GPT)}

__all__ = ["Workload", "get", "names"]


def names() -> tuple[str, ...]:
    """What :func:`get` knows."""
    return tuple(_WORKLOADS)


def get(name: str, batch_size: int | None = None, seed: int = 0) -> Workload:
    """A workload by name: ``"mlp"``, ``"resnet"``, ``"vgg"`` or ``"gpt"``; arguments as for :class:`Workload`.

    Raises:
        ValueError: no workload of that name.
    """
    if name not in _WORKLOADS:
        raise ValueError(f"name: got {name!r}; give one of {', '.join(_WORKLOADS)}")
    return _WORKLOADS[name](batch_size, seed)
