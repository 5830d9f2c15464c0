"""SelSync's rule on plain floats: when did a gradient's norm change enough to be worth sharing?

What is the paper's (Tyagi and Swany, CLUSTER 2023, section II-E, equation 2; Algorithm 1, line 8): the squared norm of
the local gradient is smoothed over steps by an exponentially weighted moving average; a rank votes to share where the
absolute relative change of the smoothed value from one step to the next reaches the threshold ``delta``; one vote is
enough.

What is our choice, where the paper is silent: the recursive average as the default form, a factor of 0.16 for any
number of ranks (the paper's N/100 at its 16 ranks, see :func:`paper_factor`), no significance until 25 samples were
seen, the quorum, and what becomes of samples that are not finite and of an average of zero.
"""

from __future__ import annotations

import math
from typing import Any

DEFAULT_FACTOR = 0.16
DEFAULT_WARMUP_STEPS = 25  # the paper's window


def paper_factor(size: int) -> float:
    """The paper's smoothing factor (section III): N/100, kept within 0.01 and 0.99.

    It makes the sensitivity depend on the number of ranks: a fixed ``delta`` seldom triggers at N = 2 and nearly always
    at N = 64. For that reason it is not the default.

    Raises:
        ValueError: ``size`` is not a positive whole number.

    Example:
        >>> paper_factor(16), paper_factor(500)
        (0.16, 0.99)
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size: is {size!r}; it has to be a positive whole number of ranks, such as crossover.size()")
    return min(max(size / 100, 0.01), 0.99)


def relative_change(current: float, previous: float) -> float | None:
    """``|current - previous| / previous``, or ``None`` where that is not a finite number (``previous`` may be zero).

    Example:
        >>> relative_change(3.0, 2.0), relative_change(3.0, 0.0)
        (0.5, None)
    """
    if previous == 0:
        return None
    change = abs(current - previous) / previous
    return change if change < math.inf else None


def is_significant(significance: float | None, delta: float) -> bool:
    """Whether a rank votes to share: its significance reached ``delta``, or is unknown.

    An unknown significance asks for sharing whatever ``delta`` is: a gate with an infinite ``delta`` takes no votes.

    Raises:
        ValueError: ``delta`` is negative or NaN.

    Example:
        >>> is_significant(0.3, delta=0.3), is_significant(0.2, delta=0.3), is_significant(None, delta=0.3)
        (True, False, True)
    """
    check_delta(delta)
    return significance is None or not significance < delta


def check_delta(delta: float) -> None:
    """Refuse a threshold that means nothing.

    Raises:
        ValueError: ``delta`` is negative or NaN.
    """
    if not delta >= 0:
        raise ValueError(
            f"delta: is {delta!r}; it has to be 0 (share every step) or more, for example 0.3, or math.inf"
        )


def votes_needed(quorum: float | None, size: int) -> int:
    """How many of ``size`` ranks have to vote for sharing before all ranks share.

    Args:
        quorum: share of the ranks, above 0 and up to 1, rounded up to whole ranks. ``None``: any one rank, as in the
            paper.
        size: number of ranks.

    Raises:
        ValueError: ``quorum`` is outside that range.

    Example:
        >>> votes_needed(None, 8), votes_needed(0.3, 10), votes_needed(0.5, 3)
        (1, 3, 2)
    """
    if quorum is None:
        return 1
    if not 0 < quorum <= 1:
        raise ValueError(
            f"quorum: is {quorum!r}; it has to be a share of the ranks above 0 and up to 1, or None for any one rank"
        )
    return max(1, math.ceil(quorum * size - 1e-9))


class Smoothing:
    """The checked settings of a significance tracker.

    Attributes:
        factor: weight of the newest sample.
        window: number of samples in the average, or ``None`` for the recursive form.
        warmup_steps: samples until there is a significance.

    Raises:
        ValueError: a setting is out of its range.
    """

    def __init__(
        self, factor: float = DEFAULT_FACTOR, *, window: int | None = None, warmup_steps: int | None = None
    ) -> None:
        if not 0 < factor <= 1:
            raise ValueError(
                f"factor: is {factor!r}; it has to be above 0 and up to 1 (not smoothed); default {DEFAULT_FACTOR}"
            )
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"window: is {window!r}; it has to be a positive number of steps (the paper: 25), or None")
        if warmup_steps is not None and (not isinstance(warmup_steps, int) or warmup_steps < 0):
            raise ValueError(
                f"warmup_steps: is {warmup_steps!r}; it has to be a number of steps, 0 or more, or None for the default"
            )
        self.factor = float(factor)
        self.window = window
        self.warmup_steps = (window or DEFAULT_WARMUP_STEPS) if warmup_steps is None else warmup_steps

    def weights(self) -> list[float]:
        """The window's weights, newest sample first, not yet divided by their sum; none in the recursive form."""
        return [(1 - self.factor) ** age for age in range(self.window or 0)]

    def checked(self, state: dict[str, Any]) -> tuple[float, int, list[float]]:
        """The average, the number of samples seen, and the newest samples, out of a tracker's ``state_dict()``.

        Raises:
            ValueError: an entry is missing, or there are fewer samples than this window needs.
        """
        missing = {"smoothed", "seen", "samples"} - state.keys()
        if missing:
            raise ValueError(
                f"state: lacks {sorted(missing)}; give what state_dict() of a significance tracker returned"
            )
        seen, window = int(state["seen"]), self.window or 0
        samples = [float(sample) for sample in state["samples"]][:window]
        if len(samples) < min(seen, window):
            raise ValueError(
                f"state: holds {len(samples)} samples, but window={window} needs {min(seen, window)}; "
                "load it with the window with which it was saved, or start with an empty tracker"
            )
        return float(state["smoothed"]), seen, samples


class SignificanceTracker(Smoothing):
    """The rule on floats: smoothed squared norm, and its relative change. For gradients on a CPU, and for simulation.

    With ``s`` the smoothed and ``x`` the new squared norm, the significance is ``|s_new - s| / s`` where

    * ``s_new = s + factor * (x - s)`` (recursive, the default); the first sample, and one that follows ``s == 0``,
      starts the average anew;
    * or, with ``window=W``, ``s_new`` is the average of the newest W samples with weights ``(1 - factor) ** age``.

    So ``significance = factor * |x / s - 1|`` in the recursive form: a fall counts for at most ``factor``, and with
    ``delta`` above ``factor`` only rises trigger.

    The significance is unknown (``None``) until ``warmup_steps`` samples were seen, after an average of zero, and for a
    sample that is infinite or NaN. Such a sample changes nothing: neither the average nor the count.

    Local: each rank follows its own gradient. Only what is voted on may steer collectives.

    Args:
        factor: weight of the newest sample, above 0 and up to 1. Larger reacts more, and to single steps.
        window: number of samples in the average; ``None`` for the recursive form, which never forgets entirely.
        warmup_steps: samples, the current one included, until there is a significance. Default: the window, or 25.

    Attributes:
        smoothed: the average; 0.0 before the first sample.
        seen: number of finite samples so far.
        significance: of the last sample, or ``None``.

    Raises:
        ValueError: a setting is out of its range.

    Example:
        >>> tracker = SignificanceTracker(factor=0.5, warmup_steps=2)
        >>> [tracker.update(x) for x in (4.0, 8.0, float("nan"), 6.0)]
        [None, 0.5, None, 0.0]
    """

    def __init__(
        self, factor: float = DEFAULT_FACTOR, *, window: int | None = None, warmup_steps: int | None = None
    ) -> None:
        super().__init__(factor, window=window, warmup_steps=warmup_steps)
        self.smoothed = 0.0
        self.seen = 0
        self.significance: float | None = None
        self._samples: list[float] = []

    def update(self, sample: float) -> float | None:
        """Take one step's squared norm and return its significance.

        Raises:
            ValueError: ``sample`` is negative.
        """
        if sample < 0:
            raise ValueError(f"sample: is {sample!r}; it has to be a squared norm, 0 or more")
        self.significance = None
        if not sample < math.inf:
            return None
        previous = self.smoothed
        self.smoothed = self._smooth(sample)
        self.seen += 1
        if self.seen >= self.warmup_steps:
            self.significance = relative_change(self.smoothed, previous)
        return self.significance

    def vote(self, delta: float) -> bool:
        """This rank's vote on the last sample: see :func:`is_significant`."""
        return is_significant(self.significance, delta)

    def value(self) -> float | None:
        """The significance of the last sample, ``None`` where unknown."""
        return self.significance

    def _smooth(self, sample: float) -> float:
        if self.window is None:
            return (sample - self.smoothed) * self.factor + self.smoothed if self.smoothed > 0 else sample
        self._samples = [sample, *self._samples][: self.window]
        weights = self.weights()[: len(self._samples)]
        return sum(weight * value for weight, value in zip(weights, self._samples, strict=True)) / sum(weights)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that either form of the tracker takes back. The settings are not among them."""
        return {"smoothed": self.smoothed, "seen": self.seen, "samples": list(self._samples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` of either form returned.

        Raises:
            ValueError: ``state`` is not such a dictionary, or lacks samples that this window needs.
        """
        self.smoothed, self.seen, self._samples = self.checked(state)
        self.significance = None
