"""``gate="auto"``: shares every step until it is known how many local steps the network asks for, at which delta."""

from __future__ import annotations

import math
from typing import Any

from crossover.selsync.gate import check_count
from crossover.selsync.gates import SelSync
from crossover.selsync.smoothing import DEFAULT_FACTOR


class AutoGate(SelSync):
    """SelSync whose ``delta`` is found while the job trains; writing it allows local steps.

    At first every step is shared as without a gate: gradients are averaged under backward, and nothing votes. The
    norms of ``warmup_steps + watch_steps`` of these steps are watched, and the next ``profile_steps`` are timed. Then
    ``delta`` is set so that what is waited for becomes a small part of computing, with 90 % local steps at most; see
    :func:`crossover.auto.choice.choose_gate`. Where communication is hidden already, or local steps gain too little,
    the job stays as it is, for good. One line in the log ``crossover.auto`` of rank 0 says which, with the numbers.

    Across ranks: rank 0 decides, and all get what it decided.

    Args:
        warmup_steps: norms until the significance is known.
        watch_steps: steps whose significance ``delta`` is chosen from.
        profile_steps: steps that are timed.
        max_local_steps: see :class:`~crossover.selsync.Gate`.
        factor: see :class:`~crossover.selsync.SelSync`.
        options: see :class:`~crossover.selsync.Gate`; parameters are what is averaged.

    Attributes:
        opened: whether steps may be local now.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = xo.DistributedOptimizer(optimizer, gate=xo.auto.AutoGate(buffers=model))
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 25,
        watch_steps: int = 50,
        profile_steps: int = 20,
        max_local_steps: int | None = 16,
        factor: float = DEFAULT_FACTOR,
        **options: Any,
    ) -> None:
        if options.setdefault("average", "parameters") != "parameters":
            raise ValueError(
                f"average: is {options['average']!r}; gate 'auto' averages parameters, which makes ranks equal again: "
                "leave it out, or use SelSync with a delta"
            )
        if options.get("window") is not None:
            raise ValueError(
                f"window: is {options['window']!r}; gate 'auto' follows the recursive average: leave it out"
            )
        check_count("watch_steps", watch_steps, 1)
        check_count("profile_steps", profile_steps, 1)
        super().__init__(0.0, factor=factor, warmup_steps=warmup_steps, max_local_steps=max_local_steps, **options)
        self.watch_steps, self.profile_steps = watch_steps, profile_steps
        self.opened = False

    def open(self, delta: float, tracker: dict[str, Any]) -> None:
        """Let steps be local from the next one on; ``tracker``: what this rank's average has come to."""
        self.delta, self.opened = delta, True
        self.tracker.load_state_dict(tracker)

    def settings(self) -> dict[str, Any]:
        """See :meth:`Gate.settings`."""
        own = {"watch_steps": self.watch_steps, "profile_steps": self.profile_steps}
        return {**super().settings(), **own}

    def facts(self) -> dict[str, float | int | str | bool]:
        """See :meth:`SelSync.facts`."""
        return {**super().facts(), "delta": self.delta} if self.opened else {}

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`SelSync.state_dict`; ``delta`` too."""
        return {**super().state_dict(), "opened": self.opened, "delta": self.delta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; from another gate's state with its counters."""
        super().load_state_dict(state)
        if state.get("opened") and state.get("delta", math.nan) >= 0:
            self.opened, self.delta = True, float(state["delta"])
