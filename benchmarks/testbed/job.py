"""One job on the testbed: a process on each host, their output, and how they ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from .errors import JobError

GRACE_SECONDS = 10.0
STOP_SECONDS = 5.0
DRAIN_SECONDS = 5.0
SHOWN_LINES = 15
TIMED_OUT = 124
_print_lock = threading.Lock()


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        exit_codes: of each rank; 128 + signal number where a signal ended it.
        first_failed: the rank that failed first, or None if all ended with 0.
        timed_out: the ranks that were still running when the time-out passed.
        seconds: from the start to the last rank's end.
        stdout, stderr: what each rank wrote.
    """

    exit_codes: tuple[int, ...]
    first_failed: int | None
    timed_out: tuple[int, ...]
    seconds: float
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0, the first failing rank's exit code, or 124 after a time-out."""
        if self.timed_out:
            return TIMED_OUT
        return 0 if self.first_failed is None else self.exit_codes[self.first_failed]

    def check(self) -> JobResult:
        """This result, if every rank ended with 0.

        Raises:
            JobError: a rank failed or ran out of time; names it and shows its last lines.
        """
        if self.exit_code == 0:
            return self
        if self.timed_out:
            what, rank = f"ranks {list(self.timed_out)} still ran after the time-out", self.timed_out[0]
        else:
            assert self.first_failed is not None
            what, rank = f"rank {self.first_failed} failed first, with exit code {self.exit_code}", self.first_failed
        lines = (self.stdout[rank] + self.stderr[rank]).splitlines()[-SHOWN_LINES:]
        raise JobError("\n".join([f"{what}; its last lines:", *lines]), self.exit_code)


class Job:
    """Running ranks. Made by :meth:`Testbed.start <benchmarks.testbed.bed.Testbed.start>`.

    Output is taken from the pipes from the start, so that no rank ever blocks on it.

    Args:
        commands: each rank's command line, which enters the rank's host.
        environments: each rank's whole environment.
        echo: whether to pass each line on at once, with the rank in front of it.
        helper: a process that serves the ranks and ends with them.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        echo: bool = False,
        helper: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._helper = helper
        self._began = time.monotonic()
        self.processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._text: list[tuple[list[str], list[str]]] = []
        try:
            for command, environment in zip(commands, environments, strict=True):
                self._spawn(command, environment, echo)
        except BaseException:
            self.close()
            raise

    def _spawn(self, command: Sequence[str], environment: Mapping[str, str], echo: bool) -> None:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the driver; it ends the ranks
        )
        self.processes.append(process)
        self._text.append(([], []))
        prefix = f"[{len(self.processes) - 1}] " if echo else None
        assert process.stdout is not None
        assert process.stderr is not None
        pipes = zip((process.stdout, process.stderr), self._text[-1], (sys.stdout, sys.stderr), strict=True)
        for pipe, lines, console in pipes:
            thread = threading.Thread(target=_pump, args=(pipe, lines, console, prefix), daemon=True)
            thread.start()
            self._threads.append(thread)

    def pid(self, rank: int) -> int | None:
        """The rank's own process id as the driver sees it; None once it has ended."""
        children = Path(f"/proc/{self.processes[rank].pid}/task/{self.processes[rank].pid}/children")
        with contextlib.suppress(OSError):
            found = children.read_text().split()
            return int(found[0]) if found else None
        return None

    def signal(self, rank: int, number: int) -> None:
        """Send the signal to one rank, if it still runs."""
        pid = self.pid(rank)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, timeout: float, grace: float = GRACE_SECONDS) -> JobResult:
        """Wait for all ranks to end.

        When a rank fails, the others have ``grace`` seconds to end by themselves; then, as after the time-out, they are
        ended with SIGTERM and, 5 s later, SIGKILL.
        """
        deadline = self._began + timeout
        running = set(range(len(self.processes)))
        first_failed = None
        try:
            while running:
                ended = self._next_ended(running, deadline)
                if not ended:
                    break
                running -= ended
                failed = sorted(rank for rank in ended if self.processes[rank].returncode != 0)
                if failed and first_failed is None:
                    first_failed = failed[0]
                    deadline = min(deadline, time.monotonic() + grace)
        finally:
            self.close()
        seconds = time.monotonic() - self._began
        timed_out = tuple(sorted(running)) if first_failed is None else ()
        codes = tuple(_exit_code(process.returncode) for process in self.processes)
        texts = [("".join(out), "".join(err)) for out, err in self._text]
        stdout, stderr = tuple(out for out, _ in texts), tuple(err for _, err in texts)
        return JobResult(codes, first_failed, timed_out, seconds, stdout, stderr)

    def _next_ended(self, running: set[int], deadline: float) -> set[int]:
        """Those of ``running`` that have ended, waiting for one if need be; empty when the deadline passes first."""
        ended = {rank for rank in running if self.processes[rank].poll() is not None}
        if ended:
            return ended
        descriptors = {rank: os.pidfd_open(self.processes[rank].pid) for rank in running}
        try:
            with selectors.DefaultSelector() as selector:
                for descriptor in descriptors.values():
                    selector.register(descriptor, selectors.EVENT_READ)
                selector.select(max(0.0, deadline - time.monotonic()))
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return {rank for rank in running if self.processes[rank].poll() is not None}

    def close(self) -> None:
        """End whatever still runs, and wait until it is gone and its output is in."""
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.signal(rank, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            # The rank's own children may have outlived it: they are in its process group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)
        for thread in self._threads:
            thread.join(DRAIN_SECONDS)
        if self._helper is not None:
            assert self._helper.stdin is not None
            self._helper.stdin.close()
            self._helper.kill()
            self._helper.wait(STOP_SECONDS)
            self._helper = None


def _pump(pipe: IO[str], lines: list[str], console: TextIO, prefix: str | None) -> None:
    with pipe:
        for line in pipe:
            lines.append(line)
            if prefix is not None:
                with _print_lock:
                    console.write(prefix + line.removesuffix("\n") + "\n")
                    console.flush()


def _exit_code(returncode: int | None) -> int:
    if returncode is None:
        return 128 + signal.SIGKILL
    return 128 - returncode if returncode < 0 else returncode
