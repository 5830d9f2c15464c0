"""The gates there are: SelSync's own, and the fixed period of local SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from crossover.selsync.gate import Gate, check_count
from crossover.selsync.local_gradients import LocalGradients
from crossover.selsync.significance import TensorSignificanceTracker
from crossover.selsync.smoothing import DEFAULT_FACTOR, SignificanceTracker, check_delta

DEFAULT_LR_DROP = 0.7


class SelSync(Gate):
    """Share when the gradient changes: the relative change of its smoothed squared norm reaches ``delta`` on any rank.

    ``delta=0`` shares every step; ``delta=float("inf")`` none after the warm-up, and takes no votes then. With
    parameter averaging and SGD, momentum included, ``delta=0`` follows DDP's trajectory; with Adam it does not, as
    averages of its steps are not its steps on averages.

    Args:
        delta: the threshold; the paper uses 0.25 to 0.5. Its effect depends on model, batch size and ``factor``: see
            :func:`crossover.selsync.suggest_delta`.
        factor: weight of the newest squared norm in the average. The paper's is N/100 for N ranks
            (:func:`crossover.selsync.paper_factor`), which makes the same delta mean other things at other N.
        window: average over so many steps instead of all.
        warmup_steps: samples until the significance is known; steps are shared until then.
        every: after the warm-up, look at the gradient and the learning rate, and vote, every so many steps, and leave
            those between local. They cost no reading of the gradients and no wait for the slowest rank then, and a
            change is noticed up to ``every - 1`` steps later. Ours; 1 is the paper's rule.
        options: see :class:`Gate`. ``lr_drop`` is 0.7 here, and ``None`` with an infinite delta.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = xo.DistributedOptimizer(optimizer, gate=xo.selsync.SelSync(delta=0.3, buffers=model))

    Source: SelSync, equation 2 and Algorithm 1; where they are silent, see :class:`Gate` and
        :mod:`crossover.selsync.smoothing` for our choices.
    """

    def __init__(
        self,
        delta: float = 0.3,
        *,
        factor: float = DEFAULT_FACTOR,
        window: int | None = None,
        warmup_steps: int | None = None,
        every: int = 1,
        **options: Any,
    ) -> None:
        check_delta(delta)
        check_count("every", every, 1)
        options.setdefault("lr_drop", DEFAULT_LR_DROP if delta < math.inf else None)
        super().__init__(**options)
        self.delta = float(delta)
        self.every = every
        self.tracker: SignificanceTracker | TensorSignificanceTracker = SignificanceTracker(
            factor, window=window, warmup_steps=warmup_steps
        )

    def asks(self) -> bool:
        """In steps that are looked at; with an infinite delta during the warm-up only."""
        return self._due and not self._never_again

    def _looks(self) -> bool:
        return self._due and super()._looks()

    def opinion(self, gradients: LocalGradients) -> Tensor | bool:
        """Vote on the change of the squared norm, unscaled, since the step that was looked at before."""
        if self._never_again or not self._due:
            return False
        norm = gradients.squared_norm()
        if self.grad_scaler is not None and self.scales:
            norm = norm / self.grad_scaler.get_scale() ** 2
        self._follow(norm)
        return self.tracker.vote(self.delta)

    def _follow(self, norm: Tensor) -> None:
        """On floats where reading the norm waits for no device: they cost less than a dozen operations on tensors."""
        form = SignificanceTracker if norm.device.type == "cpu" else TensorSignificanceTracker
        if not isinstance(self.tracker, form):
            was = self.tracker
            self.tracker = form(was.factor, window=was.window, warmup_steps=was.warmup_steps)
            self.tracker.load_state_dict(was.state_dict())
        if isinstance(self.tracker, SignificanceTracker):
            self.tracker.update(float(norm))
        else:
            self.tracker.update(norm)

    @property
    def _due(self) -> bool:
        since_warmup = self.steps - self.tracker.warmup_steps
        return since_warmup < 0 or since_warmup % self.every == 0

    @property
    def _never_again(self) -> bool:
        return self.delta == math.inf and self.steps >= self.tracker.warmup_steps

    def settings(self) -> dict[str, Any]:
        """See :meth:`Gate.settings`."""
        own = {"delta": self.delta, "factor": self.tracker.factor, "window": self.tracker.window, "every": self.every}
        return {**super().settings(), **own, "warmup_steps": self.tracker.warmup_steps}

    def facts(self) -> dict[str, float | int | str | bool]:
        """The significance at the last look, where it is known."""
        significance = None if self._never_again else self.tracker.value()
        return {} if significance is None else {"significance": significance}

    def state_dict(self) -> dict[str, Any]:
        """Counters and the tracker's average."""
        return {**super().state_dict(), "tracker": self.tracker.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        super().load_state_dict(state)
        if "tracker" in state:
            self.tracker.load_state_dict(state["tracker"])


class Periodic(Gate):
    """Local SGD: share every ``every`` steps, and every step of the first ``warmup_steps`` (post-local SGD).

    Ranks know by themselves when, so between two shared steps they exchange nothing and do not wait for each other.

    Args:
        every: period in steps; 1 shares all.
        warmup_steps: steps at the start that are all shared.
        options: see :class:`Gate`; with ``lr_drop`` there is a vote every step.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> import crossover as xo
        >>> gate = xo.selsync.Periodic(every=8, warmup_steps=100)
    """

    reads_norm = False

    def __init__(self, every: int, warmup_steps: int = 0, **options: Any) -> None:
        check_count("every", every, 1)
        check_count("warmup_steps", warmup_steps, 0)
        super().__init__(**options)
        self.every = every
        self.warmup_steps = warmup_steps

    def asks(self) -> bool:
        """Only where the answer is yes."""
        return self._due

    def opinion(self, gradients: LocalGradients) -> bool:
        """Vote by the count of steps, which is the same everywhere."""
        return self._due

    @property
    def _due(self) -> bool:
        return self.steps < self.warmup_steps or (self.steps - self.warmup_steps + 1) % self.every == 0

    def settings(self) -> dict[str, Any]:
        """See :meth:`Gate.settings`."""
        return {**super().settings(), "every": self.every, "warmup_steps": self.warmup_steps}


_BY_NAME: dict[str, Callable[[], Gate]] = {}


def register_gate(name: str, make: Callable[[], Gate]) -> None:
    """Let :func:`gate_of` know a gate by ``name``; for parts that stand above this one."""
    _BY_NAME[name] = make


def gate_of(choice: Gate | str | None) -> Gate | None:
    """The gate itself, or a new one by name.

    Args:
        choice: a gate, ``None``, or ``"selsync"``, ``"selsync:0.3"`` (delta), ``"selsync:0.3:4"`` (delta, every),
            ``"periodic:8"``, ``"periodic:8:100"`` (every, warm-up steps), ``"none"``, or a name that was registered,
            such as ``"auto"``.

    Raises:
        ValueError: neither a gate nor such a name.

    Example:
        >>> gate_of("selsync:0.5").delta, gate_of("periodic:8").every, gate_of("none")
        (0.5, 8, None)
    """
    if choice is None or isinstance(choice, Gate):
        return choice
    if isinstance(choice, str):
        name, *numbers = choice.strip().lower().split(":")
        try:
            return _by_name(name, numbers)
        except (KeyError, TypeError):
            pass
        except ValueError as error:
            raise ValueError(f"gate: is {choice!r}; {error}") from error
    others = "".join(f"{name!r}, " for name in sorted(_BY_NAME))
    raise ValueError(
        f"gate: is {choice!r}; use {others}'selsync', 'selsync:DELTA', 'selsync:DELTA:EVERY', 'periodic:EVERY', "
        "'periodic:EVERY:WARMUP', or an object such as crossover.selsync.SelSync(delta=0.3)"
    )


def _by_name(name: str, numbers: Sequence[str]) -> Gate | None:
    if name == "selsync":
        return _selsync(*numbers)
    if name == "periodic":
        return Periodic(*_parsed(int, numbers))
    if name in ("none", "") and not numbers:
        return None
    if name in _BY_NAME and not numbers:
        return _BY_NAME[name]()
    raise KeyError(name)


def _selsync(delta: str = "0.3", every: str = "1") -> SelSync:
    return SelSync(*_parsed(float, [delta]), every=_parsed(int, [every])[0])


def _parsed(number: Callable[[str], Any], texts: Sequence[str]) -> list[Any]:
    """``KeyError`` where one is no number."""
    try:
        return [number(text) for text in texts]
    except ValueError as error:
        raise KeyError(*texts) from error
