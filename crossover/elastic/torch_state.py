"""What has to survive when ranks come and go: models, optimizers and all that has a ``state_dict``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from crossover.collectives.model_state import broadcast_parameters
from crossover.collectives.objects import broadcast_object
from crossover.collectives.optimizer_state import broadcast_optimizer_state
from crossover.elastic.state import ObjectState


class Handler:
    """Keeps and shares one object that has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy its state to host memory."""
        self.saved = on_host(self.value.state_dict())

    def restore(self) -> None:
        """Go back to what was saved last."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Take rank 0's state. Collective."""
        self.value.load_state_dict(broadcast_object(on_host(self.value.state_dict()), root_rank=0))

    def reset(self) -> None:
        """Adapt to the ranks that there are now."""
        if callable(adapt := getattr(self.value, "reset", None)):
            adapt()


class ModelHandler(Handler):
    """The same for a model: parameters travel without pickling and stay where they are."""

    def sync(self) -> None:
        """Take rank 0's parameters and buffers. Collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)

    def reset(self) -> None:
        """Nothing depends on the ranks."""


class OptimizerHandler(Handler):
    """The same for an optimizer, whose hooks have to find the ranks that there are now."""

    def sync(self) -> None:
        """Take rank 0's state and options. Collective."""
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        """Let ``DistributedOptimizer`` attach itself anew; a bare optimizer knows no ranks."""
        if hasattr(self.value, "skip_synchronize"):
            self.value.reattach()


def on_host(value: Any) -> Any:
    """A deep copy with every tensor in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps an OrderedDict with its metadata
        copied.update({key: on_host(entry) for key, entry in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(on_host(entry) for entry in value)
    return copy.deepcopy(value)


def handler_for(value: Any) -> Handler | None:
    """What keeps ``value``, or ``None`` if it is a plain value."""
    if isinstance(value, nn.Module):
        return ModelHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerHandler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return Handler(value)
    return None


class TorchState(ObjectState):
    """Models, optimizers, samplers, learning-rate schedulers and plain values, each an attribute of this object.

    Args:
        model: a model, or ``None``.
        optimizer: an optimizer, wrapped or not, or ``None``.
        kwargs: further objects. What has ``state_dict`` and ``load_state_dict`` is kept and shared by them, all else by
            copying and pickling.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> state = xo.elastic.TorchState(model=torch.nn.Linear(2, 2), epoch=0)
        >>> state.sync()
        >>> state.epoch
        0
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: handler for name, value in given.items() if (handler := handler_for(value)) is not None}
        super().__init__(**{name: value for name, value in given.items() if name not in handlers})
        self._handlers: dict[str, Handler] = {}
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        self._handlers = handlers

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.value = value
            handler.save()
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy everything to host memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state, on every rank, and save it. Collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Adapt samplers and optimizers to the ranks that there are now."""
        for handler in self._handlers.values():
            handler.reset()

    def state_dict(self) -> dict[str, Any]:
        """What was saved last; picklable."""
        return {**super().state_dict(), "handlers": {name: on_host(h.saved) for name, h in self._handlers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        for name, handler in self._handlers.items():
            handler.saved = state_dict["handlers"][name]
        super().load_state_dict(state_dict)
