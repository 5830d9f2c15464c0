"""``train.py`` as a user runs it: alone, on two ranks, killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.imagenet.example import FOLDER

SECONDS = 240
RECIPE = [
    *("--cpu", "--model", "resnet18", "--image-size", "32", "--batch-size", "4", "--workers", "0", "--deterministic"),
    *("--epochs", "3", "--warmup-epochs", "1", "--optimizer", "adamw", "--lr", "0.03", "--ema-decay", "0.9"),
    *("--save-steps", "2", "--log-steps", "2"),
]
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "HOROVOD_", "CROSSOVER_", "OMPI_", "SLURM_", "TORCHELASTIC_")


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What ``torchrun`` sets; by hand, so that a test can kill the ranks themselves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(FOLDER.parents[1]), kept.get("PYTHONPATH", "")]))
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CROSSOVER_TIMEOUT": "120"}
    if size > 1:
        kept |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return kept


@dataclass
class Rank:
    """A running ``train.py`` and the file that it prints into."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def started(arguments: list[str], size: int) -> Iterator[list[Rank]]:
    """Ranks of ``train.py``, killed at the end of the block if they have not ended by then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(FOLDER / "train.py"), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for number in range(size):
            log = Path(folder, f"rank{number}.log")
            with log.open("wb") as file:
                variables = environment(number, size, port)
                process = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
            ranks.append(Rank(process, log))
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait(30)


def run(arguments: list[str], size: int) -> str:
    """Run to the end.

    Returns:
        What rank 0 printed.
    """
    deadline = time.monotonic() + SECONDS
    with started(arguments, size) as ranks:
        while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        outputs = [rank.output() for rank in ranks]
        assert [rank.process.returncode for rank in ranks] == [0] * size, "\n".join(outputs)
    return outputs[0]


def kill_all_after(line: str, arguments: list[str]) -> None:
    """Start two ranks and send both SIGKILL as soon as rank 0 has printed ``line``."""
    deadline = time.monotonic() + SECONDS
    with started(arguments, 2) as ranks:
        while line not in (output := ranks[0].output()):
            assert ranks[0].process.poll() is None, output
            assert time.monotonic() < deadline, output
            time.sleep(0.02)
        for rank in ranks:
            rank.process.kill()
        assert [rank.process.wait(30) for rank in ranks] == [-9, -9], output


def history(out: Path) -> list[dict[str, float]]:
    """Results by epoch, without the one that is a matter of time."""
    entries = json.loads((out / "history.json").read_text())
    return [{name: value for name, value in entry.items() if name != "images_per_second"} for entry in entries]


def weights(out: Path) -> dict[str, Any]:
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    return {**state["model"], **{f"ema.{name}": value for name, value in state["ema"].items()}}


@pytest.fixture(scope="module")
def unbroken(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of 2 ranks that nothing interrupted."""
    out = tmp_path_factory.mktemp("unbroken")
    run([str(tree), "--out", str(out), *RECIPE, "--clip", "5"], size=2)
    yield out
    _remove_checkpoints(out)


@pytest.fixture(autouse=True)
def tidy(tmp_path: Path) -> Iterator[None]:
    """Checkpoints are large, and pytest keeps the folders of three sessions."""
    yield
    _remove_checkpoints(tmp_path)


def _remove_checkpoints(folder: Path) -> None:
    for path in folder.rglob("*.pt*"):
        path.unlink()


@pytest.mark.slow
def test_killed_in_the_middle_of_an_epoch_and_resumed(tree: Path, unbroken: Path, tmp_path: Path) -> None:
    arguments = [str(tree), "--out", str(tmp_path), *RECIPE, "--clip", "5", "--resume"]
    kill_all_after("next is epoch 2 step 3", arguments)
    position = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["position"]
    assert position["epoch"] == 1  # the second
    assert 0 < position["images"] < 72

    output = run(arguments, size=2)
    assert re.search(rf"from epoch 2 step {position['images'] // 8 + 1}\b", output), output
    whole, resumed = history(unbroken), history(tmp_path)
    assert resumed[-1]["top1"] == whole[-1]["top1"]
    assert whole[-1]["top1"] > 0.5  # of four classes: it has learned
    assert [entry.pop("train_loss") for entry in resumed] == pytest.approx([entry.pop("train_loss") for entry in whole])
    assert resumed == whole
    expected, found = weights(unbroken), weights(tmp_path)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.slow
def test_stopped_at_the_end_of_an_epoch_and_resumed(tree: Path, unbroken: Path, tmp_path: Path) -> None:
    """A run of which nothing is left to do ends at once, with the results there are."""
    arguments = [str(tree), "--out", str(tmp_path), *RECIPE, "--clip", "5", "--resume"]
    kill_all_after("next is epoch 2 step 1", arguments)
    run(arguments, size=2)
    assert history(tmp_path)[-1]["top1"] == history(unbroken)[-1]["top1"]
    before = (tmp_path / "history.json").read_text()
    assert "from epoch 4" in run(arguments, size=2)
    assert (tmp_path / "history.json").read_text() == before


@pytest.mark.slow
def test_both_schedules_train_the_same_weights(tree: Path, tmp_path: Path) -> None:
    """With dropout and without BatchNorm; the sum over two ranks does not depend on how gradients were cut up."""
    results = []
    for schedule, extra in (("overlapped", []), ("priority", ["--crossover", "bucket_cap_mb=5"])):
        out = tmp_path / schedule
        recipe = [*RECIPE, "--model", "squeezenet1_1", "--image-size", "48", "--epochs", "1", "--schedule", schedule]
        run([str(tree), "--out", str(out), *recipe, *extra], size=2)
        results.append(torch.load(out / "checkpoint.pt", weights_only=True)["model"])
    first, second = results
    assert [name for name, value in first.items() if not torch.equal(second[name], value)] == []


@pytest.mark.slow
def test_one_process_with_mixed_precision_workers_and_tensorboard(tree: Path, tmp_path: Path) -> None:
    arguments = [str(tree), "--out", str(tmp_path), *RECIPE, "--epochs", "1", "--workers", "1", "--tensorboard"]
    output = run([*arguments, "--amp", "bf16", "--channels-last", "--backward-passes-per-step", "2"], size=1)
    assert "8 images a step, 9 steps an epoch, 72 + 44 images" in output
    assert "\r" not in output  # no progress bar where there is no terminal
    assert re.search(r"epoch 1 step 2/9  loss [\d.]+  top-1 [\d.]+%  lr [\d.]+  \d+ images/s", output), output
    assert list((tmp_path / "tensorboard").glob("events.*"))
    (entry,) = history(tmp_path)
    assert entry["images"] == entry["ema_images"] == 44


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--schedule", "priority", "--clip", "1"], "--schedule priority: averages arrive after step"),
        (["--crossover", "bucket_size=5"], "NAME=VALUE with a NAME of"),
        (["--model", "resnet51"], "torchvision has no classifier 'resnet51'"),
        (["--ema-decay", "1"], "--ema-decay: is 1.0"),
        (["--epochs", "0"], "--epochs: is 0; it has to be at least 1"),
    ],
)
def test_refuses(tree: Path, extra: list[str], message: str) -> None:
    command = [sys.executable, str(FOLDER / "train.py"), str(tree), *extra]
    done = subprocess.run(command, env=environment(0, 1, 0), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr
