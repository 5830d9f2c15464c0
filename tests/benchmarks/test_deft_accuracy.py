"""The study of DeFT's accuracy: what it emulates, what it trains, what it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import crossover as xo
from benchmarks import deft_accuracy, deft_cases, planner_time, workloads
from benchmarks.deft_cases import CASES, Case
from crossover.deft import Limits, make_plan
from crossover.deft.plan import mean_duration
from tests.harness import run_ranks


@pytest.mark.parametrize("name", ["resnet", "gpt"])
@pytest.mark.parametrize("cr", [1.0, 2.0, 4.0])
def test_the_profile_has_the_coverage_rate_and_merges_as_many_steps(name: str, cr: float) -> None:
    profile = deft_cases.emulated(workloads.get(name).model(), cr)
    assert profile.coverage_rate == pytest.approx(cr, rel=0.15)
    assert profile.coverage_rate <= cr
    plan = make_plan(profile.times(), Limits())
    assert 1 / plan.updates_per_step() == pytest.approx(cr, rel=0.15)
    assert mean_duration(plan, profile.times()) == profile.times().compute, "everything is hidden"
    assert sum(profile.nbytes) == workloads.get(name).gradient_bytes
    two = deft_cases.emulated(workloads.get(name).model(), cr, links=2)
    assert make_plan(two.times()).updates_per_step() >= plan.updates_per_step()


def test_another_momentum_keeps_the_rate_in_the_long_run() -> None:
    workload = workloads.get("resnet")
    parameters = list(workload.model().parameters())
    [plain] = deft_cases.optimizer_for(CASES["ddp"], workload, parameters).param_groups
    [other] = deft_cases.optimizer_for(Case("", momentum=0.5), workload, parameters).param_groups
    assert other["momentum"] == 0.5
    assert other["lr"] / (1 - 0.5) == pytest.approx(plain["lr"] / (1 - plain["momentum"]))


def trained(names: list[str]) -> dict[str, Any]:
    xo.init()
    torch.set_num_threads(1)
    task = {"workload": "resnet", "batch_size": 4, "seed": 0, "cr": 2.0, "steps": 16, "cases": names}
    return deft_accuracy.measure(task)


def test_cases_train_as_they_say() -> None:
    names = ["ddp", "deft", "off", "no_delay", "no_merging", "two_links", "fifo"]
    first, second = run_ranks(trained, 2, names)
    for name in names:
        assert first[name]["updates"] == second[name]["updates"], name
        assert first[name]["decisions"] == second[name]["decisions"], name
    assert first["ddp"]["updates"] == first["no_delay"]["updates"] == 1.0
    assert first["no_delay"]["loss"] == pytest.approx(first["ddp"]["loss"], rel=1e-3), "the same updates"
    assert first["no_merging"]["updates"] == pytest.approx(15 / 16), "all but the one on its way"
    assert first["off"]["updates"] < first["two_links"]["updates"] < 1.0
    assert first["fifo"]["updates"] < 0.7
    assert first["deft"]["updates"] == first["no_merging"]["updates"], "too short to know the noise scale"
    assert first["off"]["step"] < first["deft"]["step"] < first["ddp"]["step"]
    assert "waits rather than merge" in first["deft"]["decisions"][0]


def answers(accuracies: list[float], step: float) -> list[dict[str, Any]]:
    return [
        {"accuracy": value, "loss": 1 - value / 2, "updates": 1.0, "step": step, "decisions": ["step 5: delayed"]}
        for value in accuracies
    ]


def test_what_is_said_of_the_target() -> None:
    base, lower = [0.90, 0.92, 0.94], [0.90, 0.91, 0.91]
    good = {"ddp": answers(base, 2.4), "deft": answers([0.91, 0.92, 0.93], 1.2)}
    assert " is at least DDP's" in deft_accuracy.verdict(good)
    bad = {"ddp": answers(base, 2.4), "deft": answers(lower, 1.2)}
    assert "IS NOT at least DDP's" in deft_accuracy.verdict(bad)
    assert "0.9085" in deft_accuracy.verdict(bad), "the mean less a standard error"
    assert deft_accuracy.error(base) == pytest.approx(0.02 / math.sqrt(3))
    text = deft_accuracy.section("resnet", bad)
    assert "-1.33 ± 0.88" in text, "in pairs"
    assert "0.50" in text, "half of DDP's step"
    assert "- step 5: delayed" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {name: answers([0.9, 0.92], 1.0) for name in CASES}
    path = tmp_path / "picture.png"
    deft_accuracy.draw({("resnet", 2.0): found, ("gpt", 2.0): found}, found, path)
    assert path.stat().st_size > 10_000


def test_the_planner_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_time.main(["--quick", "--buckets", "10,60"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["buckets", ":------", "10", "60"]
    assert planner_time.possible(planner_time.profile(0, 10, 1, 2.0)) == pytest.approx(0.5, rel=0.05)
