"""``crossover profile``: runs a training command until it has measured itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from crossover.cli import app
from tests.deft.profiles import random_profile

SCRIPT = """
import sys

import torch

import crossover as xo

xo.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = xo.DistributedOptimizer(optimizer, model.named_parameters(), gate="selsync:0.3")
xo.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
print("trained to its end", flush=True)
"""


@pytest.mark.timeout(180)
def test_the_command_runs_a_script_until_the_profile_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "crossover", "profile", "--steps", "5", "-o", "seen.json", "--", *launch, "10000000"]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "trained to its end" not in done.stdout
    for word in ("seen.json: 5 steps on 2 ranks", "times computing", "significance of 6 steps"):
        assert word in done.stdout, done.stdout
    assert done.stdout.rstrip().endswith("next: crossover advise seen.json")
    advised = CliRunner().invoke(app, ["advise", str(tmp_path / "seen.json")])
    assert advised.exit_code == 0, advised.output
    assert "SelSync's delta, by the share of local steps that is wanted: " in advised.stdout
    for share in ("for 50%", "for 80%", "for 90%"):
        assert share in advised.stdout


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sh", "-c", "exit 3"], "code 3 and wrote no profile; it has to train for 40 steps or more (30 "),
        (["no-such-command"], "cannot run 'no-such-command'"),
    ],
)
def test_the_command_explains_why_there_is_no_profile(tmp_path: Path, command: list[str], said: str) -> None:
    output = str(tmp_path / "profile.json")
    done = CliRunner().invoke(app, ["profile", "--steps", "5", "--output", output, "--", *command])
    assert done.exit_code == 2
    assert said in done.stderr


def test_the_training_may_go_on(tmp_path: Path) -> None:
    output, found = tmp_path / "profile.json", random_profile(0, 3)
    found.save(tmp_path / "found")
    script = f"cp {tmp_path / 'found'} {output}; sleep 0.5; touch {tmp_path / 'end'}"
    for words, ended in (([], False), (["--keep"], True)):
        done = CliRunner().invoke(app, ["profile", "-o", str(output), *words, "--", "sh", "-c", script])
        assert done.exit_code == 0, done.output
        assert (tmp_path / "end").exists() == ended
