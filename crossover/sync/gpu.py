"""What NVIDIA's management library and the environment say about a GPU that jobs share. None of it is needed to run."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MPS_PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_PIPE = "/tmp/nvidia-mps"


@contextmanager
def _library() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def uuid_of(number: int, environ: Mapping[str, str] = os.environ) -> str:
    """The UUID of the device that this process calls ``cuda:number``, where torch does not tell.

    Raises:
        ValueError: it cannot be found out.
    """
    visible = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    chosen = visible[number] if number < len(visible) else str(number)
    if not chosen.isdigit():
        return chosen
    try:
        with _library() as nvml:
            uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(chosen)))
            return uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    except Exception as error:  # the library is missing, or the driver, or it forbids it: several kinds of errors
        raise ValueError(f"device: the UUID of cuda:{number} cannot be found: {error}; set CROSSOVER_DEVICE") from error


def process_bytes(uuid: str, pid: int) -> int:
    """Device memory that the driver counts for a process; 0 where it does not tell."""
    try:
        with _library() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            found = [p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == pid]
            return int(found[0] or 0) if found else 0
    except Exception:  # as above
        return 0


def mps_runs(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process will reach a running MPS daemon: its control pipe is there."""
    pipe = Path(environ.get(MPS_PIPE_VARIABLE) or MPS_PIPE) / "control"
    try:
        return stat.S_ISFIFO(pipe.stat().st_mode) or stat.S_ISSOCK(pipe.stat().st_mode)
    except OSError:
        return False


def advice(backend: str, mps: bool) -> str | None:
    """What to tell a job that shares a GPU, or ``None``.

    Args:
        backend: what carries its collectives, as ``Communicator.backend`` says.
        mps: whether it computes through MPS.

    Example:
        >>> advice("nccl", mps=True) is None, advice("gloo", mps=False) is None, advice("gloo+nccl", mps=False) is None
        (True, True, False)
    """
    if "nccl" not in backend or mps:
        return None
    return (
        "NCCL communicates with kernels on the GPU itself, and without MPS the GPU runs the kernels of one process at "
        "a time: while this job's all-reduce waits for its network, the other job's kernels wait too, and taking turns "
        "gains little. Start nvidia-cuda-mps-control -d on each node before the jobs, or let this job communicate over "
        "the CPU (CROSSOVER_BACKEND=gloo)"
    )
