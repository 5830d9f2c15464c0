"""A sampler that shares out what is left of an epoch among the ranks that are left."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from crossover import runtime


class ElasticSampler(Sampler[int]):
    """Shares out a dataset among ranks, and the unprocessed rest of it anew when the number of ranks has changed.

    Put it into the :class:`TorchState`, call :meth:`record_batch` after each batch, and :meth:`set_epoch` at the
    *end* of each epoch. All ranks get equally many samples: the first of those left are given out again where they do
    not divide.

    Args:
        dataset: of constant size.
        shuffle: shuffle in each epoch, in the same way on all ranks.
        seed: of the shuffling; the same on all ranks.

    Attributes:
        epoch: the current epoch.
        processed_num: samples of this epoch that all ranks together have done with.

    Example:
        >>> import crossover as xo
        >>> xo.init()
        >>> sampler = xo.elastic.ElasticSampler(range(4), shuffle=False)
        >>> sampler.record_batch(0, 1)
        >>> sampler.reset()
        >>> list(sampler)
        [1, 2, 3]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, with nothing of it processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has done with a batch of ``batch_size``. Counts until :meth:`set_epoch`."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place that ``state_dict`` tells of, with the ranks that there are now."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is not processed among the ranks that there are now."""
        communicator = runtime.context().communicator
        self.num_replicas = communicator.size
        self.rank = communicator.rank
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        repeated = [left[place % len(left)] for place in range(self.total_size)]
        return iter(repeated[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return int(self.num_samples)
