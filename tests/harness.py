"""Runs a function on real ranks: one process each, started as ``torchrun`` or ``horovodrun`` would start it.

    def doubled(value: int) -> int:
        runtime.init()
        return value * runtime.size()

    assert run_ranks(doubled, 2, 21) == [42, 42]

Ranks are forked from a server that has torch imported, so a run costs little more than what the function does. A rank
ends as a script does: ``sys.excepthook``, then the ``atexit`` functions, then its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# torch._dynamo because each process imports it, in seconds, when it makes its first optimizer
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "numpy",
    "pytest",
    "horovod.torch",
    "crossover.runtime",
    "crossover",
]
_LAUNCHER_PREFIXES = ("HOROVOD_", "CROSSOVER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SECONDS_AFTER_FIRST_FAILURE = 10.0
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        value: what the function returned, else ``None``.
        error: class name of the exception that ended the function, or ``None``.
        message: its text.
        traceback: its traceback, as text.
        exit_code: of the process; ``-9`` where signal 9 ended it; ``None`` where it had to be killed at the time-out.
        stdout: what the rank printed.
        stderr: what the rank printed as errors.
        seconds: from the start of the function to the end of the process.
        stacks: Python stacks of its threads shortly before the time-out, or when it was killed or crashed.
    """

    rank: int
    value: Any
    error: str | None
    message: str
    traceback: str
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float
    stacks: str

    @property
    def returned(self) -> bool:
        """Whether the function returned and the process then ended by itself with exit code 0."""
        return self.error is None and self.exit_code == 0

    def describe(self) -> str:
        how = "was still running" if self.exit_code is None else f"exit code {self.exit_code}"
        parts = [f"--- rank {self.rank}: {how}, {self.seconds:.1f} s"]
        if self.traceback and self.traceback not in self.stderr:
            parts.append(self.traceback.rstrip())
        if self.stdout.strip():
            parts.append(f"[stdout]\n{self.stdout.rstrip()}")
        if self.stderr.strip():
            parts.append(f"[stderr]\n{self.stderr.rstrip()}")
        if self.stacks.strip():
            parts.append(f"[stacks]\n{self.stacks.rstrip()}")
        return "\n".join(parts)


class RankFailed(AssertionError):
    """At least one rank raised or did not exit with 0. The text holds every rank's traceback, exit code and stderr."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [outcome.rank for outcome in outcomes if not outcome.returned]
        super().__init__(f"rank(s) {failed} of {len(outcomes)} failed\n" + "\n".join(o.describe() for o in outcomes))


class RanksHung(AssertionError):
    """The time-out passed. The text holds the stacks and stderr of every rank; all of them were killed."""

    def __init__(self, outcomes: list[Outcome], timeout: float) -> None:
        self.outcomes = outcomes
        hung = [outcome.rank for outcome in outcomes if outcome.exit_code is None]
        reports = "\n".join(outcome.describe() for outcome in outcomes)
        super().__init__(f"rank(s) {hung} of {len(outcomes)} still ran after {timeout:g} s\n{reports}")


def run_ranks(
    function: Callable[..., Any],
    size: int = 2,
    *args: Any,
    launcher: str = "torch",
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    expect_failure: bool = False,
    gpus: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` on ``size`` ranks.

    Args:
        function: defined at the top level of a module. It, ``args`` and what it returns are pickled.
        size: number of ranks.
        launcher: ``"torch"`` or ``"horovod"``, whose environment the ranks get, or ``"none"`` for no launcher.
        timeout: seconds until all ranks are killed.
        env: further environment variables; ``None`` removes one. ``{"TORCHELASTIC_USE_AGENT_STORE": None}`` makes
            rank 0 keep the rendezvous store, as without ``torchrun``.
        expect_failure: return how every rank ended instead of raising on failure.
        gpus: whether ranks see the GPUs that there are; ranks of one GPU would choose NCCL, which refuses them.

    Returns:
        The values returned, in rank order; with ``expect_failure`` a list of :class:`Outcome`.

    Raises:
        RankFailed: a rank raised, was killed, or did not exit with 0 (not with ``expect_failure``).
        RanksHung: a rank was still running at the time-out.
    """
    _start_fork_server()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-")))
        common = stack.enter_context(_launcher(launcher, size, env or {}))
        ranks = []
        for rank in range(size):
            variables = {**_own_environment(), **_ONE_THREAD, **common, **_rank_variables(launcher, rank, size)}
            variables |= {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
            for name, value in (env or {}).items():
                variables.pop(name, None) if value is None else variables.update({name: value})
            ranks.append(_Rank(folder / str(rank), rank, function, args, variables, timeout))
        finished = _wait(ranks, timeout, stop_early=not expect_failure)
        outcomes = [rank.outcome() for rank in ranks]
    if not finished:
        raise RanksHung(outcomes, timeout)
    if expect_failure:
        return outcomes
    if not all(outcome.returned for outcome in outcomes):
        raise RankFailed(outcomes)
    return [outcome.value for outcome in outcomes]


class _Rank:
    """The parent's view of one rank: its process and the folder through which it reports."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        function: Callable[..., Any],
        args: Any,
        variables: dict[str, str],
        timeout: float,
    ) -> None:
        folder.mkdir()
        self.rank = rank
        self.folder = folder
        self.process: BaseProcess = _context.Process(
            target=_rank_main, args=(str(folder), function, args, variables, timeout), name=f"rank {rank}", daemon=True
        )
        self.process.start()
        self.started = time.monotonic()
        self.ended: float | None = None
        self.killed = False

    def kill(self) -> None:
        if self.process.exitcode is None:
            self.killed = True
            if not self.read("stacks").strip() and self.process.pid is not None:
                os.kill(self.process.pid, signal.SIGABRT)  # faulthandler writes the stacks
                self.process.join(2)
            self.process.kill()
            self.process.join(10)

    def failed(self) -> bool:
        return self.process.exitcode not in (None, 0)

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def outcome(self) -> Outcome:
        path = self.folder / "outcome"
        report = pickle.loads(path.read_bytes()) if path.exists() else {}
        return Outcome(
            rank=self.rank,
            value=report.get("value"),
            error=report.get("error"),
            message=report.get("message", ""),
            traceback=report.get("traceback", ""),
            exit_code=None if self.killed else self.process.exitcode,
            stdout=self.read("stdout"),
            stderr=self.read("stderr"),
            seconds=(self.ended or time.monotonic()) - self.started,
            stacks=self.read("stacks"),
        )


def _wait(ranks: list[_Rank], timeout: float, stop_early: bool) -> bool:
    """Wait for all ranks to end, and kill what is left. False: the time-out passed with ranks still running.

    With ``stop_early`` the others get a few more seconds once one rank failed: the report shows what they made of it.
    """
    deadline = time.monotonic() + timeout
    failed = False
    try:
        while running := [rank for rank in ranks if rank.ended is None]:
            left = deadline - time.monotonic()
            if left <= 0:
                return failed and stop_early
            ready = multiprocessing.connection.wait([rank.process.sentinel for rank in running], left)
            for rank in running:
                if rank.process.sentinel in ready:
                    rank.process.join()
                    rank.ended = time.monotonic()
            if stop_early and not failed and any(rank.failed() for rank in ranks):
                failed = True
                deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_FIRST_FAILURE)
        return True
    finally:
        for rank in ranks:
            rank.kill()


def _rank_main(
    folder: str, function: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], timeout: float
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    _redirect(folder)
    stacks = open(os.path.join(folder, "stacks"), "w")  # noqa: SIM115 - stays open for the watchdog's lifetime
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(max(timeout - 1.5, timeout * 0.75), file=stacks)
    code = 1
    try:
        report = {"value": function(*args)}
        code = 0
    except BaseException as error:
        report = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        _write_report(folder, report)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            sys.last_value = error  # as the interpreter does, so that what its frames hold lives on until the end
            sys.excepthook(type(error), error, error.__traceback__)
    else:
        _write_report(folder, report)
    # multiprocessing leaves by os._exit and would skip these, which a script's end runs.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_report(folder: str, report: dict[str, Any]) -> None:
    path = os.path.join(folder, "outcome")
    with open(f"{path}.part", "wb") as file:
        pickle.dump(report, file)
    os.replace(f"{path}.part", path)


def _redirect(folder: str) -> None:
    for stream, number, name in ((sys.stdout, 1, "stdout"), (sys.stderr, 2, "stderr")):
        stream.flush()
        target = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(target, number)
        os.close(target)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the rest of the process


def _start_fork_server() -> None:
    """Start the fork server once, with one thread: a fork would leave other threads' locks held for ever."""
    if getattr(forkserver._forkserver, "_forkserver_pid", None) is not None:
        forkserver.ensure_running()
        return
    before = dict(os.environ)
    try:
        os.environ.update(_ONE_THREAD)
        os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        _context.set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _own_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }


def _rank_variables(launcher: str, rank: int, size: int) -> dict[str, str]:
    if launcher == "torch":
        return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
    if launcher == "horovod":
        return {"HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_CROSS_RANK": "0"}
    return {}


@contextlib.contextmanager
def _launcher(launcher: str, size: int, env: Mapping[str, str | None]) -> Iterator[dict[str, str]]:
    """What all ranks' environments have in common, while the launcher's own server runs in this process."""
    if launcher == "torch":
        with _torch_store(env.get("TORCHELASTIC_USE_AGENT_STORE", "True")) as (port, agent):
            yield {
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "0",
                **agent,
            }
    elif launcher == "horovod":
        yield _horovod_variables(size)
    elif launcher == "none":
        yield {}
    else:
        raise ValueError(f"launcher: is {launcher!r}; pass 'torch', 'horovod' or 'none'")


@contextlib.contextmanager
def _torch_store(use_agent_store: str | None) -> Iterator[tuple[int, dict[str, str]]]:
    if use_agent_store != "True":
        yield free_port(), {}
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield store.port, {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    del store


def free_port() -> int:
    """A TCP port of this host that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_rendezvous: Any = None


def _horovod_variables(size: int) -> dict[str, str]:
    global _rendezvous
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    if _rendezvous is None:  # one for all runs: stopping it takes half a second, and init() below clears it
        _rendezvous = (server := RendezvousServer()), server.start()
    server, port = _rendezvous
    server.init(get_host_assignments(parse_hosts(f"localhost:{size}"), size))
    return {
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
