"""Two real ranks all-reduce on this machine: whether it works at all, and how fast.

``crossover doctor`` runs this file as ``python -m crossover.selftest``, one process a rank, and reads a line of JSON
from rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

RANKS = 2
NBYTES = 16 << 20
ROUNDS = 5
TIMEOUT_S = 90.0
"""For both processes together, importing torch included."""

_LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "HOROVOD_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the two ranks found.

    Attributes:
        backend: of torch.distributed.
        ok: both ranks ended in time with the right sums.
        bytes_per_s: payload bytes / median time of an all-reduce; ``None`` unless ``ok``.
        problem: what went wrong, empty if ``ok``.
        remedy: what to do about it, empty if ``ok``.
    """

    backend: str
    ok: bool
    bytes_per_s: float | None
    problem: str = ""
    remedy: str = ""


def run(backend: str = "gloo", timeout_s: float = TIMEOUT_S) -> SelfTest:
    """All-reduce 16 MiB over two processes that this starts and, on every path, ends. Takes a few seconds."""
    with tempfile.TemporaryDirectory(prefix="crossover-selftest-") as directory:
        store = os.path.join(directory, "store")
        processes = [_start(backend, store, rank) for rank in range(RANKS)]
        try:
            return _verdict(backend, processes, timeout_s)
        finally:
            _end(processes)


def _start(backend: str, store: str, rank: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "crossover.selftest", backend, store, str(rank)]
    return subprocess.Popen(
        command,
        env=_environment(backend),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _environment(backend: str) -> dict[str, str]:
    """Ours without the launcher's variables, on the loopback interface, with this package importable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    package_parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (package_parent, kept.get("PYTHONPATH"))))
    kept["OMP_NUM_THREADS"] = "1"
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if backend == "gloo" and loopback is not None:
        kept["GLOO_SOCKET_IFNAME"] = loopback
    return kept


def _verdict(backend: str, processes: list[subprocess.Popen[str]], timeout_s: float) -> SelfTest:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            break  # the others may wait for this one
        if time.monotonic() > deadline:
            return _timed_out(backend, processes, timeout_s)
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.returncode:
            _, errors = process.communicate()
            last = (errors.strip().splitlines() or ["no message"])[-1]
            problem = f"rank {rank} ended with exit code {process.returncode}: {last}"
            return SelfTest(backend, False, None, problem, _remedy(backend, process.returncode))
    output, _ = processes[0].communicate()
    return SelfTest(backend, True, NBYTES / json.loads(output.strip().splitlines()[-1])["median_s"])


def _timed_out(backend: str, processes: list[subprocess.Popen[str]], timeout_s: float) -> SelfTest:
    late = ", ".join(str(rank) for rank, process in enumerate(processes) if process.poll() is None)
    remedy = (
        "check that a firewall or container policy lets processes connect to each other on the loopback interface; "
        "on a busy machine, give it longer with --timeout"
    )
    return SelfTest(backend, False, None, f"rank {late} did not end within {timeout_s:g} s", remedy)


def _remedy(backend: str, code: int) -> str:
    if code == -signal.SIGKILL:
        return "the system ended it, most often for lack of memory: free some, or raise the container's limit"
    if backend == "nccl":
        return "run again with NCCL_DEBUG=INFO and look for the first WARN; check that driver and torch's CUDA agree"
    command = f"python -m crossover.selftest {backend} $(mktemp -u)"
    return f"see what one rank alone says before it waits for the other: {command} 0"


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _rank(backend: str, store: str, rank: int) -> float:
    """Run as one rank; median seconds of an all-reduce of ``NBYTES``."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timeout)
    times = []
    for _ in range(ROUNDS):
        tensor = torch.full((NBYTES // 4,), float(rank + 1), device=device)
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # on a GPU the host has to wait for the result before it reads the clock
        times.append(time.perf_counter() - begun)
        if not bool((tensor == RANKS * (RANKS + 1) / 2).all()):
            raise SystemExit("the all-reduce gave a wrong sum: reinstall torch, and test the machine's memory")
    dist.destroy_process_group()
    return sorted(times)[ROUNDS // 2]


if __name__ == "__main__":
    print(json.dumps({"median_s": _rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))}))
