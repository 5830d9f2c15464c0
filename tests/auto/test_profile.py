"""``CROSSOVER_PROFILE``: an unchanged script measures itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import crossover as xo
from crossover.auto.recorder import PROFILE_VARIABLE, STEPS_VARIABLE, Recorder, steps_needed
from crossover.deft import Profile
from tests.auto.jobs import SLOW_LINK, listen, make_job, train, weights
from tests.harness import run_ranks


def recorded(steps: int, options: dict[str, Any]) -> tuple[torch.Tensor, str, list[int]]:
    xo.init()
    said = listen()
    model, optimizer = make_job(0.001, **options)
    engine, buckets = optimizer._crossover.engine, []
    for number in range(steps):
        train(model, optimizer, range(number, number + 1))
        buckets.append(len(engine.buckets))
    return weights(model), said.getvalue(), buckets


@pytest.mark.parametrize("options", [{}, {"gate": "selsync:0.3"}, {"schedule": "deft"}, {"schedule": "auto"}])
def test_rank_0_writes_what_all_saw(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "new" / "profile.json"
    env = {PROFILE_VARIABLE: str(path), STEPS_VARIABLE: "4", **SLOW_LINK}
    (first, said, buckets), (second, _, _) = run_ranks(recorded, 2, steps_needed(4) + 3, options, env=env)
    assert torch.equal(first, second)
    found = Profile.load(path)
    assert (found.size, found.steps) == (2, 4)
    assert found.coverage_rate > 0
    assert sum(found.nbytes) >= 8 * first.numel()
    assert [len(values) for values in found.significance] == [29, 29]
    assert [sum(value is not None for value in values) for values in found.significance] == [5, 5]
    assert f"written to {path}; next: crossover advise {path}" in said
    assert ("trains plainly instead" in said) == ("gate" in options or options.get("schedule") == "deft")
    assert os.listdir(path.parent) == ["profile.json"]
    assert set(buckets) == {1}


def alone(path: str) -> None:
    xo.init()
    model, optimizer = make_job(0.0)
    train(model, optimizer, range(steps_needed(2)))
    assert not Path(path).exists()


def test_one_rank_alone_has_nothing_to_write(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    run_ranks(alone, 1, path, env={PROFILE_VARIABLE: path, STEPS_VARIABLE: "2"})


def test_a_wrong_number_of_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEPS_VARIABLE, "many")
    with pytest.raises(ValueError, match="CROSSOVER_PROFILE_STEPS: is 'many'"):
        Recorder("profile.json")
