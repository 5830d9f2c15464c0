"""The factor that ``GradScaler`` multiplies the loss with, where gradients are applied later than they are made."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch

_FRAMES = 12  # between GradScaler.step() and the optimizer's hooks there are a few wrappers


class LossScale:
    """Follows the scaler of one training loop, so that the scale of a gradient can travel with it.

    ``GradScaler`` looks at ``p.grad`` in every step and fails where none has one. With updates that come late there are
    such steps: then it is told that nothing overflowed.

    Args:
        scaler: ``None``: there is none, or it is found when it steps the optimizer (:meth:`look_for`). ``False``: the
            scalers of this process belong to other optimizers.

    Raises:
        ValueError: ``scaler`` is something else.
    """

    def __init__(self, scaler: Any = None) -> None:
        if scaler is not None and scaler is not False and not hasattr(scaler, "_unscale_grads_"):
            raise ValueError(
                f"grad_scaler: is {scaler!r}; pass the torch.amp.GradScaler of the training loop, or False if its "
                "scalers belong to other optimizers"
            )
        self.scaler = scaler
        self._optimizer_id = 0
        self._watching: Callable[..., Any] | None = None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the scaler for this optimizer."""
        self._optimizer_id = id(optimizer)
        if self.scaler:
            self._watch()

    def detach(self) -> None:
        """Leave the scaler as it was."""
        if self._watching is not None and vars(self.scaler).get("_unscale_grads_") is self._watching:
            del self.scaler._unscale_grads_
        self._watching = None

    @property
    def used(self) -> bool:
        """Whether a scaler is followed."""
        return bool(self.scaler) and self.scaler.is_enabled()

    def current(self) -> float:
        """What the loss is multiplied with in this step; equal on all ranks, as every rank sees the same overflows."""
        return float(self.scaler.get_scale()) if self.used else 1.0

    def look_for(self) -> bool:
        """Called from the optimizer's hooks: find the scaler that is stepping it; whether it was found just now."""
        if self.scaler is not None:
            return False
        frame = sys._getframe(1)
        for _ in range(_FRAMES):
            if frame.f_back is None:
                break
            frame = frame.f_back
            owner = frame.f_locals.get("self") if frame.f_code.co_name in ("step", "_maybe_opt_step") else None
            if isinstance(owner, torch.amp.GradScaler):
                self.scaler = owner
                self._watch()
                return True
        return False

    def require_known(self) -> None:
        """Before updates begin to come late: raise if there is a scaler that might be this optimizer's.

        Raises:
            ValueError: a scaler is enabled in this process, and it is not known whether it steps this optimizer.
        """
        if self.scaler is None and any(s.is_enabled() for s in gc.get_objects() if type(s) in _kinds()):
            raise ValueError(
                "grad_scaler: this process has a torch.amp.GradScaler, and delayed gradients need the scale they were "
                "made with; pass it as DeFT(grad_scaler=scaler), or grad_scaler=False if it does not step this "
                "optimizer"
            )

    def _watch(self) -> None:
        original = self.scaler._unscale_grads_
        mine = self._optimizer_id

        def unscale(optimizer: Any, inverse: torch.Tensor, found: torch.Tensor, *rest: Any) -> dict[Any, torch.Tensor]:
            result: dict[Any, torch.Tensor] = original(optimizer, inverse, found, *rest)
            return result if result or id(optimizer) != mine else {found.device: found}

        self.scaler._unscale_grads_ = self._watching = unscale


def _kinds() -> tuple[type, ...]:
    return (torch.amp.GradScaler, torch.cuda.amp.GradScaler)
