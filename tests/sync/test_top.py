"""What ``crossover top`` shows, and ``crossover arbiter`` as a service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from crossover.sync import top
from crossover.sync.top import Look
from tests.sync.arbiters import arbiter, place_in, process_of, turn_of, until

pytest.importorskip("typer")

from typer.testing import CliRunner

from crossover.cli import app


def job(name: str, state: str = "idle", **more: Any) -> dict[str, Any]:
    usual = {
        **{"job": name, "rank": 0, "size": 2, "pid": 1, "state": state, "state_s": 1.0, "weight": 1.0, "priority": 0},
        **{"held_s": 10.0, "waited_s": 1.0, "present_s": 40.0, "turns": 100, "turn_s": 0.2, "exposed_s": 0.1},
        **{"wait_s": 0.05, "evictions": 0, "peak_bytes": 0},
    }
    return {**usual, **more}


def seen(*jobs: dict[str, Any], moment: float = 100.0) -> Look:
    facts = {"host": "h", "device": "d", "boot": 1, "epoch": 5, "busy_s": 1.0, "capacity_bytes": 0, "jobs": list(jobs)}
    return Look(facts, moment)


def test_the_holder_comes_first_then_the_queue() -> None:
    waiting = [job("late", "waiting", state_s=0.1), job("early", "waiting", state_s=0.9)]
    rows = top.rows(seen(job("idle"), *waiting, job("holder", "holding")))
    assert [row[0] for row in rows] == ["holder", "early", "late", "idle"]
    assert [row[top.HEADER.index("queue")] for row in rows] == ["", "1", "2", ""]


def test_shares_are_of_the_time_between_two_looks() -> None:
    before, now = seen(job("a", held_s=10.0), moment=100.0), seen(job("a", held_s=13.0), moment=104.0)
    share = top.HEADER.index("share")
    assert top.rows(now, before)[0][share] == "75%"
    assert top.rows(now)[0][share] == f"{13 / 40:.0%}"


def test_gain_predicted_and_achieved() -> None:
    before = seen(job("a", turns=100), job("b", turns=100), moment=100.0)
    now = seen(job("a", turns=125), job("b", turns=125), moment=110.0)
    found = top.gain(now, before)
    assert found.predicted == pytest.approx(1.5, rel=0.01)
    assert found.achieved == pytest.approx(50 * 0.3 / 10.0)
    assert top.headline(now, before) == "h d: gain predicted 1.50x, gain achieved 1.50x"


def test_a_lone_job_is_said_to_be_alone() -> None:
    assert "to itself" in top.headline(seen(job("a", turn_s=None, exposed_s=None)))


def test_an_arbiter_that_was_restarted_starts_counting_anew() -> None:
    before, now = seen(job("a"), job("b")), seen(job("a"), job("b"), moment=101.0)
    now.facts["boot"] = 2  # type: ignore[index]
    assert top.gain(now, before).achieved is None


def test_real_arbiters_are_found_and_dead_sockets_left_out(run_dir: Path) -> None:
    (run_dir / "here.dead.sock").write_text("")
    with arbiter(place_in(run_dir)), turn_of(place_in(run_dir), "[red]a[/]") as turn:
        turn.take()
        [found] = top.look(run_dir)
        assert found.key == ("here", "cpu0")
        text = top.show_plain([found], {})
        assert "[red]a[/]" in text
        assert "holding" in text


def test_top_prints_a_table_for_a_pipe(run_dir: Path) -> None:
    runner = CliRunner()
    assert "no arbiter is running" in runner.invoke(app, ["top"]).stdout
    with arbiter(place_in(run_dir)), turn_of(place_in(run_dir), "a"):
        result = runner.invoke(app, ["top", "--once", "--every", "0.1"])
        assert result.exit_code == 0
        assert "here cpu0:" in result.stdout
        [facts] = json.loads(runner.invoke(app, ["top", "--json"]).stdout)
        assert facts["jobs"][0]["job"] == "a"


def test_top_live(run_dir: Path) -> None:
    pytest.importorskip("rich")
    master, slave = os.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "120", "TERM": "xterm"}
    with arbiter(place_in(run_dir)), turn_of(place_in(run_dir), "live-job"):
        process = subprocess.Popen(
            [sys.executable, "-m", "crossover", "top", "--every", "0.1"], stdout=slave, stderr=slave, env=env
        )
        shown, deadline = b"", time.monotonic() + 60
        while b"live-job" not in shown and time.monotonic() < deadline:
            shown += os.read(master, 4096)
        process.terminate()
        process.wait(20)
    os.close(slave)
    os.close(master)
    assert b"live-job" in shown


def test_the_arbiter_as_a_service(run_dir: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    place = place_in(run_dir)
    service = subprocess.Popen([sys.executable, "-m", "crossover", "arbiter", "cpu0"], env=env, stderr=subprocess.PIPE)
    try:
        until(place.socket.exists, "the socket", 60)
        assert process_of(place.lock) == service.pid
        with turn_of(place, "a") as turn:
            turn.take()
            assert turn.served
    finally:
        service.terminate()
        _, errors = service.communicate(timeout=20)
    assert service.returncode == 0
    assert b"serving here.cpu0" in errors


def test_a_directory_that_is_not_safe_is_refused_in_words(run_dir: Path) -> None:
    run_dir.chmod(0o777)
    result = CliRunner().invoke(app, ["arbiter", "cpu0"])
    run_dir.chmod(0o700)
    assert result.exit_code == 2
    assert "could pose as the arbiter" in result.stderr
