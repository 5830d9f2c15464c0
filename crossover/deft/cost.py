"""What computing and communication cost, in whole numbers that are equal on every rank.

Sources: the coverage rate is the paper's notion (Meng and Sun, DeFT, arXiv 2503.16815; the abstract gives the meaning,
the exact fraction is our reading). The linear link model is the usual one, ``t = alpha + beta * bytes``. The rule for a
second link, the smallest bucket and the ticks are our choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAXIMUM_TICKS = 2000  # of a stage: bounds the work of the exact solver
LATENCY_SHARE = 4  # a bucket's bytes take at least this many times its latency


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """Times of one training step, in whole ticks of any length; bucket 0 is nearest the input.

    Attributes:
        forward: of the layers of each bucket.
        backward: of the layers of each bucket; gradients become ready from the last bucket to the first.
        reduce: ``reduce[k][i]`` is the all-reduce of bucket ``i`` on link ``k``; link 0 is the fastest.
        between: what lies between the end of backward and the next forward: the optimizer's update, loading data.

    Raises:
        ValueError: lengths differ, there is no link or no bucket, or a time is no whole number of 0 or more.

    Example:
        >>> BucketTimes((10, 10), (20, 20), ((8, 12),)).coverage_rate
        0.3333333333333333
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    reduce: tuple[tuple[int, ...], ...]
    between: int = 0

    def __post_init__(self) -> None:
        rows = {"forward": self.forward, "backward": self.backward}
        rows.update({f"reduce[{link}]": row for link, row in enumerate(self.reduce)})
        if not self.forward or not self.reduce:
            raise ValueError("BucketTimes: holds no bucket or no link; give at least one of each")
        for name, row in rows.items():
            if len(row) != len(self.forward):
                raise ValueError(f"{name}: has {len(row)} entries; give one for each of {len(self.forward)} buckets")
        for name, row in [*rows.items(), ("between", (self.between,))]:
            if any(not isinstance(ticks, int) or ticks < 0 for ticks in row):
                raise ValueError(f"{name}: is {row}; times are whole numbers of ticks, 0 or more")

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.forward)

    @property
    def links(self) -> int:
        """Number of links."""
        return len(self.reduce)

    @property
    def forward_window(self) -> int:
        """Ticks from the end of one backward pass to the start of the next: transfers hide under it."""
        return sum(self.forward) + self.between

    @property
    def backward_window(self) -> int:
        """Ticks of the backward pass."""
        return sum(self.backward)

    @property
    def compute(self) -> int:
        """Ticks of a step without communication."""
        return self.forward_window + self.backward_window

    @property
    def coverage_rate(self) -> float:
        """Communication on the fast link divided by computing; infinite where there is no computing."""
        return sum(self.reduce[0]) / self.compute if self.compute else float("inf")

    def releases(self) -> tuple[int, ...]:
        """For each bucket, ticks from the start of backward until its gradients are ready."""
        ready, clock = [0] * self.buckets, 0
        for bucket in range(self.buckets - 1, -1, -1):
            clock += self.backward[bucket]
            ready[bucket] = clock
        return tuple(ready)


def tick(times: BucketTimes, maximum_ticks: int = MAXIMUM_TICKS) -> int:
    """How long a tick has to be so that no window has more than ``maximum_ticks``."""
    return -(-max(times.forward_window, times.backward_window, 1) // maximum_ticks)


def quantise(times: BucketTimes, maximum_ticks: int = MAXIMUM_TICKS) -> BucketTimes:
    """The same times in longer ticks, so that no window has more than ``maximum_ticks``; unchanged if none has.

    Transfers are rounded up and computing is rounded down, so that a plan never promises more than there is time for.
    Of backward, the times at which gradients are ready are rounded up, and the window down.

    Example:
        >>> quantise(BucketTimes((6000,), (6000,), ((1001,),)), maximum_ticks=60)
        BucketTimes(forward=(60,), backward=(60,), reduce=((11,),), between=0)
    """
    unit = tick(times, maximum_ticks)
    if unit == 1:
        return times
    return BucketTimes(
        forward=_rounded_down(times.forward, unit),
        backward=_rounded_down(times.backward[::-1], unit)[::-1],
        reduce=tuple(tuple(-(-ticks // unit) for ticks in row) for row in times.reduce),
        between=times.between // unit,
    )


def _rounded_down(row: Sequence[int], unit: int) -> tuple[int, ...]:
    """Each entry in units of ``unit``; what rounding takes from one is left to the next, so that sums stay true."""
    rounded, exact, given = [], 0, 0
    for ticks in row:
        exact += ticks
        rounded.append(exact // unit - given)
        given += rounded[-1]
    return tuple(rounded)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """An all-reduce of ``n`` bytes takes ``latency_us + us_per_byte * n`` microseconds.

    Example:
        >>> LinkCost(latency_us=100.0, us_per_byte=0.01).microseconds(1_000_000)
        10100
    """

    latency_us: float
    us_per_byte: float

    def microseconds(self, nbytes: int) -> int:
        """Time of one all-reduce, rounded up."""
        return max(-int(-(self.latency_us + self.us_per_byte * nbytes) // 1), 1)

    def scaled(self, factor: float) -> LinkCost:
        """The same link where everything takes ``factor`` times as long."""
        return LinkCost(self.latency_us * factor, self.us_per_byte * factor)

    @property
    def smallest_bucket(self) -> int:
        """Bytes below which latency takes more than a fifth of an all-reduce."""
        return int(LATENCY_SHARE * self.latency_us / self.us_per_byte) if self.us_per_byte > 0 else 1


def fit_link(samples: Sequence[tuple[int, float]]) -> LinkCost:
    """Least squares through ``(bytes, microseconds)``; neither part is allowed below zero.

    Raises:
        ValueError: no sample.

    Example:
        >>> fit_link([(0, 50.0), (1000, 150.0), (2000, 250.0)])
        LinkCost(latency_us=50.0, us_per_byte=0.1)
    """
    if not samples:
        raise ValueError("samples: is empty; time at least one all-reduce")
    count = len(samples)
    mean_bytes = sum(nbytes for nbytes, _ in samples) / count
    mean_us = sum(us for _, us in samples) / count
    spread = sum((nbytes - mean_bytes) ** 2 for nbytes, _ in samples)
    if not spread:
        return LinkCost(0.0, mean_us / mean_bytes if mean_bytes else 0.0)
    slope = max(sum((nbytes - mean_bytes) * (us - mean_us) for nbytes, us in samples) / spread, 0.0)
    latency = mean_us - slope * mean_bytes
    if latency < 0:
        return LinkCost(0.0, mean_us / mean_bytes)
    return LinkCost(latency, slope)


def second_link_pays(alone_us: float, together_us: Sequence[float], threshold: float = 1.1) -> bool:
    """Whether links that run at the same time carry clearly more than the fast one by itself.

    Args:
        alone_us: time of an all-reduce on the fast link while the others are idle.
        together_us: time of an equal all-reduce on each link while all are busy.
        threshold: how many times the fast link's own throughput is asked for.

    Example:
        >>> second_link_pays(100.0, [100.0, 165.0]), second_link_pays(100.0, [200.0, 200.0])
        (True, False)
    """
    return sum(1.0 / us for us in together_us if us > 0) > threshold / alone_us
