"""The launcher read from the environment: pure rules, no processes."""

from __future__ import annotations

import importlib.util

import pytest

from crossover.launchers import Launcher, find_launcher

TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
HOROVOD = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}


@pytest.fixture
def horovod_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.fixture
def horovod_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("horovod_there")
@pytest.mark.parametrize(
    ("environ", "requested", "kind", "torch_backend"),
    [
        ({}, None, "solo", None),
        (TORCH, None, "torch", None),
        (TORCH, "torch", "torch", None),
        (TORCH, "gloo", "torch", "gloo"),
        (TORCH, "nccl", "torch", "nccl"),
        (TORCH, "solo", "solo", None),
        ({**TORCH, **SRUN}, None, "torch", None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None, "solo", None),
        (HOROVOD, None, "horovod", None),
        ({**TORCH, **HOROVOD}, None, "horovod", None),
        ({**TORCH, **HOROVOD}, "torch", "torch", None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, None, "horovod", None),
        ({"OMPI_COMM_WORLD_SIZE": "2", **TORCH}, None, "torch", None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None, "solo", None),
        ({}, "horovod", "horovod", None),
        (SRUN, "solo", "solo", None),
        ({**SRUN, "SLURM_NTASKS": "1"}, None, "solo", None),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None, "solo", None),  # a batch script, which is one process
    ],
)
def test_found(environ: dict[str, str], requested: str | None, kind: str, torch_backend: str | None) -> None:
    assert find_launcher(environ, requested) == Launcher(kind, torch_backend)  # type: ignore[arg-type]


@pytest.mark.usefixtures("horovod_there")
@pytest.mark.parametrize(
    ("environ", "requested", "words"),
    [
        ({"RANK": "0"}, None, ["WORLD_SIZE not set", "torchrun"]),
        ({"WORLD_SIZE": "2"}, None, ["RANK not set", "torchrun"]),
        ({}, "torch", ["RANK and WORLD_SIZE not set", "'torch'", "torchrun"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, ["MASTER_ADDR and MASTER_PORT"]),
        ({**TORCH, "RANK": "4"}, None, ["RANK is 4", "WORLD_SIZE is 4"]),
        ({**TORCH, "RANK": "-1"}, None, ["RANK is -1"]),
        ({**TORCH, "RANK": "one"}, None, ["RANK is 'one'", "whole number"]),
        ({"HOROVOD_RANK": "0"}, None, ["HOROVOD_SIZE", "horovodrun"]),
        ({"HOROVOD_SIZE": "2"}, None, ["HOROVOD_RANK", "horovodrun"]),
        (SRUN, None, ["srun started 8 tasks", "torchrun", "CROSSOVER_BACKEND=solo"]),
        (TORCH, "mpi", ["backend: is 'mpi'", "'gloo'", "'horovod'"]),
    ],
)
def test_refused(environ: dict[str, str], requested: str | None, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        find_launcher(environ, requested)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.usefixtures("horovod_missing")
@pytest.mark.parametrize("environ", [HOROVOD, {"PMI_SIZE": "2", "PMI_RANK": "0"}])
def test_a_horovod_job_without_horovod_says_so(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="horovod cannot be imported"):
        find_launcher(environ)
