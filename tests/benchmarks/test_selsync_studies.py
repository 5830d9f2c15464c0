"""The studies of SelSync in their smallest form: on real ranks with a few steps, and their pure functions."""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import crossover as xo
from benchmarks import local_steps, selsync_data, selsync_dial, selsync_periodic
from benchmarks.selsync_data import SmallCNN
from tests.harness import run_ranks

pytest.importorskip("sklearn")

Answers = dict[str, dict[str, float]]


def answers_of(measure: Any, task: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    xo.init()
    answers = measure(task)
    xo.shutdown()
    return answers


# -- the dial ----------------------------------------------------------------------------------------------------------


def test_the_dial_on_two_ranks() -> None:
    task = {"workload": "vgg", "batch_size": 2, "steps": 8, "warmup": 3, "seed": 0, "deltas": ["0.0", "0.5", "inf"]}
    first, second = run_ranks(answers_of, 2, selsync_dial.measure, task)
    assert {delta: first[delta]["lssr"] for delta in ("0.0", "inf")} == {"0.0": 0.0, "inf": 6 / 8}
    assert 0.0 <= first["0.5"]["lssr"] <= 6 / 8
    for delta in task["deltas"]:
        for key in ("lssr", "accuracy", "loss"):  # of the average: one model, though each rank evaluates its own copy
            assert first[delta][key] == pytest.approx(second[delta][key]), (delta, key)
    assert first["0.0"]["own_accuracy"] == second["0.0"]["own_accuracy"]


def curve(*lssr: float) -> dict[float, list[dict[str, float]]]:
    deltas = (0.0, 0.3, math.inf)
    return {delta: [{"lssr": value, "accuracy": 0.9}] for delta, value in zip(deltas, lssr, strict=True)}


def test_a_curve_that_falls_is_not_called_monotone(tmp_path: Path) -> None:
    assert selsync_dial.largest_fall([0.0, 0.5, 0.5, 0.8]) == 0.0
    assert selsync_dial.largest_fall([0.1, 0.5, 0.25, 0.2]) == 0.25
    assert selsync_dial.largest_fall([0.1]) == 0.0
    curves = {2: curve(0.0, 0.5, 0.8), 4: curve(0.0, 0.9, 0.8)}
    assert selsync_dial.verdict(curves).splitlines() == [
        "- 2 ranks: LSSR against delta is monotone",
        "- 4 ranks: LSSR against delta is NOT monotone: falls by 0.100 at most",
    ]
    assert selsync_dial.rows(curves)[1] == ["0.3", "0.500", "0.900", "0.9000", "0.9000"]
    pytest.importorskip("matplotlib")
    selsync_dial.draw(curves, 0.15, "title", tmp_path / "dial.png")
    assert (tmp_path / "dial.png").stat().st_size > 5_000


@pytest.mark.parametrize("text", ["", "0,-1", "a", "nan"])
def test_thresholds_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="numbers of 0 or more"):
        selsync_dial.deltas_of(text)
    assert selsync_dial.deltas_of("inf,0.5,0") == [0.0, 0.5, math.inf]


# -- which data a rank sees --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_settings_of_the_data_on_two_ranks() -> None:
    task = {"seed": 0, "steps": 14, "labels": [5], "delta": 0.3}
    ranks = run_ranks(answers_of, 2, selsync_data.measure, task)
    settings = selsync_data.settings_of([5])
    assert [list(answers) for answers in ranks] == 2 * [[setting.key for setting in settings]]
    for setting in settings:
        first, second = (answers[setting.key] for answers in ranks)
        assert first["steps"] == 14, setting
        assert first["lssr"] == second["lssr"] <= 5 / 14, setting
        if setting.average == "parameters":
            assert first["loss"] == pytest.approx(second["loss"]), setting
    merged = selsync_data.merged(ranks)["5-default"]["own_accuracy"]
    assert merged == pytest.approx(sum(answers["5-default"]["own_accuracy"] for answers in ranks) / 2)


def setting(key: str) -> selsync_data.Setting:
    return next(entry for entry in selsync_data.settings_of([1]) if entry.key == key)


def classes_seen(key: str, rank: int, batches: int) -> list[set[int]]:
    stream = selsync_data.batches_of(setting(key), SmallCNN(seed=0), rank, 10)
    return [set(target.tolist()) for _, target in itertools.islice(stream, batches)]


def test_what_a_rank_sees() -> None:
    assert classes_seen("1-default", 3, 30) == 30 * [{3}]
    chunks = classes_seen("1-chunks", 3, 8 * 10)
    assert max(map(len, chunks)) <= 2, "a chunk is about one class"
    assert set().union(*chunks) == set(range(10)), "a pass goes through all of them"
    assert len(set().union(*classes_seen("1-seldp", 3, 3))) > 5
    assert set().union(*classes_seen("iid-default-parameters", 3, 20)) == set(range(10))


def test_gains_are_over_the_default_of_the_same_split(tmp_path: Path) -> None:
    settings = selsync_data.settings_of([1, 2])
    results = {s.key: [{"accuracy": 0.5, "own_accuracy": 0.25, "lssr": 0.8}] for s in settings}
    results["1-inject-0.5"][0]["accuracy"] = 0.75
    results["2-default"][0]["accuracy"] = 0.625
    gains = selsync_data.gains(settings, results, "accuracy")
    assert gains["1-default"] is gains["2-default"] is gains["iid-default-gradients"] is None
    assert (gains["1-inject-0.5"], gains["2-seldp"], gains["iid-seldp-gradients"]) == (25.0, -12.5, 0.0)
    rows = {row[0]: row[1:] for row in selsync_data.rows(settings, results)}
    assert rows["1 label a rank: injection (0.5, 0.5)"] == ["0.800", "0.7500", "+25.00", "0.2500", "+0.00"]
    pytest.importorskip("matplotlib")
    selsync_data.draw(settings, results, "title", tmp_path / "data.png")
    assert (tmp_path / "data.png").stat().st_size > 5_000


# -- against a period --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_systems_on_two_ranks_share_as_many_steps() -> None:
    task = {"workload": "vgg", "batch_size": 2, "seed": 0, "steps": 24, "warmup": 3, "delta": 0.2}
    first, second = run_ranks(answers_of, 2, selsync_periodic.measure, task)
    assert list(first) == list(selsync_periodic.LABELS)
    shared = {name: answer["shared"] for name, answer in first.items()}
    assert shared["ddp"] == 24
    assert shared["alone"] == 3
    assert shared["periodic"] == shared["torch_matched"]
    every = selsync_periodic.period_for(int(shared["selsync"]), 24, 3)
    assert shared["periodic"] == 3 + 21 // every
    for name in ("periodic", "torch_matched", "selsync"):  # evaluated once ranks are equal
        for key in ("loss", "accuracy"):
            tolerance = 1e-5 if name != "torch_matched" else math.inf  # BatchNorm's statistics stay each rank's own
            assert first[name][key] == pytest.approx(second[name][key], abs=tolerance), name


@pytest.mark.parametrize(("shared", "every"), [(25, 101), (125, 1), (35, 10), (75, 2), (26, 100), (58, 3)])
def test_a_period_shares_as_many_steps(shared: int, every: int) -> None:
    assert selsync_periodic.period_for(shared, 125, 25) == every
    if shared > 25:
        nearest = min(range(1, 102), key=lambda period: abs(25 + 100 // period - shared))
        assert abs(25 + 100 // every - shared) == abs(25 + 100 // nearest - shared)


@pytest.mark.parametrize(("steps", "synchronous", "first", "every"), [(20, 7, 7, 4), (24, 3, 7, 5), (8, 8, 8, 4)])
def test_steps_that_post_local_sgd_shares(steps: int, synchronous: int, first: int, every: int) -> None:
    counted = sum(step < synchronous or (step >= first and (step - first) % every == 0) for step in range(steps))
    found = selsync_periodic.periodic_counts(steps, synchronous, first, every)
    assert found == {"steps": steps, "shared": counted, "lssr": 1 - counted / steps}


def answers(accuracies: list[float], losses: list[float]) -> list[dict[str, float]]:
    pairs = zip(accuracies, losses, strict=True)
    return [{"accuracy": a, "loss": b, "lssr": 0.5, "shared": 12} for a, b in pairs]


def test_rows_are_differences_in_pairs(tmp_path: Path) -> None:
    by_system = {name: answers([0.9, 0.8], [1.0, 2.0]) for name in selsync_periodic.LABELS}
    by_system["selsync"] = answers([0.93, 0.83], [1.1, 2.3])
    rows = {row[0]: row[1:] for row in selsync_periodic.rows(by_system)}
    assert rows["SelSync"][3] == "+3.000 ± 0.000"
    assert rows["SelSync"][5] == "+0.200 ± 0.100"
    assert rows["DDP"][3] == rows["DDP"][5] == ""
    assert "accuracy +3.000 ± 0.000 points, test loss +0.200 ± 0.100" in selsync_periodic.versus(by_system)
    pytest.importorskip("matplotlib")
    selsync_periodic.draw({"resnet": by_system, "gpt": by_system}, "title", tmp_path / "periodic.png")
    assert (tmp_path / "periodic.png").stat().st_size > 5_000


# -- shared ------------------------------------------------------------------------------------------------------------


def test_mean_and_spread() -> None:
    assert local_steps.with_spread(answers([0.9], [1.0]), "accuracy") == "0.9000"
    assert local_steps.with_spread(answers([0.9, 0.8], [1.0, 1.0]), "accuracy", 2) == "0.85 ± 0.07"


def test_command_lines_refuse_what_cannot_be_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for module, words in (
        (selsync_dial, ["--ranks", "1"]),
        (selsync_dial, ["--steps", "3"]),
        (selsync_data, ["--ranks", "4", "--labels", "2"]),
        (selsync_data, ["--labels", "0"]),
        (selsync_periodic, ["--seeds", "0"]),
        (selsync_periodic, ["--workloads", "bert"]),
    ):
        with pytest.raises(SystemExit) as caught:
            module.main(words)
        assert caught.value.code == 2, words
    assert "leave some of 10 classes out" in capsys.readouterr().err
