"""Which parameters share a bucket, worked out from what all ranks said of their first backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from crossover.bucket_plan import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES, Item, plan_buckets
from crossover.parameters import NamedParameter


@dataclass(slots=True)
class BucketOptions:
    """How parameters are put into buckets.

    Attributes:
        cap_bytes: size at which a bucket is closed.
        first_cap_bytes: the same for the first bucket, which is small so that sending starts early.
        num_groups: instead, share the parameters out to this many buckets.
        groups: ids of parameters that have to share a bucket, one set a bucket.
        sparse_as_dense: send sparse gradients as dense ones.
    """

    cap_bytes: int = DEFAULT_CAP_BYTES
    first_cap_bytes: int = DEFAULT_FIRST_CAP_BYTES
    num_groups: int = 0
    groups: tuple[frozenset[int], ...] = ()
    sparse_as_dense: bool = False


def arrange(
    parameters: Sequence[NamedParameter],
    facts: Sequence[dict[str, Any]],
    options: BucketOptions,
    cap_bytes: int | None = None,
) -> tuple[list[NamedParameter], list[list[tuple[int, str, Tensor]]]]:
    """Share out parameters to buckets; the same result on every rank for the same facts.

    Args:
        parameters: those that have no bucket yet.
        facts: from each rank, ``"order"``: indices into ``parameters`` as their gradients arrived, and ``"sparse"``:
            indices of those whose gradient was sparse.
        options: the user's wishes.
        cap_bytes: a schedule's own size for all buckets, instead of the user's.

    Returns:
        The parameters that travel as sparse ones, and for each bucket its ``(index, name, parameter)`` in order of
        arrival.
    """
    sparse: set[int] = set()
    if not options.sparse_as_dense:
        sparse = {number for rank_facts in facts for number in rank_facts["sparse"]}
    arrived = [number for rank_facts in facts for number in rank_facts["order"]]
    # Those unused so far stand behind the others and hold nothing back; the last declared is likely the first to
    # arrive.
    order = [n for n in dict.fromkeys([*arrived, *range(len(parameters) - 1, -1, -1)]) if n not in sparse]
    items = _items(parameters, order, options)
    plan = plan_buckets(items, order, cap_bytes or options.cap_bytes, cap_bytes or options.first_cap_bytes)
    members = [[(n, parameters[n].name, parameters[n].tensor) for n in bucket] for bucket in plan]
    return [parameters[number] for number in sorted(sparse)], members


def _items(parameters: Sequence[NamedParameter], order: Sequence[int], options: BucketOptions) -> list[Item]:
    share = -(-len(order) // options.num_groups) if options.num_groups else 0
    place = {number: position for position, number in enumerate(order)}
    items = []
    for number, parameter in enumerate(parameters):
        tensor = parameter.tensor
        group = place.get(number, 0) // share if share else None
        for group_number, members in enumerate(options.groups):
            if id(tensor) in members:
                group = group_number
        items.append(Item(tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.device), group))
    return items
