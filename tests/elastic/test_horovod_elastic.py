"""Ranks that come and go under Horovod's own elastic launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# two names of this machine are two hosts to Horovod: the loss of a rank costs it all ranks of that host
DISCOVERY = """#!/bin/sh
echo localhost:1
if [ -e {folder}/more ]; then echo 127.0.0.1:2; else echo 127.0.0.1:1; fi
"""


@pytest.mark.horovod
@pytest.mark.slow
def test_a_job_grows_loses_a_rank_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.write_text(DISCOVERY.format(folder=tmp_path))
    script.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["horovodrun", "-np", "2", "--min-np", "1", "--max-np", "3", "--network-interface", "lo"]
    command += ["--host-discovery-script", str(script), sys.executable, str(ROOT / "tests/elastic/horovod_job.py")]
    finished = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    seen = json.loads((tmp_path / "rank0.json").read_text())
    assert seen["equal"], output
    assert seen["sizes"][0] == 2
    assert 3 in seen["sizes"]
    assert seen["sizes"][-1] < 3
    assert (seen["resets"][0], seen["resets"][-1]) == (3, seen["sizes"][-1])
    assert seen["left"] > 0
