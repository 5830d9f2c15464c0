"""What a plan costs in convergence: pure functions of its generations.

The paper keeps accuracy by quantifying the convergence loss of a schedule and feeding it back (Meng and Sun, DeFT,
arXiv 2503.16815, abstract); its formula and threshold could not be read. Here:

* :func:`efficiency` rests on the gradient noise scale of McCandlish et al., *An Empirical Model of Large-Batch
  Training* (2018), whose unbiased estimate from two batch sizes is :class:`NoiseScale`;
* :func:`walk_ratio` is a Gaussian random walk with a reflecting floor, the kind of estimate the paper is said to use;
* :func:`largest_curvature` says where one step of delay is unstable, which neither of the two can see.

What merging does to momentum is ours, and is left as it is: an update of merged steps decays the buffer once. Decaying
it once for each step (``momentum ** steps``, gradients scaled to keep their weight) is what single steps would have
done on the same weights, but with a late gradient it is stable for no larger rates, and trains worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crossover.deft.planner import Limits
from crossover.schedulers.spike import spike_weights

IGNORED_SAMPLES = 12
SETTLING_SAMPLES = 5
SMOOTHING = 0.95


def gain(merged: int, batch: float, noise_scale: float | None) -> float:
    """By how much one update of ``merged`` steps may be larger than that of one step: between 1 and ``merged``.

    Args:
        merged: steps whose gradients were averaged.
        batch: samples of one step, over all ranks.
        noise_scale: in samples; ``None`` where it is not known: then the square root, the usual rule for Adam.

    Example:
        >>> gain(2, 1024, 8192), gain(1, 1024, 8192), gain(4, 1024, None)
        (1.8, 1.0, 2.0)
    """
    if noise_scale is None:
        return math.sqrt(merged)
    if math.isinf(noise_scale):
        return float(merged)
    return merged * (batch + noise_scale) / (merged * batch + noise_scale)


def efficiency(merged: Sequence[int], batch: float, noise_scale: float) -> float:
    """Progress per sample compared with an update a step: 1 is no loss.

    Args:
        merged: steps of each generation in a cycle.
        batch: samples of one step, over all ranks.
        noise_scale: in samples.

    Example:
        >>> round(efficiency([1, 2], 1024, 8192), 4), efficiency([1, 1], 1024, 8192)
        (0.9333, 1.0)
    """
    return sum(gain(steps, batch, noise_scale) for steps in merged) / sum(merged)


class NoiseScale:
    """Estimates the gradient noise scale from the gradients that travel anyway.

    The mean gradient of ``n`` samples has expected squared norm ``|G|^2 + tr(S) / n``; a rank's own gradient and the
    average over ranks are two such batches. Both estimates are smoothed before their ratio is taken.

    Across ranks: all call :meth:`add` with the same reduced numbers, so all hold the same estimate.

    Args:
        smoothing: weight of what is known, for each sample that comes.
        ignored: samples after which there is an estimate. The first of them, ``SETTLING_SAMPLES`` at most, are not in
            it: those of a network that has hardly been trained.

    Example:
        >>> estimate = NoiseScale(ignored=0)
        >>> estimate.add(small_batch=1, small_squared=3.0, large_batch=2, large_squared=2.0)
        >>> estimate.value
        2.0
    """

    def __init__(self, smoothing: float = SMOOTHING, ignored: int = IGNORED_SAMPLES) -> None:
        self.smoothing = smoothing
        self.ignored = ignored
        self.samples = 0
        self.signal = 0.0
        self.noise = 0.0
        self._weight = self._squared_weight = self._spread = 0.0

    def add(self, small_batch: float, small_squared: float, large_batch: float, large_squared: float) -> None:
        """Take a pair of squared norms, the small one a mean over ranks. What is not finite is left out."""
        if large_batch <= small_batch or not math.isfinite(small_squared + large_squared):
            return
        self.samples += 1
        if self.samples <= min(self.ignored, SETTLING_SAMPLES):
            return
        signal = (large_batch * large_squared - small_batch * small_squared) / (large_batch - small_batch)
        noise = (small_squared - large_squared) / (1 / small_batch - 1 / large_batch)
        self._weight = self.smoothing * self._weight + 1.0
        self._squared_weight = self.smoothing**2 * self._squared_weight + 1.0
        share, before = 1.0 / self._weight, self.signal
        self.signal += share * (signal - before)
        self.noise += share * (noise - self.noise)
        self._spread += share * ((signal - before) * (signal - self.signal) - self._spread)

    @property
    def value(self) -> float | None:
        """The noise scale in samples; ``None`` before there is an estimate, infinite where no signal is left."""
        return self._scale(self.signal)

    @property
    def cautious(self) -> float | None:
        """The same with the signal one standard error larger, so smaller: what merging is allowed by."""
        return self._scale(self.signal + self.error)

    @property
    def error(self) -> float:
        """Standard error of the smoothed signal."""
        if not self._weight:
            return 0.0
        return math.sqrt(max(self._spread, 0.0) * self._squared_weight) / self._weight

    def _scale(self, signal: float) -> float | None:
        if self.samples <= self.ignored:
            return None
        if self.noise <= 0:
            return 0.0
        return self.noise / signal if signal > 0 else math.inf

    def state_dict(self) -> dict[str, float]:
        """The smoothed numbers."""
        return {
            "samples": self.samples,
            "signal": self.signal,
            "noise": self.noise,
            "weight": self._weight,
            "squared_weight": self._squared_weight,
            "spread": self._spread,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take back what :meth:`state_dict` gave; without weights, what is given counts as settled and exact."""
        self.samples = int(state["samples"])
        self.signal, self.noise = float(state["signal"]), float(state["noise"])
        self._weight = float(state.get("weight", 1.0 / (1.0 - self.smoothing)))
        self._squared_weight = float(state.get("squared_weight", 1.0 / (1.0 - self.smoothing**2)))
        self._spread = float(state.get("spread", 0.0))


def folded_normal_mean(mean: float, deviation: float) -> float:
    """``E|X|`` for a normal ``X``.

    Example:
        >>> round(folded_normal_mean(1.0, 0.5), 5)
        1.00849
    """
    if deviation <= 0:
        return abs(mean)
    ratio = mean / deviation
    below = 0.5 * math.erfc(ratio / math.sqrt(2))
    return deviation * math.sqrt(2 / math.pi) * math.exp(-ratio * ratio / 2) + mean * (1 - 2 * below)


def walk(
    start: float, drift: float, deviation: float, merged: Sequence[int], gains: Sequence[float], steps: int
) -> float:
    """Expected distance of the loss from its floor after ``steps`` steps of a Gaussian walk that the floor reflects.

    One update of ``M`` merged steps goes down by ``gain * drift``, with deviation ``gain * deviation / sqrt(M)``.

    Args:
        start: distance from the floor at the beginning.
        drift: by how much one synchronous update lowers the loss on average.
        deviation: standard deviation of that.
        merged: steps of the generations in a cycle.
        gains: learning-rate gain of each.
        steps: training steps; ends after the last generation that fits.
    """
    level, used, place = start, 0, 0
    while used + merged[place] <= steps:
        size, factor = merged[place], gains[place]
        level = folded_normal_mean(level - factor * drift, factor * deviation / math.sqrt(size))
        used += size
        place = (place + 1) % len(merged)
    return level


def walk_ratio(
    start: float, drift: float, deviation: float, merged: Sequence[int], gains: Sequence[float], steps: int = 600
) -> float:
    """Distance from the floor with an update a step, divided by that with the plan's generations: 1 is no loss.

    Example:
        >>> round(walk_ratio(2.0, 0.002, 0.05, [2], [2.0]), 3), round(walk_ratio(2.0, 0.002, 0.05, [2], [1.0]), 3)
        (1.0, 0.571)
    """
    plain = walk(start, drift, deviation, [1], [1.0], steps)
    return plain / walk(start, drift, deviation, merged, gains, steps)


def largest_curvature(momentum: float, delayed: bool, nesterov: bool = False, spike: bool = False) -> float:
    """Learning rate times curvature up to which gradient descent is stable on a quadratic.

    Args:
        momentum: of the optimizer.
        delayed: gradients come one update late.
        nesterov: the optimizer's momentum is Nesterov's, as torch has it.
        spike: late gradients are weighted by :func:`~crossover.schedulers.spike.spike_weights`.

    Example:
        >>> largest_curvature(0.9, delayed=False), round(largest_curvature(0.9, delayed=True), 3)
        (3.8, 0.1)
        >>> round(largest_curvature(0.9, delayed=True, spike=True), 3)
        0.299
    """
    if delayed and spike:
        weights = spike_weights(momentum)
    elif nesterov:
        weights = (momentum, 1.0)
    else:
        return 1.0 - momentum if delayed else 2.0 * (1.0 + momentum)
    return _bisect(lambda product: _radius(product, momentum, weights, delayed) < 1.0)


def _radius(product: float, momentum: float, weights: tuple[float, float], delayed: bool) -> float:
    """Spectral radius of momentum on a quadratic with this learning rate times curvature.

    An update is so much of the momentum buffer and so much of the gradient by itself, as ``weights`` say.
    """
    of_buffer, of_gradient = weights
    polynomial = np.zeros(4 if delayed else 3)
    polynomial[:3] += [1.0, -(1 + momentum), momentum]
    place = 2 if delayed else 1
    polynomial[place] += product * (of_buffer + of_gradient)
    polynomial[place + 1] -= product * of_gradient * momentum
    return float(np.abs(np.roots(polynomial)).max())


def _bisect(stable: Callable[[float], bool]) -> float:
    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to schedule, with what it promises.

    Attributes:
        name: ``"synchronous"`` or what it may do, for the log.
        limits: what its plan may do; ``None`` for the synchronous schedule.
        step_ticks: mean time of a step.
        efficiency: progress per sample, 1 for an update a step.
    """

    name: str
    limits: Limits | None
    step_ticks: float
    efficiency: float

    def __str__(self) -> str:
        return f"{self.step_ticks:.0f} us at efficiency {self.efficiency:.3f}"

    @property
    def cost(self) -> float:
        """Time per progress; the smaller the better."""
        return self.step_ticks / self.efficiency if self.efficiency > 0 else math.inf


def choose(candidates: Sequence[Candidate], tolerance: float, least_gain: float = 0.03) -> Candidate:
    """The candidate that makes most progress in time and loses no more than ``tolerance`` of it per sample.

    Args:
        candidates: the first is the synchronous one, which is always allowed.
        tolerance: efficiency lost at most.
        least_gain: what a delay has to save in time at least, as a part of the synchronous step.

    Example:
        >>> sync, delayed = Candidate("synchronous", None, 200, 1.0), Candidate("1", Limits(), 120, 0.995)
        >>> choose([sync, delayed], tolerance=0.01).name, choose([sync, delayed], tolerance=0.001).name
        ('1', 'synchronous')
    """
    synchronous = candidates[0]
    allowed = [c for c in candidates[1:] if c.efficiency >= 1.0 - tolerance]
    best = min(allowed, key=lambda c: c.cost, default=synchronous)
    return best if best.cost <= synchronous.cost * (1.0 - least_gain) else synchronous
