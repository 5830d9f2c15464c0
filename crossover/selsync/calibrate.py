"""Choosing ``delta``: from significance values that were watched to the threshold for a wanted share of local steps.

The paper (Tyagi and Swany, CLUSTER 2023) gives thresholds of 0.25 to 0.5 for its models and no way to find one; LSSR is
its measure (equation 4). The significance scales with the noise of the gradient, hence with model and batch size, and
one vote among more ranks is likelier: a threshold has to be found for each job. How it is found here is our choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossover.selsync.smoothing import check_delta, is_significant, votes_needed

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)


def lssr(votes: Iterable[bool | int]) -> float:
    """Local steps / all steps (the paper's equation 4): 0 is synchronous training, 1 is local training.

    Args:
        votes: what was decided at each step, true or 1 where ranks shared.

    Raises:
        ValueError: there is no step.

    Example:
        >>> lssr([1, 0, 0, 1])
        0.5
    """
    shared = [bool(vote) for vote in votes]
    if not shared:
        raise ValueError("votes: there are none; give the decision of at least one step")
    return 1 - sum(shared) / len(shared)


def shared_steps(
    values_by_rank: Sequence[Sequence[float | None]], delta: float, quorum: float | None = None
) -> list[bool]:
    """What a gate decides at each step, given every rank's significance: true where ranks share.

    Args:
        values_by_rank: significance by rank and step; ``None``, NaN and infinity are unknown and vote to share.
        delta: threshold.
        quorum: as for :func:`~crossover.selsync.smoothing.votes_needed`.

    Raises:
        ValueError: ranks have different numbers of steps, there are no ranks, or a setting is out of its range.

    Example:
        >>> shared_steps([[None, 0.1, 0.4], [None, 0.2, 0.1]], delta=0.3)
        [True, False, True]
    """
    check_delta(delta)
    _check_values(values_by_rank)
    needed = votes_needed(quorum, len(values_by_rank))
    return [
        sum(is_significant(_known(value), delta) for value in values) >= needed
        for values in zip(*values_by_rank, strict=True)
    ]


@dataclass(frozen=True)
class Calibration:
    """A threshold, and what it was found from. ``str()`` of it is a report.

    Attributes:
        delta: the threshold that was found.
        wanted_local_share: share of local steps that was asked for.
        local_share: share of the watched steps that are local with ``delta``.
        steps: number of watched steps that counted.
        left_out: steps of which no rank knew its significance (warm-up).
        unknown: steps that count as shared whatever ``delta`` is, as too many ranks did not know theirs.
        ranks: number of ranks.
        votes_needed: ranks that have to vote before all share.
        own_quantiles: quantiles of all ranks' values, by share.
        deciding_quantiles: the same for the value that decides a step: of the rank whose vote is the last one needed.
    """

    delta: float
    wanted_local_share: float
    local_share: float
    steps: int
    left_out: int
    unknown: int
    ranks: int
    votes_needed: int
    own_quantiles: Mapping[float, float]
    deciding_quantiles: Mapping[float, float]

    def __str__(self) -> str:
        rule = "any rank decides" if self.votes_needed == 1 else f"{self.votes_needed} votes decide"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks, {rule}"
        lines = [
            f"delta = {self.delta:.4g} for {self.wanted_local_share:.0%} local steps",
            f"watched {self.steps} steps on {ranks}: {self.local_share:.1%} of them would have been local",
            f"left out {self.left_out} steps of warm-up; {self.unknown} steps without a finite value count as shared",
            "share of steps below   one rank's value   value that decides",
        ]
        for share, own in self.own_quantiles.items():
            lines.append(f"{share:20.0%}   {own:16.4g}   {self.deciding_quantiles[share]:18.4g}")
        lines.append(
            "These values change in the course of training, and once steps are local: calibrate again where it matters."
        )
        return "\n".join(lines)


def suggest_delta(
    values_by_rank: Sequence[Sequence[float | None]], local_share: float, quorum: float | None = None
) -> Calibration:
    """The threshold with which the wanted share of the watched steps would have been local.

    A step is shared where the needed number of ranks reach ``delta``: its deciding value is the largest of the ranks'
    values for any-rank voting, the k-th largest where k votes are needed. ``delta`` is put half-way between two
    neighbouring deciding values, where the share of local steps is nearest to the wanted one (of two equally near, the
    more synchronous): 0 for no local step, just above the largest value for as many as there can be. Larger shares
    never give smaller ``delta``.

    The same on all ranks if ``values_by_rank`` is. Steps of which no rank knows its value are left out.

    Args:
        values_by_rank: significance by rank and step, of synchronous steps; ``None``, NaN and infinity are unknown.
        local_share: wanted share of local steps, 0 to 1.
        quorum: share of the ranks that has to vote; ``None``: any one rank.

    Raises:
        ValueError: no value is known, ranks have different numbers of steps, or a share is out of its range.

    Example:
        >>> values = [[None, 0.1, 0.2, 0.1, 0.5], [None, 0.3, 0.1, 0.1, 0.1]]
        >>> result = suggest_delta(values, local_share=0.5)
        >>> result.delta, result.local_share
        (0.25, 0.5)
    """
    if not 0 <= local_share <= 1:
        raise ValueError(
            f"local_share: is {local_share!r}; it has to be a share of the steps from 0 to 1, such as 0.75"
        )
    _check_values(values_by_rank)
    needed = votes_needed(quorum, len(values_by_rank))
    rows = [[_known(value) for value in values] for values in zip(*values_by_rank, strict=True)]
    watched = [row for row in rows if any(value is not None for value in row)]
    if not watched:
        raise ValueError(
            f"values_by_rank: no rank knows its significance in {len(rows)} steps; watch more than the warm-up takes"
        )
    deciding = sorted(_deciding_value(row, needed) for row in watched)
    delta, local = _threshold(deciding, local_share)
    own = [value for row in watched for value in row if value is not None]
    return Calibration(
        delta=delta,
        wanted_local_share=local_share,
        local_share=local / len(watched),
        steps=len(watched),
        left_out=len(rows) - len(watched),
        unknown=sum(value == math.inf for value in deciding),
        ranks=len(values_by_rank),
        votes_needed=needed,
        own_quantiles=_quantiles(own),
        deciding_quantiles=_quantiles(deciding),
    )


def _threshold(deciding: Sequence[float], local_share: float) -> tuple[float, int]:
    """``delta``, and how many of the sorted ``deciding`` values lie below it."""
    known = [value for value in deciding if value < math.inf]
    cuts = [place for place in range(1, len(known)) if known[place - 1] < known[place]]
    places = [0, *cuts, *([len(known)] if known else [])]
    local = min(places, key=lambda place: (abs(place / len(deciding) - local_share), place))
    if local == 0:
        return 0.0, 0
    below = known[local - 1]
    if local == len(known):
        return math.nextafter(below, math.inf), local
    middle = below + (known[local] - below) / 2
    return (middle if middle > below else known[local]), local


def _deciding_value(row: Sequence[float | None], needed: int) -> float:
    return sorted((math.inf if value is None else value for value in row), reverse=True)[needed - 1]


def _quantiles(values: Sequence[float]) -> dict[float, float]:
    found = np.quantile(np.asarray(values), QUANTILES, method="inverted_cdf")
    return {share: float(value) for share, value in zip(QUANTILES, found, strict=True)}


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _check_values(values_by_rank: Sequence[Sequence[float | None]]) -> None:
    if not values_by_rank:
        raise ValueError("values_by_rank: is empty; give one list of values for each rank")
    for rank, values in enumerate(values_by_rank):
        if len(values) != len(values_by_rank[0]):
            raise ValueError(
                f"values_by_rank: rank 0 has {len(values_by_rank[0])} steps and rank {rank} has {len(values)}; "
                "give every rank's values of the same steps"
            )
        for step, value in enumerate(values):
            if value is not None and value < 0:
                raise ValueError(
                    f"values_by_rank: rank {rank} has {value!r} at step {step}; a significance is 0 or more, or None"
                )
