"""Ranks on this machine's loopback, one a core, each started as ``torchrun`` or ``horovodrun`` would start it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
RESULT_VARIABLE = "CROSSOVER_BENCHMARK_RESULT"


def run(
    module: str,
    arguments: Sequence[str],
    size: int,
    launcher: str,
    timeout: float = 900.0,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``python -m module arguments`` on ``size`` ranks and return what each passed to :func:`report`, in rank
    order.

    Args:
        module: importable from the project's root.
        arguments: its command line.
        size: number of ranks; rank ``r`` is pinned to core ``r`` (modulo the cores there are), with one torch thread.
        launcher: ``"torch"`` or ``"horovod"``.
        timeout: seconds until all ranks are killed.
        variables: added to every rank's environment.

    Raises:
        RuntimeError: a rank failed; its errors are in the message.
    """
    with tempfile.TemporaryDirectory() as folder, _launcher(launcher, size) as common:
        ranks = []
        for rank in range(size):
            environment = {**os.environ, **_ON_ITS_CORE, **common, **_rank(launcher, rank, size), **(variables or {})}
            environment[RESULT_VARIABLE] = folder
            core = str(rank % (os.cpu_count() or 1))
            command = ["taskset", "-c", core, sys.executable, "-m", module, *arguments]
            ranks.append(subprocess.Popen(command, env=environment, cwd=PROJECT, stderr=subprocess.PIPE, text=True))
        try:
            with ThreadPoolExecutor(size) as waiting:
                errors = list(waiting.map(lambda process: _errors_of(process, ranks, timeout), ranks))
        finally:
            for process in ranks:
                process.kill()
        if any(process.returncode for process in ranks):
            raise RuntimeError(f"{module} under {launcher} failed:\n" + "\n".join(errors))
        return collect(folder, size)


def report(value: Any) -> None:
    """Hand a JSON value to the process that started this rank."""
    rank = os.environ.get("HOROVOD_RANK") or os.environ["RANK"]
    Path(os.environ[RESULT_VARIABLE], rank).write_text(json.dumps(value))


def collect(folder: str, size: int) -> list[Any]:
    """What each rank passed to :func:`report` with the folder in ``RESULT_VARIABLE``, in rank order."""
    return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(size)]


def _errors_of(process: subprocess.Popen[str], ranks: Sequence[subprocess.Popen[str]], timeout: float) -> str:
    """What a rank printed as errors; if it failed, the others need not be waited for."""
    try:
        errors = process.communicate(timeout=timeout)[1]
    except subprocess.TimeoutExpired:
        errors = f"still running after {timeout:.0f} s"
        process.kill()
    if process.returncode:
        for other in ranks:
            other.kill()
    return errors


_ON_ITS_CORE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _rank(launcher: str, rank: int, size: int) -> dict[str, str]:
    if launcher == "torch":
        return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }


@contextlib.contextmanager
def _launcher(launcher: str, size: int) -> Iterator[dict[str, str]]:
    if launcher == "torch":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
    try:
        yield {
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    finally:
        server.stop()
