"""Which parameters travel together: a pure function of their sizes and of the order in which gradients arrive."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MEBIBYTE = 1 << 20
DEFAULT_CAP_BYTES = 25 * MEBIBYTE
DEFAULT_FIRST_CAP_BYTES = MEBIBYTE  # the first bucket is small so that communication starts early in backward


@dataclass(frozen=True, slots=True)
class Item:
    """What the planner has to know of one parameter.

    Attributes:
        nbytes: size of its gradient in bytes.
        kind: parameters of different kinds (dtype, device) never share a bucket.
        group: parameters that the user grouped share one bucket of their own, or ``None``.
    """

    nbytes: int
    kind: Hashable
    group: int | None = None


def plan_buckets(
    items: Sequence[Item],
    order: Sequence[int],
    cap_bytes: int = DEFAULT_CAP_BYTES,
    first_cap_bytes: int = DEFAULT_FIRST_CAP_BYTES,
) -> list[list[int]]:
    """Share out parameters to buckets in the order in which their gradients become ready.

    A bucket is closed once it holds ``cap_bytes`` or more (``first_cap_bytes`` for the first of its kind); a user's
    group is never cut nor mixed.

    Args:
        items: one entry a parameter.
        order: indices into ``items`` in the order in which gradients arrive, each once.
        cap_bytes: size at which a bucket is closed.
        first_cap_bytes: the same for the first bucket of each kind.

    Returns:
        Lists of indices. Buckets stand in the order in which they fill, so they can be sent one after the other.

    Example:
        >>> plan_buckets([Item(4, "f"), Item(4, "f"), Item(4, "f")], order=[2, 1, 0], cap_bytes=8, first_cap_bytes=4)
        [[2], [1, 0]]
    """
    opened: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    limits: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for index in order:
        item = items[index]
        key = (item.kind, item.group)
        if key not in opened:
            opened[key] = []
            filled[key] = 0
            buckets.append(opened[key])
        opened[key].append(index)
        filled[key] += item.nbytes
        if item.group is None and filled[key] >= limits.get(key, first_cap_bytes):
            limits[key] = cap_bytes
            del opened[key]
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])
