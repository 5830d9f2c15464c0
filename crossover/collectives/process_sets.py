"""Subsets of ranks that run collectives among themselves, with Horovod's names."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossover import runtime
from crossover.collectives.checking import require_equal
from crossover.comm.communicator import Communicator


class ProcessSet:
    """Some of the job's ranks. Pass it to ``init(process_sets=[...])`` or :func:`add_process_set`, then to collectives.

    As in Horovod, collectives on a process set name ranks (``root_rank``) by their number in the whole job, and results
    that are indexed by rank follow :attr:`ranks`. After ``shutdown()`` a set has to be added again.

    Args:
        ranks: numbers of the members in the whole job; sorted by the set.

    Raises:
        ValueError: ``ranks`` is not a sequence of different whole numbers from 0.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> first = xo.add_process_set([0]) if xo.size() > 1 else xo.global_process_set
        >>> if first.included():
        ...     xo.allreduce(torch.ones(2), op=xo.Sum, process_set=first).tolist()
        [1.0, 1.0]
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = _checked_ranks(ranks)
        self._number: int | None = None
        self._world: weakref.ref[Communicator] | None = None
        self._communicator: Communicator | None = None

    @property
    def ranks(self) -> list[int]:
        """The members in the order of their rank within the set."""
        return list(self._ranks)

    @property
    def process_set_id(self) -> int | None:
        """The same number on all ranks, or ``None`` while the set is not added. The global set is 0."""
        return self._number if self._active else None

    @property
    def communicator(self) -> Communicator | None:
        """The members' communicator; ``None`` on a rank that is no member.

        Raises:
            ValueError: the set has not been added.
        """
        if not self._active:
            raise ValueError(
                f"process_set: {self} has not been added since init(); pass it to crossover.init(process_sets=[...]) "
                "or to crossover.add_process_set on every rank"
            )
        return self._communicator

    @property
    def _active(self) -> bool:
        return self._number is not None and self._world is not None and self._world() is _world()

    def included(self) -> bool:
        """Whether this rank is a member."""
        return _world().rank in self._ranks

    def size(self) -> int | None:
        """Number of members, or ``None`` while the set is not added."""
        return len(self._ranks) if self._active else None

    def rank(self) -> int | None:
        """This rank's place in the set; ``None`` while the set is not added or where this rank is no member."""
        return self._ranks.index(_world().rank) if self._active and self.included() else None

    def __str__(self) -> str:
        return f"{type(self).__name__}(process_set_id={self._number}, ranks={self.ranks})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessSet, (self.ranks,)  # a communicator stays in its process

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self  # a copied module goes on using the same ranks


class _GlobalProcessSet(ProcessSet):
    """All ranks of the job, whatever job that is at the moment."""

    def __init__(self) -> None:
        super().__init__([0])

    @property
    def ranks(self) -> list[int]:
        return list(range(_world().size)) if runtime.is_initialized() else []

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def communicator(self) -> Communicator:
        return _world()

    def included(self) -> bool:
        return True

    def size(self) -> int:
        return _world().size

    def rank(self) -> int:
        return _world().rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_global_set, ()


def _the_global_set() -> ProcessSet:
    return global_process_set


def _world() -> Communicator:
    return runtime.context().communicator


def _checked_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    given = list(ranks) if isinstance(ranks, Sequence | range | set | frozenset) else None
    valid = given and all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in given)
    if not given or not valid or len(set(given)) != len(given):
        raise ValueError(f"ranks: is {ranks!r}; pass a list of different rank numbers, such as ProcessSet([0, 2])")
    return tuple(sorted(given))


@dataclass(slots=True)
class _Registry:
    """The sets of one job, by their ranks."""

    world: Communicator
    sets: dict[tuple[int, ...], ProcessSet]
    added: int = 0


global_process_set: ProcessSet = _GlobalProcessSet()
_registry: _Registry | None = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set usable. Collective over all ranks of the job, members or not.

    Args:
        process_set: the set, or the ranks of one to be made.

    Returns:
        The set.

    Raises:
        ValueError: a set of these ranks exists, or a rank is not in the job.
        RankMismatchError: ranks were given different sets; raised on every rank.
    """
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world = _world()
    ranks = tuple(chosen.ranks)
    require_equal(world, "add_process_set", world.all_gather_object(list(ranks), name="process_set.ranks"))
    registry = _registry_of(world)
    if chosen is global_process_set or ranks in registry.sets:
        raise ValueError(f"process_set: one of ranks {list(ranks)} exists already; use that one")
    if ranks[-1] >= world.size:
        raise ValueError(f"process_set: rank {ranks[-1]} is not in this job, whose ranks are 0 to {world.size - 1}")
    registry.added += 1
    chosen._communicator = world.new_group(ranks, name=f"process_set{registry.added}")
    chosen._world = weakref.ref(world)
    chosen._number = registry.added
    registry.sets[ranks] = chosen
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set. All ranks call it, with nothing in flight on the set.

    Returns:
        Whether there was anything to give up: ``False`` for the global set and for one that is not added.
    """
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    del _registry_of(_world()).sets[tuple(process_set.ranks)]
    process_set._number = None
    if process_set._communicator is not None:
        process_set._communicator.close()
        process_set._communicator = None
    return True


def register_process_sets(process_sets: Sequence[ProcessSet] | str | None) -> None:
    """Carry out ``init(process_sets=...)``. Collective over all ranks of the job.

    Args:
        process_sets: sets to add in this order; ``None`` and ``"dynamic"`` add none (sets may be added at any time).

    Raises:
        ValueError: of another type, or as :func:`add_process_set`.
    """
    if process_sets is None or process_sets == "dynamic":
        return
    if isinstance(process_sets, str) or not all(isinstance(entry, ProcessSet) for entry in process_sets):
        raise ValueError(f"process_sets: is {process_sets!r}; pass a list of crossover.ProcessSet, or 'dynamic'")
    for process_set in process_sets:
        add_process_set(process_set)


def members(process_set: ProcessSet | None) -> Communicator:
    """The communicator for a collective of this rank on ``process_set``; ``None`` is the whole job.

    Raises:
        ValueError: the set has not been added, or this rank is no member.
    """
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set: is {process_set!r}; pass a crossover.ProcessSet")
    communicator = (process_set or global_process_set).communicator
    if communicator is None:
        raise ValueError(
            f"process_set: rank {_world().rank} is no member of {process_set}; call collectives on it only where "
            "process_set.included()"
        )
    return communicator


def group_rank(communicator: Communicator, rank: int, argument: str = "root_rank") -> int:
    """The place in ``communicator`` of the rank numbered ``rank`` in the whole job.

    Raises:
        ValueError: it is no member.
    """
    if isinstance(rank, bool) or rank not in communicator.ranks:
        raise ValueError(f"{argument}: {rank!r} is none of the ranks that take part, {list(communicator.ranks)}")
    return communicator.ranks.index(rank)


def _registry_of(world: Communicator) -> _Registry:
    global _registry
    if _registry is None or _registry.world is not world:  # init() after shutdown() starts a new job
        _registry = _Registry(world, {tuple(range(world.size)): global_process_set})
    return _registry
