"""Parameters that have no bucket yet: all ranks agree on them, and on the order in which their gradients arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from crossover.comm.communicator import Communicator
from crossover.errors import CommunicationError
from crossover.parameters import NamedParameter, agree, checksum, held_by_ddp, refuse_ddp, require_equal_weights
from crossover.sparse import is_sparse


def agree_on_newcomers(
    communicator: Communicator,
    newcomers: Sequence[NamedParameter],
    arrivals: Iterable[int],
    *,
    name: str,
    sums: Mapping[int, int] | None = None,
    may_differ: bool = False,
) -> list[dict[str, Any]]:
    """Compare parameters that are to be given buckets with those of all other ranks. Collective.

    Args:
        communicator: the ranks.
        newcomers: those of this rank; without any, ranks that have some are named, on every rank.
        arrivals: ids of parameters in the order in which their gradients arrived here; others may be among them.
        name: prefix of the collectives' names.
        sums: checksums by id, of parameters that may have changed since they were to be compared.
        may_differ: values are not compared.

    Returns:
        What :func:`crossover.layout.arrange` needs of each rank.

    Raises:
        RankMismatchError: on every rank: ranks have other newcomers, or other values in them.
        ValueError: on every rank: one of them belongs to a ``DistributedDataParallel`` model.
    """
    try:
        agree(communicator, newcomers, {}, name=name)
    except CommunicationError as error:
        names = ", ".join(repr(parameter.name) for parameter in newcomers[:3])
        raise CommunicationError(
            f"{error} (this rank was to agree with the others on {len(newcomers)} parameters that are new to it: "
            f"{names}{', ...' if len(newcomers) > 3 else ''})"
        ) from error
    place = {id(parameter.tensor): number for number, parameter in enumerate(newcomers)}
    facts = communicator.all_gather_object(
        {
            "order": [place[key] for key in arrivals if key in place],
            "sparse": [number for number, parameter in enumerate(newcomers) if is_sparse(parameter.tensor.grad)],
            "sums": [] if may_differ else [_sum_of(parameter, sums or {}) for parameter in newcomers],
            "ddp": held_by_ddp(newcomers),
        },
        name=f"{name}.order",
    )
    refuse_ddp([rank_facts["ddp"] for rank_facts in facts])
    if not may_differ:
        require_equal_weights(communicator, newcomers, [rank_facts["sums"] for rank_facts in facts])
    return facts


def _sum_of(parameter: NamedParameter, sums: Mapping[int, int]) -> int:
    known = sums.get(id(parameter.tensor))
    return checksum(parameter.tensor) if known is None else known
