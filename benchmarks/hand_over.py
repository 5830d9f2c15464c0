"""What does taking turns cost: a hand-over between two jobs, a holder's death, and a step of a job that is alone?

    python -m benchmarks.hand_over [--turns 2000] [--kills 20] [--save]

Two processes share one CPU slot through a real arbiter; moments are of the clock that all processes of a machine
share. A hand-over lasts from the holder's giving back to the other's going on: with jobs that are pinned to one core
and compute, as a slot's jobs do, and with jobs that may run anywhere and sleep while the device computes, as a GPU's
do; there each wake-up of an idle core counts, which takes long on virtual machines. After a death the partner waits
for the kernel to tell the arbiter, though a forked child of the dead process, such as a DataLoader's worker, lives on.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import notes
from crossover.sync.arbiter.messages import Hello
from crossover.sync.arbiter.places import Place
from crossover.sync.client import Turn
from crossover.sync.device import CpuSlot

TURN_S = 0.001
CHILD_S = 2.0
_context = multiprocessing.get_context("fork")


def _turn(directory: Path, job: str) -> Turn:
    return Turn(Place(directory, "benchmark", "slot"), CpuSlot("slot"), Hello(job=job))


def _take_turns(directory: Path, job: str, turns: int, pinned: bool, answer: Connection) -> None:
    if pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    turn, stamps = _turn(directory, job), []
    for _ in range(turns):
        turn.take()
        taken = time.monotonic_ns()
        if pinned:
            while time.monotonic_ns() < taken + TURN_S * 1e9:
                pass
        else:
            time.sleep(TURN_S)
        stamps.append((taken, time.monotonic_ns()))
        turn.rest()
    turn.close()
    answer.send(stamps)


def hand_overs(directory: Path, turns: int, pinned: bool) -> list[float]:
    """Seconds from giving back to going on, where the other job was waiting."""
    pipes = [_context.Pipe(duplex=False) for _ in range(2)]
    jobs = [
        _context.Process(target=_take_turns, args=(directory, job, turns, pinned, answer))
        for job, (_, answer) in zip("ab", pipes, strict=True)
    ]
    for job in jobs:
        job.start()
    stamps = sorted((*stamp, job) for job, (receive, _) in zip("ab", pipes, strict=True) for stamp in receive.recv())
    for job in jobs:
        job.join()
    pairs = itertools.pairwise(stamps)
    return [(later[0] - earlier[1]) * 1e-9 for earlier, later in pairs if earlier[2] != later[2]]


def _echo(end: socket.socket, parents: socket.socket, pinned: bool) -> None:
    parents.close()  # else its end would never be seen
    if pinned:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while message := end.recv(1):
        end.send(message)


def wake_ups(times: int, pinned: bool) -> list[float]:
    """Seconds that a byte takes to another process and back: the two wake-ups that a hand-over cannot do without."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    echo = _context.Process(target=_echo, args=(other, mine, pinned), daemon=True)
    echo.start()
    allowed, seconds = os.sched_getaffinity(0), []
    if pinned:
        os.sched_setaffinity(0, {min(allowed)})
    for _ in range(times):
        time.sleep(TURN_S)
        began = time.monotonic_ns()
        mine.send(b"x")
        mine.recv(1)
        seconds.append((time.monotonic_ns() - began) * 1e-9)
    os.sched_setaffinity(0, allowed)
    mine.close()
    echo.join()
    other.close()
    return seconds


def _hold_and_die(directory: Path, ready: Connection) -> None:
    turn = _turn(directory, "dying")
    turn.take()
    if not os.fork():  # a DataLoader's worker
        time.sleep(CHILD_S)
        os._exit(0)
    ready.send(turn.served)
    time.sleep(60)


def after_a_death(directory: Path) -> float:
    """Seconds from killing a holder to its partner's going on."""
    receive, ready = _context.Pipe(duplex=False)
    victim = _context.Process(target=_hold_and_die, args=(directory, ready))
    victim.start()
    assert receive.recv()
    turn = _turn(directory, "partner")
    killed: list[int] = []

    def kill(number: int, frame: object) -> None:
        killed.append(time.monotonic_ns())
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # by then the partner waits
    turn.take()
    seconds = (time.monotonic_ns() - killed[0]) * 1e-9
    turn.close()
    victim.join()
    return seconds


def alone(directory: Path, steps: int) -> float:
    """Seconds that a step's calls take while nobody else is there."""
    turn = _turn(directory, "alone")
    turn.take()
    began = time.perf_counter()
    for _ in range(steps):
        turn.take()
        turn.rest(0.005)
        turn.take()
        turn.rest()
    seconds = (time.perf_counter() - began) / steps
    assert turn.tally.sent == 1
    turn.close()
    return seconds


def row(what: str, seconds: Sequence[float]) -> list[str]:
    """Median and upper quantiles in microseconds."""
    cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else [seconds[0]] * 99
    return [what, *(f"{1e6 * value:.1f}" for value in (cuts[49], cuts[89], cuts[98])), str(len(seconds))]


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="xo-") as folder:
        for name in ("pinned", "idle"):  # an arbiter runs where the job that started it may
            Path(folder, name).mkdir(mode=0o700)
        measured: dict[str, Any] = {
            "hand-over, jobs pinned to one core": hand_overs(Path(folder, "pinned"), options.turns, True),
            "hand-over, jobs on idle cores": hand_overs(Path(folder, "idle"), options.turns, False),
            "of it two wake-ups, one core": wake_ups(options.turns, True),
            "of it two wake-ups, idle cores": wake_ups(options.turns, False),
            "partner goes on after SIGKILL of the holder": [after_a_death(Path(folder)) for _ in range(options.kills)],
            "calls of a step, alone": [alone(Path(folder), 10_000) for _ in range(5)],
        }
    header = ["microseconds", "median", "90 %", "99 %", "times"]
    table = notes.table(header, [row(what, seconds) for what, seconds in measured.items()])
    print(table)
    if options.save:
        print(notes.save("hand-over", "What taking turns costs", [table], measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
