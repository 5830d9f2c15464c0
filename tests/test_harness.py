"""The harness itself: a test that hangs or fails on one rank has to say so."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

from tests.harness import RankFailed, RanksHung, run_ranks


def environment(*args: Any) -> tuple[str, str, str, tuple[Any, ...]]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], args


def test_ranks_get_their_arguments_and_environment() -> None:
    assert run_ranks(environment, 3, "a", 2) == [(str(rank), "3", "1", ("a", 2)) for rank in range(3)]


def variable() -> str | None:
    return os.environ.get("CROSSOVER_TIMEOUT")


def test_variables_are_given_and_none_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSOVER_TIMEOUT", "77")
    assert run_ranks(variable, 1) == [None]
    assert run_ranks(variable, 1, env={"CROSSOVER_TIMEOUT": "5"}) == ["5"]


def threads_of_the_fork_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_the_fork_server_has_one_thread() -> None:
    assert run_ranks(threads_of_the_fork_server, 1) == [1]


def fails_on_one() -> str:
    print("to stderr", file=sys.stderr)
    if os.environ["RANK"] == "1":
        raise KeyError("missing")
    return "fine"


def test_a_failed_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"rank\(s\) \[1\] of 2 failed") as caught:
        run_ranks(fails_on_one, 2)
    text = str(caught.value)
    assert "in fails_on_one" in text
    assert "KeyError: 'missing'" in text
    assert "rank 1: exit code 1" in text
    assert "rank 0: exit code 0" in text
    assert text.count("to stderr") == 2


def test_failures_can_be_looked_at() -> None:
    fine, failed = run_ranks(fails_on_one, 2, expect_failure=True)
    assert (fine.returned, fine.value, fine.exit_code) == (True, "fine", 0)
    assert (failed.returned, failed.error, failed.message, failed.exit_code) == (False, "KeyError", "'missing'", 1)


def hangs_on_one() -> None:
    if os.environ["RANK"] == "0":
        time.sleep(60)


def test_a_hanging_rank_is_killed_and_its_stack_is_shown() -> None:
    started = time.monotonic()
    with pytest.raises(RanksHung, match=r"rank\(s\) \[0\] of 2 still ran after 2 s") as caught:
        run_ranks(hangs_on_one, 2, timeout=2)
    assert time.monotonic() - started < 15
    assert "in hangs_on_one" in str(caught.value)


def ends_by_signal() -> None:
    os.kill(os.getpid(), 9)


def test_a_signal_is_an_exit_code() -> None:
    (outcome,) = run_ranks(ends_by_signal, 1, expect_failure=True)
    assert (outcome.exit_code, outcome.error, outcome.value) == (-9, None, None)
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(ends_by_signal, 1)


def exits(code: Any) -> None:
    sys.exit(code)


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (None, 0), ("why", 1)])
def test_sys_exit(code: Any, expected: int) -> None:
    (outcome,) = run_ranks(exits, 1, code, expect_failure=True)
    assert outcome.exit_code == expected
