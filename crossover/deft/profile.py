"""What was measured of a job: computing per bucket, all-reduce per bucket and link, in whole microseconds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crossover.deft.cost import BucketTimes

FORMAT = "crossover profile 1"


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of one training step, in microseconds; bucket 0 is nearest the input.

    Across ranks: :func:`agreed` makes one out of all ranks' own, so that every rank plans with the same numbers.

    Attributes:
        forward_us: forward of the layers of each bucket.
        backward_us: backward of the layers of each bucket.
        between_us: from the end of backward to the start of forward: the update, loading data.
        reduce_us: ``reduce_us[k][i]``: all-reduce of bucket ``i`` on link ``k``, while training runs.
        nbytes: what travels of each bucket.
        links: name of each link, the fast one first.
        size: ranks of the job.
        steps: training steps that were measured.
        noise_scale: gradient noise scale in batches of one rank, estimated cautiously; ``None``: not known.
        significance: SelSync's relative change of the gradient's norm, by rank and step; empty where not watched.

    Raises:
        ValueError: numbers of entries differ.

    Example:
        >>> profile = Profile((10, 10), (20, 20), 0, ((8, 12),), (100, 150), ("gloo",), size=2, steps=20)
        >>> round(profile.coverage_rate, 2)
        0.33
    """

    forward_us: tuple[int, ...]
    backward_us: tuple[int, ...]
    between_us: int
    reduce_us: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    links: tuple[str, ...]
    size: int = 1
    steps: int = 0
    noise_scale: float | None = None
    significance: tuple[tuple[float | None, ...], ...] = ()

    def __post_init__(self) -> None:
        self.times()
        if len(self.nbytes) != len(self.forward_us) or len(self.links) != len(self.reduce_us):
            raise ValueError(
                f"Profile: has {len(self.forward_us)} buckets, {len(self.nbytes)} sizes, {len(self.links)} names of "
                f"links and {len(self.reduce_us)} rows of times; give one size a bucket and one name a link"
            )

    def times(self) -> BucketTimes:
        """The same for the planner; a tick is a microsecond."""
        return BucketTimes(self.forward_us, self.backward_us, self.reduce_us, self.between_us)

    def on_links(self, count: int) -> Profile:
        """The same with the first ``count`` links only."""
        return replace(self, reduce_us=self.reduce_us[:count], links=self.links[:count])

    @property
    def coverage_rate(self) -> float:
        """Communication on the fast link divided by computing."""
        return self.times().coverage_rate

    def as_json(self) -> str:
        """As text; :meth:`from_json` takes it back."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that :meth:`as_json` wrote.

        Raises:
            ValueError: it is none.
        """
        try:
            value = json.loads(text)
            if value.pop("format") != FORMAT:
                raise KeyError("format")
            rows = ("forward_us", "backward_us", "nbytes", "links")
            fields: dict[str, Any] = {key: tuple(entry) if key in rows else entry for key, entry in value.items()}
            fields["reduce_us"] = tuple(map(tuple, value["reduce_us"]))
            fields["significance"] = tuple(map(tuple, value.get("significance", ())))
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"profile: {text!r:.60} is none ({type(error).__name__}: {error}); write one with Profile.save() or "
                "crossover profile"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(self.as_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file holds no profile.
        """
        return cls.from_json(Path(path).read_text())


def agreed(profiles: Sequence[Profile]) -> Profile:
    """One profile out of every rank's own.

    Computing takes as long as on the slowest rank, whose pace all keep. A transfer takes as long as on the rank where
    it was shortest: on the others part of the time went by until the last rank had come.

    Example:
        >>> fast = Profile((10,), (20,), 0, ((30,),), (100,), ("gloo",), 2, 20)
        >>> slow = Profile((12,), (24,), 0, ((25,),), (100,), ("gloo",), 2, 20)
        >>> agreed([fast, slow]).times()
        BucketTimes(forward=(12,), backward=(24,), reduce=((25,),), between=0)
    """
    first = profiles[0]

    def each(rows: Sequence[Sequence[int]], choose: Callable[..., int]) -> tuple[int, ...]:
        return tuple(choose(column) for column in zip(*rows, strict=True))

    return Profile(
        forward_us=each([profile.forward_us for profile in profiles], max),
        backward_us=each([profile.backward_us for profile in profiles], max),
        between_us=max(profile.between_us for profile in profiles),
        reduce_us=tuple(
            each([profile.reduce_us[link] for profile in profiles], min) for link in range(len(first.links))
        ),
        nbytes=first.nbytes,
        links=first.links,
        size=first.size,
        steps=min(profile.steps for profile in profiles),
    )


def medians(rows: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The median of each column, as whole numbers of 0 or more.

    Example:
        >>> medians([[1, 10], [2, 20], [9, 90]])
        (2, 20)
    """
    return tuple(max(round(statistics.median(column)), 0) for column in zip(*rows, strict=True))
