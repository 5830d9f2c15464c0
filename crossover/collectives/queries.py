"""What the installation can do, with Horovod's names, and its timeline calls."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import distributed

from crossover import runtime
from crossover.telemetry import timeline


def _horovod() -> ModuleType | None:
    """``horovod.torch`` in a job that it runs, else ``None``: the answers are then those of torch.distributed."""
    if not runtime.is_initialized() or runtime.context().launcher != "horovod":
        return None
    import horovod.torch

    module: ModuleType = horovod.torch
    return module


def _backend() -> str:
    return runtime.context().communicator.backend if runtime.is_initialized() else ""


def mpi_built() -> bool:
    """Whether collectives over MPI were built in."""
    horovod = _horovod()
    return bool(horovod.mpi_built()) if horovod else distributed.is_available() and distributed.is_mpi_available()


def mpi_enabled() -> bool:
    """Whether this job uses MPI."""
    horovod = _horovod()
    return bool(horovod.mpi_enabled()) if horovod else "mpi" in _backend()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads.

    Raises:
        ValueError: this job does not use MPI.
    """
    horovod = _horovod()
    if horovod:
        return bool(horovod.mpi_threads_supported())
    raise ValueError("mpi_threads_supported: this job does not use MPI; ask mpi_enabled() first")


def gloo_built() -> bool:
    """Whether collectives over Gloo were built in."""
    horovod = _horovod()
    return bool(horovod.gloo_built()) if horovod else distributed.is_available() and distributed.is_gloo_available()


def gloo_enabled() -> bool:
    """Whether this job uses Gloo."""
    horovod = _horovod()
    return bool(horovod.gloo_enabled()) if horovod else "gloo" in _backend()


def nccl_built() -> bool:
    """Whether collectives over NCCL were built in."""
    horovod = _horovod()
    return bool(horovod.nccl_built()) if horovod else distributed.is_available() and distributed.is_nccl_available()


def ddl_built() -> bool:
    """Whether IBM's DDL was built in; with Horovod only."""
    horovod = _horovod()
    return bool(horovod.ddl_built()) if horovod else False


def ccl_built() -> bool:
    """Whether Intel's oneCCL was built in, or its torch.distributed backend is registered."""
    horovod = _horovod()
    return bool(horovod.ccl_built()) if horovod else "ccl" in distributed.Backend.backend_list


def cuda_built() -> bool:
    """Whether collectives take CUDA tensors."""
    horovod = _horovod()
    return bool(horovod.cuda_built()) if horovod else torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether collectives take ROCm tensors."""
    horovod = _horovod()
    return bool(horovod.rocm_built()) if horovod else torch.version.hip is not None


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start recording a Chrome trace: Horovod's own in a job that it runs, else this library's, one file a rank.

    Args:
        file_path: where to; ours adds the rank to the name.
        mark_cycles: mark Horovod's background cycles; there are none without it.

    Raises:
        ValueError: the file cannot be written, or, with Horovod, ``HOROVOD_TIMELINE=DYNAMIC`` is not set.
    """
    horovod = _horovod()
    if horovod:
        horovod.start_timeline(os.fspath(file_path), mark_cycles)
    else:
        timeline.start(file_path, rank=runtime.context().communicator.rank)


def stop_timeline() -> None:
    """End what :func:`start_timeline` started and close the file."""
    horovod = _horovod()
    if horovod:
        horovod.stop_timeline()
    else:
        timeline.stop()
