from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from crossover.cli import app
from crossover.deft import Profile
from crossover.simulate.advise import advise

runner = CliRunner()


def profile(reduce_us: int = 40_000, size: int = 4) -> Profile:
    """Four buckets of 4 MB: 30 ms forward, 60 ms backward, 10 ms between."""
    return Profile((7_500,) * 4, (15_000,) * 4, 10_000, ((reduce_us,) * 4,), (4_000_000,) * 4, ("nccl",), size, 20)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profile().save(path)
    return path


def test_advice_for_a_slow_network_names_what_to_write(saved: Path) -> None:
    result = runner.invoke(app, ["advise", str(saved)])
    assert result.exit_code == 0, result.output
    for word in (
        "coverage rate 1.60",
        "schedule=xo.deft.DeFT()",
        "sharing=xo.sync.TimeShare",
        "gate=xo.selsync",
        "advice:",
    ):
        assert word in result.stdout
    assert "fitted]" in result.stdout
    assert "gains most" in result.stdout


def test_advice_for_a_fast_network_is_to_stay() -> None:
    advice = advise(profile(reduce_us=100))
    assert advice.sentence.startswith("stay with plain")


def test_advice_for_very_short_steps_is_not_to_be_believed_unseen() -> None:
    short = Profile((75,) * 4, (150,) * 4, 100, ((400,) * 4,), (40_000,) * 4, ("gloo",), 2, 20)
    assert "a step takes 2.6 ms, of which fixed costs" in advise(short).sentence
    assert "fixed costs" not in advise(profile()).sentence


def test_advice_follows_ranks_rate_and_lssr() -> None:
    slow, fast = advise(profile()), advise(profile(), bit_s=1e12)
    assert fast.coverage_rate < 0.1 * slow.coverage_rate
    assert advise(profile(), ranks=64).ranks == 64
    never, always = (advise(profile(), lssr=lssr) for lssr in (1.0, 0.0))
    steps = [next(o.step_s for o in a.options if o.name == "SelSync") for a in (never, always)]
    assert steps[0] == pytest.approx(0.1, rel=0.05)
    assert steps[1] == pytest.approx(0.1 + 0.16, rel=0.05)


def test_a_noise_scale_takes_off_what_merging_loses() -> None:
    unknown, large, small = (
        next(option for option in advise(profile(), noise_scale=scale).options if option.name == "DeFT")
        for scale in (None, 50.0, 1.0)
    )
    assert unknown.updates_per_step < 1
    assert unknown.efficiency is None
    assert large.efficiency is not None
    assert 0.9 < large.efficiency < 1
    assert large.gain < unknown.gain
    assert small.updates_per_step == 1  # the preserver allows no merging then
    assert small.efficiency == 1


def test_sharing_gains_what_the_wait_leaves() -> None:
    shared = advise(profile(reduce_us=10_000)).options[-1]
    assert shared.name == "sharing with a second job"
    assert 1.0 < shared.speed_up < 1.5


def test_advice_as_json(saved: Path, tmp_path: Path) -> None:
    profile(reduce_us=1000).save(tmp_path / "other.json")
    words = ["--json", "--ranks", "8", "--rate", "1gbit", "--second", str(tmp_path / "other.json")]
    result = runner.invoke(app, ["advise", str(saved), *words])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ranks"] == 8


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--ranks", "1"], "ranks: is 1"),
        (["--rate", "fast"], "like 25gbit"),
        (["--second", "none.json"], "cannot read"),
    ],
)
def test_advise_refuses(saved: Path, words: list[str], what: str) -> None:
    result = runner.invoke(app, ["advise", str(saved), *words])
    assert result.exit_code == 2
    assert what in result.stderr


def test_advise_refuses_what_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    result = runner.invoke(app, ["advise", str(tmp_path / "text")])
    assert result.exit_code == 2
    assert "profile:" in result.stderr


def test_simulate_prints_every_assumption_with_its_source() -> None:
    result = runner.invoke(app, ["simulate", "--model", "resnet50", "--cluster", "64-25g", "--steps", "9"])
    assert result.exit_code == 0, result.output
    table, notes = result.stdout.split("assumptions:\n")
    assert "SIMULATED" in table
    assert "DeFT" in table
    lines = notes.strip().splitlines()
    assert len(lines) > 12
    assert all(line.startswith("- ") and line.endswith("]") for line in lines)


def test_simulate_several_jobs_with_picture_and_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, trace = tmp_path / "run.png", tmp_path / "run.json"
    words = ["--jobs", "2", "--systems", "plain", "--steps", "9", "--picture", str(picture), "--timeline", str(trace)]
    result = runner.invoke(app, ["simulate", *words])
    assert result.exit_code == 0, result.output
    assert "2 jobs together get 1." in result.stdout
    assert picture.stat().st_size > 10_000
    events = json.loads(trace.read_text())
    assert {event["pid"] for event in events} == {0, 1}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"forward", "backward", "communication link 0"} <= names


def test_simulate_a_profile_as_json(saved: Path) -> None:
    words = ["--profile", str(saved), "--systems", "alone,plain,selsync", "--lssr", "0.5", "--json"]
    result = runner.invoke(app, ["simulate", *words])
    assert result.exit_code == 0, result.output
    rows = {row["system"]: row["step_s"] for row in json.loads(result.stdout)["results"]}
    assert rows["no communication"] == pytest.approx(0.1)
    assert rows["plain (DDP-like)"] > rows["SelSync"] > 0.1


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--model", "lenet"], "give one of resnet50"),
        (["--cluster", "moon"], "give one of deft-16"),
        (["--systems", "magic"], "give some of alone"),
        (["--jobs", "0"], "jobs: is 0"),
        (["--steps", "1"], "steps: is 1"),
        (["--rate", "0gbit"], "like 25gbit"),
        (["--device", "abacus"], "give one of a100"),
        (["--steps", "3", "--systems", "alone", "--picture", "picture.what"], "names no format"),
    ],
)
def test_simulate_refuses(words: list[str], what: str) -> None:
    result = runner.invoke(app, ["simulate", *words])
    assert result.exit_code == 2
    assert what in result.stderr
