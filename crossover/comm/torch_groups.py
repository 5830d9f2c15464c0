"""Making process groups of ``torch.distributed`` that all their members recognise as the same."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from crossover.comm.communicator import Communicator

_highest_local_name = 0


def make_group(
    like: dist.ProcessGroup, ranks: Sequence[int], name: str, timeout: float, *, local: bool
) -> dist.ProcessGroup:
    """A new group with the backends of ``like``.

    Args:
        like: an initialised group.
        ranks: global ranks of the members.
        name: for torch's debugging aids.
        timeout: seconds, for making it and for its collectives.
        local: only the members call this, after :func:`align_local_names`; otherwise all ranks of the job call it.
    """
    backend = dist.get_backend_config(like)
    names = {entry.partition(":")[2] for entry in backend.split(",")}
    if len(names) == 1 and "" not in names:
        backend = names.pop()  # spelled out for each device, it makes torch warn when the group is destroyed
    group: dist.ProcessGroup = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout),
        backend=backend,
        use_local_synchronization=local,
        group_desc=name,
    )
    return group


def align_local_names(parent: Communicator, rank: int, name: str) -> None:
    """Let the ranks of a part of the job agree on the name of the next group that only its members make.

    torch derives that name from the number of groups a process has, which differs where memberships do; members with
    different names would wait for each other until the time-out. So all raise that number to the highest, by groups of
    one. Groups so made live until shutdown: were the number to fall, a second group could get a name in use.

    Args:
        parent: the part of the job.
        rank: this process's global rank.
        name: of the group to be made.
    """
    global _highest_local_name
    held = max(len(c10d._world.pg_names), _highest_local_name)
    target = max(parent.all_gather_object(held, name=f"new_group.{name}"))
    while len(c10d._world.pg_names) < target:
        dist.new_group([rank], backend="gloo", use_local_synchronization=True, group_desc="padding")
    _highest_local_name = target + 1
