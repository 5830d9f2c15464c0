"""Splits of labelled data in which ranks differ, for experiments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor


def label_skew_indices(labels: Tensor | Sequence[int], rank: int, size: int, labels_per_rank: int) -> list[int]:
    """One rank's samples in a split where each rank has few labels, for experiments with data that are not alike.

    The sorted labels are dealt out in turn, ``labels_per_rank`` to each rank, starting again at the first one when all
    are dealt; ranks that have a label in common share out its samples. Labels that nobody is dealt are left out. Every
    rank gets as many samples as the rank with the fewest, so that all run the same number of steps. (The paper: 10
    ranks with 1 label each of CIFAR10, and with 10 labels each of CIFAR100.)

    Args:
        labels: label of each sample.
        rank: position of this rank, 0 to ``size - 1``.
        size: number of ranks.
        labels_per_rank: labels for each rank, 1 to the number of labels.

    Returns:
        Indices into ``labels``, rising; no index on two ranks. Use with ``torch.utils.data.Subset``.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> [label_skew_indices([0, 1, 2, 2, 1, 0], rank, size=3, labels_per_rank=1) for rank in range(3)]
        [[0, 5], [1, 4], [2, 3]]
    """
    values = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    kinds = np.unique(values)
    if values.ndim != 1 or not len(kinds):
        raise ValueError(f"labels: has shape {values.shape}; it has to be one label for each sample, at least one")
    if not isinstance(labels_per_rank, int) or labels_per_rank not in range(1, len(kinds) + 1):
        raise ValueError(
            f"labels_per_rank: is {labels_per_rank!r}; it has to be 1 to {len(kinds)}, the number of labels"
        )
    if not isinstance(size, int) or size < 1 or not isinstance(rank, int) or rank not in range(size):
        raise ValueError(f"rank, size: are {rank!r}, {size!r}; they have to be whole numbers with 0 <= rank < size")
    shares: list[list[int]] = [[] for _ in range(size)]
    for place, kind in enumerate(kinds):
        holders = [owner for owner in range(size) if (place - owner * labels_per_rank) % len(kinds) < labels_per_rank]
        for turn, owner in enumerate(holders):
            shares[owner].extend(np.flatnonzero(values == kind)[turn :: len(holders)].tolist())
    fewest = min(len(share) for share in shares)
    if not fewest:
        raise ValueError(
            f"labels: {len(values)} samples of {len(kinds)} labels leave a rank of {size} without any; use fewer ranks"
        )
    return sorted(shares[rank])[:fewest]
