"""SelDP: every rank sees all data, and no two ranks are ever in the same part of it.

What is the paper's (section III-D): the data set is cut into N chunks; rank n goes through chunks n, n+1, ..., N-1, 0,
..., n-1, so that a synchronised step combines N different chunks, while each rank, training mostly alone, sees all
data.

What is our choice, where the paper is silent: one permutation of the samples per pass, the same on all ranks, cut into
the chunks; chunks that are whole batches, so that ranks change chunks at the same step; what happens to data that do
not divide evenly; a variant that keeps the order of a text.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from crossover import runtime

_Order = np.ndarray[Any, np.dtype[np.int64]]
_MUST_AGREE = ("samples", "seed", "shuffle", "contiguous")
_MAY_CHANGE = ("size", "batch_size", "drop_last", "chunks_per_epoch")


class SelSyncSampler(Sampler[int]):
    """Indices of the samples of one rank, for a ``DataLoader`` of the same ``batch_size``.

    Across ranks, given equal arguments but for ``rank``: all ranks run the same number of full batches; at every step
    the N ranks are in N different chunks, and chunks have no sample in common; over one pass each rank sees every
    sample (less what ``drop_last`` drops: at most ``size * batch_size - 1`` samples, others in each pass).

    A pass over all data is N times as long as an epoch of ``DistributedSampler``, whose rank sees one chunk. With
    ``chunks_per_epoch=1`` an epoch has that length, N epochs are one pass, and schedules that count epochs keep their
    meaning.

    Args:
        data: the data set, or its length.
        batch_size: samples in one batch of one rank; give the ``DataLoader`` the same.
        rank: position of this rank; default ``crossover.rank()``.
        size: number of ranks; default ``crossover.size()``.
        shuffle: draw a new permutation of all samples for each pass. With ``contiguous``: draw the order of the chunks.
        seed: of the permutations; equal on all ranks.
        drop_last: leave out samples beyond a whole number of batches per chunk. ``False``: each chunk is filled up to
            whole batches with its own first samples, which the pass then shows twice.
        contiguous: chunks are contiguous spans of the data, and the order inside a span is kept: for text streams,
            whose samples are consecutive pieces of tokens.
        chunks_per_epoch: chunks that one iteration goes through, 1 to ``size``; default ``size``, a pass over all data.

    Raises:
        ValueError: an argument is out of its range, or there are too few samples to give every rank a batch.

    Example:
        >>> rank0, rank1 = (SelSyncSampler(8, 2, rank=rank, size=2, shuffle=False) for rank in (0, 1))
        >>> list(rank0), list(rank1)
        ([0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3])
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        rank: int | None = None,
        size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        contiguous: bool = False,
        chunks_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.samples = _length(data)
        self.rank, self.size = _placement(rank, size)
        self.batch_size = _whole("batch_size", batch_size, 1, "a number of samples")
        self.seed = _whole("seed", seed, 0, "a whole number, equal on all ranks")
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.contiguous = contiguous
        self.chunks_per_epoch = self.size if chunks_per_epoch is None else chunks_per_epoch
        if self.chunks_per_epoch not in range(1, self.size + 1):
            raise ValueError(
                f"chunks_per_epoch: is {chunks_per_epoch!r}; it has to be 1 to {self.size} (one for each rank), or None"
            )
        self._check_samples()
        # Chunk c holds samples c * samples // size up to (c + 1) * samples // size of the pass: its length differs by
        # at most one between chunks, its number of batches not at all.
        longest = -(-self.samples // self.size)
        per_chunk = self.samples // self.size // self.batch_size if drop_last else -(-longest // self.batch_size)
        self.batches_per_chunk = per_chunk
        self.epoch = 0
        self._start = 0
        self._drawn = 0
        self._drawn_order: tuple[int, _Order] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one iteration: equal on all ranks and in all epochs."""
        return self.batches_per_chunk * self.chunks_per_epoch

    def __len__(self) -> int:
        """Number of samples of one whole iteration."""
        return self.batches_per_epoch * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which starts at its beginning unless it is the current one.

        Every rank makes the same call.

        Raises:
            ValueError: ``epoch`` is not a whole number from 0.
        """
        _whole("epoch", epoch, 0, "the number of an epoch, counted from 0")
        if epoch != self.epoch:
            self.epoch, self._start, self._drawn = epoch, 0, 0

    def chunk(self, batch: int) -> int:
        """The chunk in which this rank is at batch number ``batch`` of the current epoch: another one on each rank.

        Raises:
            ValueError: the epoch has no such batch.
        """
        if batch not in range(self.batches_per_epoch):
            raise ValueError(f"batch: is {batch!r}; it has to be 0 to {self.batches_per_epoch - 1} in this epoch")
        return self._position(batch // self.batches_per_chunk)[1]

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        self._drawn = start * self.batch_size
        return self._indices(start)

    def _indices(self, start: int) -> Iterator[int]:
        skipped = start % self.batches_per_chunk * self.batch_size
        for number in range(start // self.batches_per_chunk, self.chunks_per_epoch):
            for index in self._chunk_indices(number)[skipped:]:
                self._drawn += 1
                yield index
            skipped = 0

    def _position(self, number: int) -> tuple[int, int]:
        """The pass to which the epoch's chunk ``number`` belongs, and which chunk of that pass it is on this rank."""
        total = self.epoch * self.chunks_per_epoch + number
        a_pass, place = total // self.size, (self.rank + total) % self.size
        if self.contiguous and self.shuffle:
            return a_pass, int(self._permutation(a_pass, self.size)[place])
        return a_pass, place

    def _chunk_indices(self, number: int) -> list[int]:
        a_pass, chunk = self._position(number)
        first, last = (edge * self.samples // self.size for edge in (chunk, chunk + 1))
        if self.shuffle and not self.contiguous:
            indices = self._permutation(a_pass, self.samples)[first:last]
        else:
            indices = np.arange(first, last)
        wanted = self.batches_per_chunk * self.batch_size
        return [int(index) for index in np.resize(indices, wanted)]  # cut, or filled up from its start

    def _permutation(self, a_pass: int, length: int) -> _Order:
        if self._drawn_order is None or self._drawn_order[0] != a_pass:
            self._drawn_order = a_pass, np.random.default_rng((self.seed, a_pass)).permutation(length)
        return self._drawn_order[1]

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where the current epoch stands. The same on all ranks: any rank's state resumes every rank.

        Args:
            batches: batches of this epoch that the training loop has done. Needed with a ``DataLoader`` that has
                workers, as it draws ahead; without workers the sampler knows by itself.

        Raises:
            ValueError: the epoch has not that many batches.
        """
        if batches is None:
            batches = self._drawn // self.batch_size
        if batches not in range(self.batches_per_epoch + 1):
            raise ValueError(
                f"batches: is {batches!r}; it has to be 0 to {self.batches_per_epoch}, the length of an epoch"
            )
        return {
            "epoch": self.epoch,
            "batch": batches,
            "batches_per_epoch": self.batches_per_epoch,
            **{name: getattr(self, name) for name in (*_MUST_AGREE, *_MAY_CHANGE)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on in the middle of the saved epoch; the iterations after it are whole.

        Call it on all ranks with the same state, and ``set_epoch`` with the saved epoch (``self.epoch``), if at all.
        After a change of the number of ranks or of the batch size, training goes on at the same share of the epoch,
        with a warning: chunks are others then, so some samples are seen twice in that pass, and some not at all.

        Raises:
            ValueError: the state belongs to other data, another seed, or another order.
        """
        missing = {"epoch", "batch", "batches_per_epoch", *_MUST_AGREE, *_MAY_CHANGE} - state.keys()
        if missing:
            raise ValueError(f"state: lacks {sorted(missing)}; give what state_dict() of a SelSyncSampler returned")
        for name in _MUST_AGREE:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"state: was saved with {name}={state[name]!r}, this sampler has {name}={getattr(self, name)!r}; "
                    "make the sampler as it was, or start a new epoch with set_epoch()"
                )
        changed = [name for name in _MAY_CHANGE if state[name] != getattr(self, name)]
        batch = state["batch"]
        if changed:
            batch = batch * self.batches_per_epoch // state["batches_per_epoch"]
            was = ", ".join(f"{name} {state[name]} -> {getattr(self, name)}" for name in changed)
            warnings.warn(
                f"SelSyncSampler goes on at batch {batch} of {self.batches_per_epoch}, the same share of epoch "
                f"{state['epoch']} as saved; samples are not matched exactly ({was})",
                stacklevel=2,
            )
        self.epoch, self._start, self._drawn = state["epoch"], batch, batch * self.batch_size

    def _check_samples(self) -> None:
        least = self.size * self.batch_size if self.drop_last else self.size
        if self.samples < least:
            way_out = "use a smaller batch_size, or drop_last=False" if self.drop_last else "use fewer ranks"
            raise ValueError(
                f"data: has {self.samples} samples, fewer than the {least} that {self.size} ranks with batch_size="
                f"{self.batch_size}, drop_last={self.drop_last} need; {way_out}"
            )


def _length(data: Sized | int) -> int:
    if isinstance(data, int):
        return data
    try:
        return len(data)
    except TypeError:
        raise ValueError(
            f"data: a {type(data).__name__} has no length; give a data set with one, or the number of samples"
        ) from None


def _placement(rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None and size is None:
        return runtime.rank(), runtime.size()
    if not isinstance(size, int) or not isinstance(rank, int) or size < 1 or rank not in range(size):
        raise ValueError(
            f"rank, size: are {rank!r}, {size!r}; they have to be whole numbers with 0 <= rank < size, or both left out"
        )
    return rank, size


def _whole(name: str, value: int, least: int, meaning: str) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: is {value!r}; it has to be {meaning}, {least} or more")
    return value
