"""Under how many steps an average of parameters travels, where a gate says when it is taken and a schedule how late.

Gradients that come late are the schedules' own affair. With a gate every step is local, and what travels are
parameters: a schedule with late updates is then asked for the one thing of which it knows more than the gate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Travel(ABC):
    """The number of steps between the start of an average and the step after which it lands.

    Across ranks: the same number after each step, as landing steps follow from it.

    Attributes:
        steps: under which the next average travels; 0: ranks wait for it.
    """

    steps: int = 0

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What has to be equal on all ranks."""

    def step_ends(self) -> None:
        """The optimizer has stepped; nothing has been waited for since :meth:`step_begins`."""

    def landed(self, travelled_us: float | None) -> None:
        """An average has arrived; how long it was on its way, where the backend told."""

    @abstractmethod
    def step_begins(self, taken: int, nbytes: int) -> None:
        """All that belongs to a step is done. Collective.

        Args:
            taken: steps so far.
            nbytes: size of an average.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs. Never communicates."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; all ranks take the same."""
        self.steps = state["steps"]


class FixedTravel(Travel):
    """Always the same number, after some steps in which ranks wait.

    Args:
        steps: under which averages travel.
        warmup_steps: in which they are waited for.

    Example:
        >>> travel = FixedTravel(2, warmup_steps=1)
        >>> before = travel.steps
        >>> travel.step_begins(1, nbytes=1000)
        >>> before, travel.steps
        (0, 2)
    """

    def __init__(self, steps: int, warmup_steps: int) -> None:
        self._wanted = steps
        self._warmup_steps = warmup_steps

    def settings(self) -> dict[str, Any]:
        """See :meth:`Travel.settings`."""
        return {"steps": self._wanted, "warmup_steps": self._warmup_steps}

    def step_begins(self, taken: int, nbytes: int) -> None:
        """See :meth:`Travel.step_begins`."""
        self.steps = self._wanted if taken >= self._warmup_steps else 0
