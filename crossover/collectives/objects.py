"""Any picklable object from one rank to all, or from all to all."""

from __future__ import annotations

import pickle
from typing import Any

from crossover.collectives import handles
from crossover.collectives.checking import verify
from crossover.collectives.process_sets import ProcessSet, global_process_set, group_rank, members

try:
    import cloudpickle as pickler  # comes with Horovod; takes lambdas and classes of the main script too
except ImportError:
    pickler = pickle


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The ``obj`` of rank ``root_rank``, on every rank.

    Receivers unpickle what the root sent: for jobs whose ranks trust each other.

    Args:
        obj: picklable on the root; ignored on other ranks.
        root_rank: who sends, by its number in the whole job.
        name: for messages, and for matching calls under Horovod.
        process_set: the ranks that take part.

    Returns:
        On the root ``obj`` itself, elsewhere a copy.

    Raises:
        ValueError: ``root_rank`` takes no part.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import crossover as xo
        >>> xo.init()
        >>> xo.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    communicator = members(process_set)
    root = group_rank(communicator, root_rank)
    label = handles.full_name(communicator, "broadcast_object", name)
    verify(communicator, label, f"from rank {root_rank}")
    is_root = communicator.rank == root
    data = communicator.broadcast_object(dumps(obj) if is_root else None, root, name=label)
    return obj if is_root else loads(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every rank's ``obj``, in the order of ranks.

    Ranks unpickle what the others sent: for jobs whose ranks trust each other.

    Args:
        obj: picklable; may differ in kind and size between ranks.
        name: for messages, and for matching calls under Horovod.
        process_set: the ranks that take part.

    Returns:
        Copies, this rank's own included.

    Raises:
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import crossover as xo
        >>> xo.init()
        >>> len(xo.allgather_object("any")) == xo.size()
        True
    """
    communicator = members(process_set)
    label = handles.full_name(communicator, "allgather_object", name)
    verify(communicator, label, "")
    return [loads(data) for data in communicator.all_gather_object(dumps(obj), name=label)]


def dumps(obj: Any) -> bytes:
    """``obj`` as bytes, for a peer's :func:`loads`."""
    data: bytes = pickler.dumps(obj)
    return data


def loads(data: bytes) -> Any:
    """The object that :func:`dumps` was given; runs what the peer packed."""
    return pickle.loads(data)
