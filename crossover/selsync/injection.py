"""Data injection: ranks whose data differ in kind give each other a few samples at every step.

What is the paper's (section III-E): at each step a share ``alpha`` of the N ranks, drawn at random, sends a share
``beta`` of its batch to the others; ranks load fewer samples of their own, ``b' = b / (1 + alpha * beta * N)``
(equation 3), so that the batch stays about ``b``.

What is our choice, where the paper is silent: how numbers are rounded, that all ranks draw the same sharers, that a
rank never gets its own samples twice, and that every rank's batch has the same fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossover import runtime
from crossover.comm.communicator import Communicator, ReduceOp
from crossover.errors import RankMismatchError
from crossover.selsync.batch_tree import Leaf, check_samples, first_difference, rebuilt, sample_nbytes, tensors_of
from crossover.selsync.label_skew import label_skew_indices

__all__ = ["DataInjection", "InjectedLoader", "label_skew_indices", "reduced_batch_size"]

_ALIGNMENT_BYTES = 16  # so that a row of bytes can be read as any dtype


def reduced_batch_size(batch_size: int, alpha: float, beta: float, size: int) -> int:
    """Samples that a rank loads itself so that own and injected ones make about ``batch_size`` (equation 3).

    ``batch_size / (1 + alpha * beta * size)``, rounded to the nearest whole number (halves up), at least 1. It is
    ``batch_size`` where nothing is injected: one rank, or ``alpha`` or ``beta`` of 0.

    Args:
        batch_size: samples that one rank trains on per step.
        alpha: share of the ranks that send at each step, 0 to 1.
        beta: share of its own samples that such a rank sends, 0 to 1.
        size: number of ranks.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> reduced_batch_size(32, 0.5, 0.5, size=8), reduced_batch_size(32, 0.75, 0.75, size=8)
        (11, 6)
    """
    for name, share in (("alpha", alpha), ("beta", beta)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name}: is {share!r}; it has to be a share from 0 to 1, for example 0.5")
    for name, number in (("batch_size", batch_size), ("size", size)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}: is {number!r}; it has to be a positive whole number")
    return batch_size if size == 1 else _nearest(batch_size / (1 + alpha * beta * size))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _nearest(value: float) -> int:
    return max(1, math.floor(value + 0.5))


class DataInjection:
    """Completes each rank's batch by samples of other ranks, for data that are not alike on all ranks.

    Load batches of ``local_batch_size`` samples (``drop_last=True``), and iterate over :meth:`wrap` of the loader, or
    call the object on each batch. A batch is a tensor, or a tuple, list or mapping, nested at will, of tensors (and
    ``None``) whose first dimension counts samples. Every tensor is completed in the same way, on its own device.

    Across ranks: each call is a collective. ``ceil(alpha * size)`` ranks (``sharers_per_step``) send the first samples
    of their batches, ``beta * local_batch_size`` rounded to the nearest number, at least 1 (``shared_samples``). All
    ranks draw the same ranks from ``(seed, step)``. A rank that is drawn itself receives from one more that is drawn in
    its place: every batch on every rank has the same ``batch_size``, and none holds a sample twice. Rounding may move
    it away from the one asked for; where ``alpha`` asks for all ranks, it lacks one rank's share, as there are only
    ``size - 1`` others. Ranks that are not drawn send zeros: an all-gather moves ``size * shared_samples`` samples to
    every rank.

    All ranks need equally many batches; :meth:`wrap` ends after the smallest number that any rank has. With one rank,
    or ``alpha`` or ``beta`` of 0, batches pass through untouched and nothing is sent.

    Args:
        alpha: share of the ranks that send at each step, 0 to 1.
        beta: share of its own samples that such a rank sends, 0 to 1.
        batch_size: samples wanted in the completed batch of a rank.
        communicator: the ranks; default: all ranks of the job, on a channel of their own that is made now,
            collectively. Nothing else may use it meanwhile.
        seed: of the draws; equal on all ranks.

    Attributes:
        local_batch_size: samples to load on each rank.
        shared_samples: samples that one sharing rank sends.
        sharers_per_step: ranks from which each rank receives.
        batch_size: samples in each completed batch.
        step: number of batches completed so far.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> from crossover.comm import Solo
        >>> injection = DataInjection(0.5, 0.5, batch_size=32, communicator=Solo())
        >>> injection.local_batch_size, injection.batch_size
        (32, 32)
    """

    def __init__(
        self, alpha: float, beta: float, *, batch_size: int, communicator: Communicator | None = None, seed: int = 0
    ) -> None:
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed: is {seed!r}; it has to be a whole number, 0 or more, equal on all ranks")
        size = communicator.size if communicator is not None else runtime.size()
        self.local_batch_size = reduced_batch_size(batch_size, alpha, beta, size)
        active = size > 1 and alpha > 0 and beta > 0
        self.sharers_per_step = min(math.ceil(alpha * size - 1e-9), size - 1) if active else 0
        self.shared_samples = _nearest(beta * self.local_batch_size) if active else 0
        self.batch_size = self.local_batch_size + self.sharers_per_step * self.shared_samples
        self.seed = seed
        self.step = 0
        if communicator is None:
            communicator = runtime.context().communicator.duplicate(name="selsync.injection")
        self.communicator = communicator
        self._agreed: list[Leaf] | None = None

    def drawn(self, step: int) -> list[int]:
        """The ranks that send at ``step``, in the order drawn; equal on all ranks.

        One more than each rank receives from: it stands in wherever a rank was drawn itself.
        """
        if not self.sharers_per_step:
            return []
        order = np.random.default_rng((self.seed, step)).permutation(self.communicator.size)
        return [int(rank) for rank in order[: self.sharers_per_step + 1]]

    def sources(self, step: int) -> list[int]:
        """The ranks from which this rank receives at ``step``: ``sharers_per_step`` of those drawn, never itself."""
        others = [rank for rank in self.drawn(step) if rank != self.communicator.rank]
        return others[: self.sharers_per_step]

    def __call__(self, batch: Any) -> Any:
        """The batch, completed: own samples first. Collective; same number of calls on all ranks.

        Raises:
            ValueError: the batch has another number of samples than ``local_batch_size``, or cannot be completed.
            RankMismatchError: at the first call, batches are not built alike on all ranks. Raised on every rank.
            CommunicationError: another rank failed or has no batch.
        """
        step, self.step = self.step, self.step + 1
        if not self.sharers_per_step:
            return batch
        tensors = self._checked(batch)
        rows = self._exchange(tensors, sends=self.communicator.rank in self.drawn(step))
        sources = self.sources(step)
        completed, offset = [], 0
        for tensor in tensors:
            nbytes = sample_nbytes(tensor, self.shared_samples)
            parts = [rows[source, offset : offset + nbytes].view(tensor.dtype) for source in sources]
            shape = (self.shared_samples, *tensor.shape[1:])
            completed.append(torch.cat([tensor, *(part.reshape(shape).to(tensor.device) for part in parts)]))
            offset += _aligned(nbytes)
        return rebuilt(batch, iter(completed))

    def _exchange(self, tensors: list[Tensor], sends: bool) -> Tensor:
        """Every rank's first samples as bytes, one row a rank; zeros where a rank was not drawn."""
        device = self.communicator.control_device
        length = sum(_aligned(sample_nbytes(tensor, self.shared_samples)) for tensor in tensors)
        own = torch.zeros(length, dtype=torch.uint8, device=device)
        offset = 0
        for tensor in tensors:
            nbytes = sample_nbytes(tensor, self.shared_samples)
            if sends and nbytes:
                own[offset : offset + nbytes] = tensor[: self.shared_samples].reshape(-1).view(torch.uint8).to(device)
            offset += _aligned(nbytes)
        rows = torch.zeros(self.communicator.size, length, dtype=torch.uint8, device=device)
        self.communicator.all_gather(rows, own, name="selsync.injection.samples").wait()
        return rows

    def _checked(self, batch: Any) -> list[Tensor]:
        problem = None
        try:
            found = list(tensors_of(batch, "batch"))
            for path, tensor in found:
                check_samples(path, tensor, self.local_batch_size)
        except ValueError as error:
            if self._agreed is not None:
                raise
            found, problem = [], error
        leaves = [Leaf(path, tensor.dtype, tuple(tensor.shape[1:])) for path, tensor in found]
        if self._agreed is None:
            self._agreed = self._agree(leaves, problem)
        elif leaves != self._agreed:
            raise ValueError(
                f"batch: {first_difference(self._agreed, leaves)}; every batch has to be built like the first one: "
                "pad samples to one fixed shape"
            )
        return [tensor for _, tensor in found]

    def _agree(self, leaves: list[Leaf], problem: ValueError | None) -> list[Leaf]:
        mine = (leaves, str(problem) if problem else None)
        answers = self.communicator.all_gather_object(mine, name="selsync.injection.layout")
        if problem is not None:
            raise problem
        for rank, (_, theirs) in enumerate(answers):
            if theirs is not None:
                raise RankMismatchError(f"DataInjection: rank {rank} cannot complete its batch. {theirs}")
        for rank, (other, _) in enumerate(answers):
            if other != answers[0][0]:
                raise RankMismatchError(
                    f"DataInjection: batches of rank 0 and rank {rank} are not built alike: "
                    f"{first_difference(answers[0][0], other)}; use the same transforms on all ranks"
                )
        return leaves

    def wrap(self, loader: Collection[Any]) -> InjectedLoader:
        """``loader`` with every batch completed, for a training loop.

        Raises:
            ValueError: ``loader`` has no length.

        Example:
            >>> from crossover.comm import Solo
            >>> injection = DataInjection(0.5, 0.5, batch_size=2, communicator=Solo())
            >>> loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=injection.local_batch_size)
            >>> [batch.tolist() for batch in injection.wrap(loader)]
            [[0, 1], [2, 3]]
        """
        return InjectedLoader(self, loader)

    def state_dict(self) -> dict[str, Any]:
        """Where the draws stand; the same on all ranks."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            ValueError: ``state`` is not such a dictionary.
        """
        if "step" not in state:
            raise ValueError("state: lacks ['step']; give what state_dict() of a DataInjection returned")
        self.step = int(state["step"])


class InjectedLoader:
    """A data loader whose batches are completed by a :class:`DataInjection`. See :meth:`DataInjection.wrap`."""

    def __init__(self, injection: DataInjection, loader: Collection[Any]) -> None:
        self.injection = injection
        self.loader = loader
        self._batches: int | None = None
        _length(loader)

    def __len__(self) -> int:
        """Number of batches of one iteration; before the first one, without regard to other ranks."""
        own = _length(self.loader)
        return own if self._batches is None else min(own, self._batches)

    def __iter__(self) -> Iterator[Any]:
        communicator = self.injection.communicator
        self._batches = None
        if self.injection.sharers_per_step:
            fewest = torch.tensor([_length(self.loader)], dtype=torch.int64, device=communicator.control_device)
            communicator.all_reduce(fewest, ReduceOp.MIN, name="selsync.injection.batches").wait()
            self._batches = int(fewest.item())
        for batch in islice(self.loader, self._batches):
            yield self.injection(batch)


def _length(loader: Collection[Any]) -> int:
    try:
        return len(loader)
    except TypeError:
        raise ValueError(
            f"loader: a {type(loader).__name__} without a length; ranks have to agree on a number of batches: "
            "give a loader of a data set with a length, or call the DataInjection on each batch"
        ) from None
