"""``examples/language_model/train.py`` as a user runs it, with a few steps of a tiny model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks

pytest.importorskip("tqdm")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "language_model" / "train.py"
TINY = ["--width", "32", "--heads", "2", "--layers", "1", "--context", "32", "--batch-size", "8", "--sample", "20"]
TEXT = "".join(f"{number} bottles of beer on the wall, {number} bottles of beer.\n" for number in range(400))


def run_script(arguments: list[str]) -> None:
    sys.argv = [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as exit_:  # ranks other than 0 leave early
        if exit_.code:
            raise


def train(folder: Path, ranks: int, *extra: str, launcher: str = "torch", steps: int = 40) -> dict[str, Any]:
    (folder / "text.txt").write_text(TEXT)
    words = [*TINY, "--text", str(folder / "text.txt"), "--out", str(folder / "out"), "--steps", str(steps), *extra]
    run_ranks(run_script, ranks, words, launcher=launcher if ranks > 1 else "none", timeout=120)
    result: dict[str, Any] = json.loads((folder / "out" / "history.json").read_text())
    return result


def test_it_learns_and_leaves_a_model(tmp_path: Path) -> None:
    result = train(tmp_path, 2, "--eval-every", "20")
    assert [entry["step"] for entry in result["history"]] == [20, 40]
    bits = [entry["bits_per_byte"] for entry in result["history"]]
    assert bits[1] < bits[0] < 8.0
    assert bits[1] < 4.5
    assert (result["ranks"], result["lssr"]) == (2, 0.0)
    assert torch.load(tmp_path / "out" / "model.pt", weights_only=True)["bytes.weight"].shape == (256, 32)


def test_the_seed_decides(tmp_path: Path) -> None:
    results = []
    for name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        (tmp_path / name).mkdir()
        results.append(train(tmp_path / name, 2, "--seed", seed, steps=4))
    assert results[0] == results[1] != results[2]


def test_with_a_gate_some_steps_are_local(tmp_path: Path) -> None:
    result = train(tmp_path, 2, "--gate", "periodic:4", "--clip", "0", steps=12)
    assert result["lssr"] == pytest.approx(9 / 12)


@pytest.mark.horovod
def test_under_horovod(tmp_path: Path) -> None:
    result = train(tmp_path, 2, "--passes", "2", "--compression", "bf16", launcher="horovod", steps=4)
    assert result["history"][-1]["step"] == 4


def test_alone_on_its_own_text(tmp_path: Path) -> None:
    words = [*TINY, "--out", str(tmp_path), "--steps", "2", "--gate", "selsync"]
    run_ranks(run_script, 1, words, launcher="none", timeout=120)
    assert json.loads((tmp_path / "history.json").read_text())["ranks"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule", "priority"], "too late for clipping; add --clip 0"),
        (["--heads", "3"], "--width: is 128; it has to be a multiple of --heads, 3"),
        (["--steps", "0"], "--steps: is 0; it has to be at least 1"),
    ],
)
def test_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
