"""How this process was started, read from its environment. Pure: no torch, no communication."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["torch", "horovod", "solo"]
BACKENDS = ("torch", "gloo", "nccl", "horovod", "solo")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Launcher:
    """What to start.

    Attributes:
        kind: the library that carries the collectives.
        torch_backend: ``"gloo"`` or ``"nccl"`` where the user chose one.
    """

    kind: Kind
    torch_backend: str | None = None


def find_launcher(environ: Mapping[str, str], requested: str | None = None) -> Launcher:
    """Read the launcher from ``environ``.

    Args:
        environ: environment variables.
        requested: one of ``BACKENDS``, or ``None`` for whatever the environment says.

    Raises:
        ValueError: ``requested`` is none of them, the environment contradicts itself, or several processes were started
            without a launcher that tells them of each other.

    Example:
        >>> find_launcher({}).kind
        'solo'
    """
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"backend: is {requested!r}; allowed are {', '.join(map(repr, BACKENDS))}")
    if requested == "solo":
        return Launcher("solo")
    if requested == "horovod":
        return _horovod(environ)
    if requested is not None:
        return _torch(environ, requested)
    if "HOROVOD_RANK" in environ or "HOROVOD_SIZE" in environ:
        return _horovod(environ)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torch(environ, None)
    if _mpi_size(environ) > 1:
        return _horovod(environ)
    _refuse_slurm(environ)
    return Launcher("solo")


def _torch(environ: Mapping[str, str], requested: str | None) -> Launcher:
    hint = "start the script with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
    if missing:
        because = "the other is" if len(missing) == 1 else f"backend {requested!r} was asked for"
        raise ValueError(f"environment: {' and '.join(missing)} not set, but {because}; {hint}")
    size = _check_rank(environ, "RANK", "WORLD_SIZE")
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if size > 1 and absent:
        raise ValueError(f"environment: WORLD_SIZE is {size}, but {' and '.join(absent)} not set; {hint}")
    if size == 1:
        return Launcher("solo")
    return Launcher("torch", None if requested == "torch" else requested)


def _horovod(environ: Mapping[str, str]) -> Launcher:
    if importlib.util.find_spec("horovod") is None:
        raise ValueError(
            "environment: this is a Horovod or MPI job, but horovod cannot be imported; install it (make horovod), or "
            "start the script with torchrun"
        )
    given = [name for name in ("HOROVOD_RANK", "HOROVOD_SIZE") if name in environ]
    if len(given) == 1:
        other = "HOROVOD_SIZE" if given == ["HOROVOD_RANK"] else "HOROVOD_RANK"
        raise ValueError(f"environment: {given[0]} is set, but {other} is not; start the script with horovodrun")
    if given:
        _check_rank(environ, "HOROVOD_RANK", "HOROVOD_SIZE")
    return Launcher("horovod")


def _check_rank(environ: Mapping[str, str], rank_name: str, size_name: str) -> int:
    rank, size = _number(environ, rank_name), _number(environ, size_name)
    if not 0 <= rank < size:
        raise ValueError(
            f"environment: {rank_name} is {rank} and {size_name} is {size}; ranks are from 0 to below the size"
        )
    return size


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"environment: {name} is {environ[name]!r}; it has to be a whole number") from None


def _mpi_size(environ: Mapping[str, str]) -> int:
    return max((_number(environ, name) for name in _MPI_SIZES if name in environ), default=1)


def _refuse_slurm(environ: Mapping[str, str]) -> None:
    # Slurm sets the task count for a batch script too, which is one process; only srun's tasks belong to a step.
    in_step = "SLURM_PROCID" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ)
    name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), None)
    if name is None or not in_step or _number(environ, name) < 2:
        return
    raise ValueError(
        f"environment: srun started {environ[name]} tasks ({name}), but no launcher told them of each other, so each "
        "would train alone; run `srun --ntasks-per-node=1 torchrun ...` or horovodrun, set RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT for each task, or set CROSSOVER_BACKEND=solo if they are meant to be alone"
    )
