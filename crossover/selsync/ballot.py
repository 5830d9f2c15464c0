"""What ranks tell each other in one small all-reduce: their votes, and what else has to be known before they go on.

Everything that a gate sends besides averages is such a ballot, of one shape. So a rank that steps and one that flushes
or has left out its step meet in one collective, and all of them learn of it, where two collectives would hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from crossover.accounted import AccountedReduction
from crossover.errors import RankMismatchError
from crossover.reduction import Reduction
from crossover.selsync.smoothing import votes_needed

MOST_NAMED_VOTERS = 62
LAYOUT_BITS = 24


class Field(IntEnum):
    """Places in a ballot. Each rank puts in 0 or 1 unless said otherwise, and learns the sum."""

    WANTS = 0
    VOTERS = 1  # 1 << rank of those who want to share
    RULE = 2
    UNUSABLE = 3
    ABSENT = 4
    STEPPED = 5
    IDLE = 6
    GROWN = 7
    RESTORED = 8
    AVERAGING = 9
    FLUSHING = 10
    APART = 11
    LAYOUT = 12  # a number of up to LAYOUT_BITS bits, and its square: see same_everywhere()
    LAYOUT_SQUARED = 13


@dataclass(frozen=True, slots=True)
class Decision:
    """What the ranks decided together; equal on all of them.

    Attributes:
        shared: whether this step is shared.
        votes: how many ranks found their update worth sharing.
        voters: which, as group ranks; empty in groups of more than 62.
        forced: whether a rule asked for it, whatever the votes.
        unusable: how many ranks hold an infinity or NaN in their gradients.
        absent: how many ranks only stand in because they have no data left.
        grown: whether a rank has parameters that are new.
        restored: whether a rank has loaded a state.
        voted: whether ranks were asked at all.
    """

    shared: bool
    votes: int = 0
    voters: tuple[int, ...] = ()
    forced: bool = False
    unusable: int = 0
    absent: int = 0
    grown: bool = False
    restored: bool = False
    voted: bool = True

    @property
    def reason(self) -> str:
        """In a few words."""
        if not self.voted:
            return "local: no vote is due"
        if self.shared:
            return f"shared: {self.votes} voted for it" if self.votes else "shared: a rule asked for it"
        return f"local: {self.votes} voted for sharing"


class Ballot:
    """One ballot on its way.

    Args:
        reduction: whose ranks take part.
        facts: what this rank puts in, by field; whole numbers, or tensors of one element, which may live elsewhere.
    """

    def __init__(self, reduction: Reduction, facts: Mapping[Field, int | Tensor]) -> None:
        self._reduction = reduction
        self._facts = facts
        numbers = [0 if isinstance(fact := facts.get(field, 0), Tensor) else int(fact) for field in Field]
        tensor = torch.tensor(numbers, dtype=torch.int64, device=reduction.communicator.control_device)
        elsewhere = {field: fact for field, fact in facts.items() if isinstance(fact, Tensor)}
        if elsewhere:
            fetched = torch.stack([fact.reshape(()).long() for fact in elsewhere.values()])  # one copy: each waits
            tensor[list(elsewhere)] = fetched.to(tensor.device)
        self._pending = AccountedReduction(reduction, tensor, name="vote")

    def counts(self) -> list[int]:
        """The sum over ranks of each field. Waits.

        Raises:
            RankMismatchError: on every rank: they are not doing the same.
        """
        counts: list[int] = self._pending.wait().tolist()
        size = self._reduction.communicator.size
        if counts[Field.STEPPED] and counts[Field.IDLE]:
            raise RankMismatchError(
                f"step(): rank {self._ranks_with(Field.IDLE)} did not call it after a backward pass, and the "
                "other ranks did, so ranks are out of step; decide by values that are equal on all ranks, such as "
                "those of crossover.allreduce; a GradScaler that skips has to be known to the gate: grad_scaler=scaler"
            )
        if counts[Field.RESTORED] not in (0, size - counts[Field.ABSENT]):
            raise RankMismatchError(
                f"load_state_dict(): rank {self._ranks_with(Field.RESTORED)} loaded a state in the midst of training, "
                "and the other ranks did not, so they count differently; load it on every rank, or on one rank before "
                "the first step"
            )
        if counts[Field.FLUSHING] not in (0, size):
            raise RankMismatchError(
                f"flush(): rank {self._ranks_with(Field.FLUSHING)} called it, or left the job, while the other ranks "
                "train on; flush, evaluate, save and leave at the same step on every rank, or call crossover.join() "
                "on a rank that has no data left"
            )
        if counts[Field.AVERAGING] not in (0, size):
            raise RankMismatchError(
                f"step(): rank {self._ranks_with(Field.AVERAGING)} averages parameters while the other ranks are at "
                "another step; call step() equally often on every rank"
            )
        return counts

    def _ranks_with(self, field: Field) -> str:
        """Global ranks that put something into ``field``. Collective: all have seen the same counts."""
        communicator = self._reduction.communicator
        said = communicator.all_gather_object(bool(self._facts.get(field)), name=f"{self._reduction.name}.vote.ranks")
        return ", ".join(str(rank) for rank, is_set in zip(communicator.ranks, said, strict=True) if is_set)


def same_everywhere(total: int, squares: int, size: int) -> bool:
    """Whether ``size`` numbers with this sum and this sum of squares are all equal."""
    return size * squares == total * total


def decision_of(counts: list[int], size: int, quorum: float | None) -> Decision:
    """What follows from a ballot's counts among ``size`` ranks.

    Example:
        >>> counts = [0] * len(Field)
        >>> counts[Field.WANTS], counts[Field.VOTERS] = 1, 0b10
        >>> decision_of(counts, 4, None).shared, decision_of(counts, 4, 0.5).shared, decision_of(counts, 4, None).voters
        (True, False, (1,))
    """
    votes, absent = counts[Field.WANTS], counts[Field.ABSENT]
    forced = bool(counts[Field.RULE])
    return Decision(
        shared=forced or (votes > 0 and votes >= votes_needed(quorum, size - absent)),
        votes=votes,
        voters=tuple(rank for rank in range(MOST_NAMED_VOTERS) if counts[Field.VOTERS] >> rank & 1),
        forced=forced,
        unusable=counts[Field.UNUSABLE],
        absent=absent,
        grown=bool(counts[Field.GROWN]),
        restored=bool(counts[Field.RESTORED]),
    )
