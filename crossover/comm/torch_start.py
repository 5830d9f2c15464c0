"""Starting torch.distributed from a launcher's environment, and where its notice board is."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from crossover.comm import board as boards
from crossover.comm.board import Board
from crossover.comm.communicator import Communicator
from crossover.comm.vigil import Vigil
from crossover.errors import CommunicationError

_MIXED = "cpu:gloo,cuda:nccl"
_stores: dict[tuple[str, str, int, int], Store] = {}


def start(requested: str | None, timeout: float, generation: int) -> Board:
    """Initialise the default process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        requested: ``"gloo"``, ``"nccl"``, or ``None``: NCCL with Gloo for CPU tensors where there are GPUs, else Gloo.
        timeout: seconds, for the start and for every collective.
        generation: how often this process has initialised before; equal on all ranks.

    Returns:
        The notice board.

    Raises:
        ValueError: NCCL cannot be used here, or LOCAL_RANK has no device.
        CommunicationError: not all ranks came within the time-out.
    """
    backend = _backend(requested)
    if backend == _MIXED:
        torch.cuda.set_device(_device_index())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board = board_of_environment(rank, generation)
    patience, started = timedelta(seconds=timeout), time.monotonic()
    try:
        store = PrefixStore(f"crossover/{generation}", _store(rank, size, patience))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise CommunicationError(
                f"crossover.init: MASTER_PORT {os.environ['MASTER_PORT']} is in use on this host, perhaps by another "
                "job; give each its own port, or start it with torchrun --standalone, which finds a free one"
            ) from error
        vigil = Vigil(backend, rank, range(size), timeout, timeout, board)
        raise vigil.failure("crossover.init", time.monotonic() - started, error) from error
    return board


def _store(rank: int, size: int, timeout: timedelta) -> Store:
    """The launcher's store, kept until the process ends.

    Each start uses names of its own in it: those of an earlier one would lead ranks to addresses that are closed. And
    were rank 0 to keep a new store for each start, a rank that is early could still meet the old one.
    """
    key = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, size)
    if key not in _stores:
        _stores[key] = next(rendezvous("env://", rank, size, timeout=timeout))[0]
    _stores[key].set_timeout(timeout)
    return _stores[key]


def _backend(requested: str | None) -> str:
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if requested == "nccl" and not nccl:
        reason = "no CUDA device is visible" if dist.is_nccl_available() else "this torch was built without NCCL"
        raise ValueError(f"backend: 'nccl' was asked for, but {reason}; use 'gloo', or leave it out")
    return _MIXED if nccl and requested != "gloo" else "gloo"


def _device_index() -> int:
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank < count:
        return local_rank
    if count == 1:  # a launcher that shows each rank its own device only; sharing it is refused once ranks can talk
        return 0
    raise ValueError(
        f"environment: LOCAL_RANK is {local_rank}, but only {count} CUDA devices are visible; start at most {count} "
        "ranks on this host, or set CROSSOVER_BACKEND=gloo to let ranks share devices"
    )


def device_identity() -> str | None:
    """The current device if NCCL uses it, in words that are the same for all processes that see it."""
    if "nccl" not in dist.get_backend_config(c10d._get_default_group()) or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def refuse_shared_devices(devices: Sequence[str | None], communicator: Communicator) -> None:
    """Raise the same error on every rank if two ranks would use one device, of which NCCL makes a riddle.

    Raises:
        ValueError: two entries are the same device.
    """
    for rank, device in enumerate(devices):
        if device is not None and devices.index(device) != rank:
            raise ValueError(
                f"device: ranks {devices.index(device)} and {rank} of {communicator.size} both use CUDA device {device}"
                ", which NCCL cannot do; start one rank a device, or set CROSSOVER_BACKEND=gloo to communicate through "
                "host memory"
            )


def board_of_environment(rank: int, generation: int) -> Board:
    """The board in the store of the launcher (``torchrun``'s agent), or of rank 0 without one."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeper = "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0, which keeps it,"
    return Board(boards.tcp_store(host, port, _scope(generation)), rank, keeper)


def board_of_existing(generation: int) -> Board:
    """The board in the store of a default group that the script itself has initialised."""
    rank = dist.get_rank()
    store = c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return Board(boards.tcp_store(store.host, store.port, _scope(generation)), rank, "the store's keeper")
    return Board(boards.any_store(store, _scope(generation)), rank, "the store's keeper")


def _scope(generation: int) -> str:
    # A restarted job meets the same store with words of its last attempt in it.
    return f"crossover/board/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{generation}"
