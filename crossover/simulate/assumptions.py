"""What a prediction rests on: every number that was not measured in the job at hand, with where it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assumption:
    """One of them.

    Attributes:
        name: of what.
        value: as text, with its unit.
        source: paper, page or manual, or that it is our choice.
    """

    name: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value} [{self.source}]"


def listed(assumptions: Iterable[Assumption]) -> list[str]:
    """A line for each, equal ones once.

    Example:
        >>> listed([Assumption("ranks", "16", "asked for"), Assumption("ranks", "16", "asked for")])
        ['ranks: 16 [asked for]']
    """
    return list(dict.fromkeys(map(str, assumptions)))
