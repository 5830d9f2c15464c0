"""The published models by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from crossover.simulate.layers import ModelShape
from crossover.simulate.transformers import bert, gpt2
from crossover.simulate.vision import resnet, vgg

_MODELS: dict[str, Callable[[], ModelShape]] = {
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "resnet101": partial(resnet, (3, 4, 23, 3)),
    "vgg16": partial(vgg, (2, 2, 3, 3, 3)),
    "vgg19": partial(vgg, (2, 2, 4, 4, 4)),
    "gpt2": gpt2,
    "gpt2-medium": partial(gpt2, "gpt2-medium", 24, 1024, batch=4),
    "gpt2-xl": partial(gpt2, "gpt2-xl", 48, 1600, batch=2),
    "bert-base": bert,
    "bert-large": partial(bert, "bert-large", 24, 1024),
}


def model_names() -> tuple[str, ...]:
    """What :func:`model` knows."""
    return tuple(_MODELS)


def model(name: str) -> ModelShape:
    """A published model.

    Raises:
        ValueError: none of that name.

    Example:
        >>> model("resnet101").parameters
        44549160
    """
    if name not in _MODELS:
        raise ValueError(f"model: is {name!r}; give one of {', '.join(_MODELS)}")
    return _MODELS[name]()
