"""``benchmarks/imagenet.py``: turns, ratios and the limit worked out by hand, and one short run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import imagenet
from benchmarks.imagenet import CannotRun, Measured
from tests.imagenet.example import FOLDER
from tests.imagenet.test_train import environment


def test_systems_take_turns_and_one_that_cannot_run_is_not_tried_again() -> None:
    calls = []

    def run(system: str) -> float:
        calls.append(system)
        if system == "horovod":
            raise CannotRun("there is none")
        return float(len(calls))

    results = imagenet.in_turn(["ddp", "overlapped", "horovod"], 3, run)
    assert calls == ["ddp", "overlapped", "horovod", "overlapped", "ddp", "ddp", "overlapped"]
    assert results["ddp"].seconds == [1.0, 5.0, 6.0]
    assert (results["horovod"].seconds, results["horovod"].reason) == ([], "there is none")


def test_other_errors_are_not_hidden() -> None:
    def run(system: str) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        imagenet.in_turn(["ddp"], 1, run)


def test_rates_spread_and_ratios() -> None:
    results = {
        "ddp": Measured([0.2, 0.4, 0.1]),
        "overlapped": Measured([0.1, 0.4, 0.125]),
        "horovod": Measured(reason="there is none"),
    }
    ddp, ours, horovod = imagenet.rows_of(results, images=20)
    assert ddp == ["DDP", "100.0", "50.0 to 200.0", "200.0", "1.000"]
    # ratios of the repeats are 2, 1 and 0.8: their median, not the ratio of medians (1.6)
    assert ours == ["Crossover, Overlapped", "160.0", "50.0 to 200.0", "125.0", "1.000"]
    assert horovod == ["Horovod", "cannot run", "", "", ""]


@pytest.mark.parametrize(
    ("computing", "link", "step", "what"),
    [(0.05, "100mbit", "80.0", "all-reduce"), (0.05, "1gbit", "50.0", "computing")],
)
def test_limit(computing: float, link: str, step: str, what: str) -> None:
    """1 MB over 2 ranks: each sends 8 Mbit."""
    row = imagenet.limit_row({"plain": Measured([computing])}, images=10, ranks=2, nbytes=1_000_000, link=link)
    assert row[3] == step
    assert row[0].endswith(what)


def test_gradients_of_resnet50() -> None:
    assert imagenet.gradient_bytes(argparse.Namespace(model="resnet50")) == 4 * 25_557_032


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = [
        "--quick",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--link",
        "500mbit",
        "--timeout",
        "120",
        "--json",
        str(path),
    ]
    command = [
        sys.executable,
        "-m",
        "benchmarks.imagenet",
        *options,
        "--systems",
        "plain",
        "ddp",
        "priority",
        "horovod",
    ]
    root = FOLDER.parents[1]
    done = subprocess.run(
        command, cwd=root, env=environment(0, 1, 0), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    for system in ("plain", "ddp", "priority"):
        assert len(data["systems"][system]["seconds"]) == 2, done.stdout  # --quick has two repeats
        assert data["systems"][system]["reason"] is None
    horovod = data["systems"]["horovod"]
    assert bool(horovod["seconds"]) != bool(horovod["reason"])
    assert data["ranks"] == 2
    assert "| max(computing, all-reduce) at 500mbit" in done.stdout
