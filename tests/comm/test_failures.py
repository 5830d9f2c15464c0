"""What the other ranks are told when one is late, killed, broken or gone, and how fast."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from crossover import runtime
from tests.comm.jobs import BOTH, joined
from tests.harness import Outcome, free_port, run_ranks

SHORT = {"CROSSOVER_TIMEOUT": "2", "CROSSOVER_STALL_WARNING": "0.7"}
OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": None}


def barrier_without(absent: int) -> None:
    comm = joined()
    comm.barrier(name="together")
    if comm.rank == absent:
        time.sleep(6)
        return
    started = time.monotonic()
    try:
        comm.barrier(name="end of epoch")
    finally:
        print(f"waited {time.monotonic() - started:.2f}", flush=True)


def _waited(outcome: Outcome) -> float:
    return float(outcome.stdout.split("waited ")[1].split()[0])


@pytest.mark.parametrize("launcher", BOTH)
def test_a_barrier_names_the_absent_rank_at_the_time_out(launcher: str) -> None:
    outcomes = run_ranks(barrier_without, 3, 2, launcher=launcher, env=SHORT, expect_failure=True)
    for rank, other in ((0, 1), (1, 0)):
        outcome = outcomes[rank]
        assert outcome.error == "CommunicationError"
        assert outcome.exit_code == 1
        assert 1.5 < _waited(outcome) < 5
        assert "'end of epoch'" in outcome.message
        assert "did not finish within the time-out of 2 s." in outcome.message
        assert f"on rank {rank} of ranks 0-2" in outcome.message
        said = outcome.message.split(f"rank {other}: ")[1].splitlines()[0]
        assert said.startswith(("waiting in 'end of epoch'", "gave up on 'end of epoch'"))
        assert "rank 2: no word: killed, or still computing" in outcome.message
        assert "Absent: rank 2" in outcome.message
        assert "CROSSOVER_TIMEOUT" in outcome.message


@pytest.mark.parametrize("launcher", BOTH)
def test_a_stall_is_warned_of_before_the_time_out(launcher: str) -> None:
    outcomes = run_ranks(barrier_without, 2, 1, launcher=launcher, env=SHORT, expect_failure=True)
    before_traceback = outcomes[0].stderr.split("Traceback")[0]
    assert "rank 0 has waited" in before_traceback
    assert "'end of epoch'" in before_traceback
    assert "rank 1: no word" in before_traceback


def slow_but_in_time() -> float:
    comm = joined()
    if comm.rank == 1:
        time.sleep(2.5)
    tensor = torch.ones(3)
    comm.all_reduce(tensor, name="slow").wait()
    comm.all_reduce(tensor, name="again").wait()
    return tensor.sum().item()


@pytest.mark.parametrize("launcher", BOTH)
def test_a_late_rank_costs_a_warning_only(launcher: str) -> None:
    outcomes = run_ranks(
        slow_but_in_time,
        2,
        launcher=launcher,
        env={"CROSSOVER_TIMEOUT": "20", "CROSSOVER_STALL_WARNING": "0.5"},
        expect_failure=True,
    )
    assert [outcome.value for outcome in outcomes] == [12.0, 12.0]
    assert all(outcome.exit_code == 0 for outcome in outcomes)
    assert outcomes[0].stderr.count("has waited") == 1
    assert "has waited" not in outcomes[1].stderr


def waits() -> float:
    comm = joined()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(2)
    before = time.process_time()
    comm.all_reduce(torch.ones(3), name="late").wait()
    return time.process_time() - before


@pytest.mark.parametrize("launcher", BOTH)
def test_waiting_leaves_the_processor_to_others(launcher: str) -> None:
    assert run_ranks(waits, 2, launcher=launcher)[0] < 1.0  # of 2 s; Horovod's own wait takes more than all of them


def killed(victim: int) -> None:
    comm = joined()
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        comm.all_reduce(torch.ones(1000), name="gradients").wait()


@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_at_once(size: int, launcher: str) -> None:
    outcomes = run_ranks(killed, size, size - 1, launcher=launcher, expect_failure=True)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.error == "CommunicationError"
        assert "'gradients'" in outcome.message
        assert f"rank {size - 1}: no word: killed, or still computing" in outcome.message
        # A survivor that Horovod leaves waiting has at times no word for the others yet.
        assert re.search(rf"Absent: ranks? (\d,)*{size - 1};", outcome.message)
        assert outcome.exit_code == 1
        assert outcome.seconds < 15


def waits_for_a_rank_that_gives_up() -> None:
    comm = joined()
    comm.barrier()
    if comm.rank == 1:
        comm.vigil.failure("gradients", 0.0, RuntimeError("the link is down"))
        time.sleep(10)
        return
    comm.all_reduce(torch.ones(10), name="gradients").wait()


@pytest.mark.parametrize("launcher", BOTH)
def test_a_wait_ends_when_another_rank_has_given_up(launcher: str) -> None:
    """Also where the backend would leave it waiting: the rank that gave up lives, and so do its connections."""
    first, second = run_ranks(waits_for_a_rank_that_gives_up, 2, launcher=launcher, expect_failure=True)
    assert second.exit_code == 0
    assert first.error == "CommunicationError"
    assert "rank 1 had failed." in first.message
    assert "rank 1: gave up on 'gradients'" in first.message
    assert first.seconds < 10


def test_a_killed_rank_that_kept_the_store_is_named_too() -> None:
    outcomes = run_ranks(killed, 2, 0, env=OWN_STORE, expect_failure=True)
    assert outcomes[1].error == "CommunicationError"
    assert "rank 0, which keeps it, had ended" in outcomes[1].message
    assert "rank 0: no word" in outcomes[1].message
    assert outcomes[1].seconds < 15


def raises_in_step(victim: int) -> None:
    comm = joined()
    comm.barrier()
    tensor = torch.ones(10)
    for step in range(5):
        work = comm.all_reduce(tensor, name=f"bucket {step}")
        if comm.rank == victim and step == 3:
            raise ValueError("batch 17 is empty")
        work.wait()


@pytest.mark.parametrize("launcher", BOTH)
def test_an_exception_is_told_to_the_others(launcher: str) -> None:
    outcomes = run_ranks(raises_in_step, 3, 1, launcher=launcher, expect_failure=True)
    assert outcomes[1].error == "ValueError"
    assert outcomes[1].exit_code == 1
    assert outcomes[1].stderr.rstrip().endswith("ValueError: batch 17 is empty")
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "CommunicationError"
        assert "rank 1: raised ValueError: batch 17 is empty" in outcome.message
        assert "Absent: rank 1, ended by the exception above" in outcome.message
    assert all(outcome.seconds < 15 for outcome in outcomes)


def raises_with_work_in_flight() -> None:
    comm = joined()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(4)
        return
    comm.all_reduce(torch.ones(10), name="never joined")
    raise ValueError("no time to wait")


@pytest.mark.parametrize("launcher", BOTH)
def test_an_exception_ends_the_process_though_a_collective_is_in_flight(launcher: str) -> None:
    outcomes = run_ranks(raises_with_work_in_flight, 2, launcher=launcher, expect_failure=True)
    assert outcomes[0].exit_code == 1
    assert outcomes[0].seconds < 3
    assert outcomes[0].stderr.rstrip().endswith("ValueError: no time to wait")


def leaves_early(victim: int) -> None:
    comm = joined()
    comm.barrier()
    if comm.rank != victim:
        comm.all_reduce(torch.ones(10), name="step 12").wait()


@pytest.mark.parametrize("launcher", BOTH)
def test_a_rank_that_ran_out_of_data_is_named(launcher: str) -> None:
    outcomes = run_ranks(leaves_early, 2, 1, launcher=launcher, env={"CROSSOVER_TIMEOUT": "8"}, expect_failure=True)
    assert outcomes[1].returned
    assert outcomes[0].error == "CommunicationError"
    assert "rank 1: left at" in outcomes[0].message
    assert "crossover.join()" in outcomes[0].message
    assert outcomes[0].seconds < 15


def other_order() -> None:
    comm = joined()
    comm.barrier()
    comm.all_reduce(torch.ones(10), name="a" if comm.rank == 0 else "b").wait()


@pytest.mark.horovod
def test_ranks_that_wait_for_different_things_are_told_so() -> None:
    outcomes = run_ranks(other_order, 2, launcher="horovod", env=SHORT, expect_failure=True)
    told = [outcome for outcome in outcomes if "in another collective" in outcome.message]
    assert told
    assert all(outcome.error == "CommunicationError" for outcome in outcomes)


def never_started() -> None:
    if os.environ["RANK"] == "1":
        return
    runtime.init(timeout=2)


def test_a_rank_that_does_not_start_is_named() -> None:
    first, second = run_ranks(never_started, 2, expect_failure=True)
    assert second.returned
    assert first.error == "CommunicationError"
    assert "'crossover.init'" in first.message
    assert "Absent: rank 1" in first.message
    assert first.seconds < 12


SCRIPT = """
import sys, torch
from crossover import runtime
runtime.init()
comm = runtime.context().communicator
comm.barrier()
if comm.rank == 1:
    raise KeyError("lost")
comm.all_reduce(torch.ones(3), name="gradients").wait()
"""


def test_a_real_script_ends_with_its_own_traceback() -> None:
    """The interpreter's own end, which the harness only imitates."""
    port = str(free_port())
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SCRIPT]
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert errors[1].rstrip().endswith("KeyError: 'lost'")
    assert "raised KeyError: 'lost'" in errors[0]
    assert "crossover.errors.CommunicationError: 'gradients' on rank 0" in errors[0]
