"""The turn of a loop that has no optimizer of ours: found from the environment, as the launcher left it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from crossover.sync.client import Turn
from crossover.sync.device import find_device
from crossover.sync.registry import obtain, present
from crossover.sync.sharing import SHARING_VARIABLE, TimeShare, sharing_of


def turns_of_process() -> Sequence[Turn]:
    """The turns that there are, else the one that ``CROSSOVER_SHARING`` describes, if any."""
    turns = present()
    if not turns and isinstance(share := sharing_of(os.environ.get(SHARING_VARIABLE)), TimeShare):
        rank, size, local_rank = place_in_job(os.environ)
        gpu = torch.cuda.is_available()
        used = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        device = find_device(used, local_rank, share.device)
        turns = [obtain(device, rank, size, share.job, share.weight, share.priority, share.peak_memory)]
    return turns


def place_in_job(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, size and local rank, as ``torchrun`` or ``horovodrun`` set them; ``(0, 1, 0)`` without either.

    Example:
        >>> place_in_job({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
        (3, 4, 1)
        >>> place_in_job({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1"})
        (3, 4, 1)
    """
    names = (("RANK", "HOROVOD_RANK"), ("WORLD_SIZE", "HOROVOD_SIZE"), ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"))
    rank, size, local_rank = (environ.get(ours) or environ.get(theirs) for ours, theirs in names)
    return int(rank or 0), int(size or 1), int(local_rank or 0)
