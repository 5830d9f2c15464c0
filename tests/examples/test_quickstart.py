"""The main job, as the README starts it: two ranks, real digits, a checkpoint, and a run that goes on from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def quickstart(out: Path, *options: str) -> str:
    """What rank 0 prints."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "quickstart.py"), "--width", "8", "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch + script, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_learns_digits_on_two_ranks_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first = quickstart(tmp_path, "--epochs", "3")
    assert "2 rank(s)" in first
    assert len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["history"]) == 3
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
    second = quickstart(tmp_path, "--epochs", "5", "--resume")
    assert "epoch   4/5" in second
    assert "epoch   3/5" not in second
    accuracy = re.search(r"test accuracy +([\d.]+)%", second)
    assert accuracy is not None
    assert float(accuracy.group(1)) > 80
