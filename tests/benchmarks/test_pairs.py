"""Two trainings: one after the other, and at once with turns; what jobs are told, and what their curves come to."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import crossover as xo
from benchmarks import pair_to_accuracy, peers, time_to_accuracy, together, workloads
from benchmarks.harness import Cell
from benchmarks.pair_to_accuracy import Way, pair_curve
from benchmarks.testbed import JobError
from benchmarks.time_to_accuracy import Curve

from .fake_site import COMPUTE, FakeSite

CELL = Cell("vgg", 2.0, COMPUTE, hosts=2)
SECONDS = {"ddp": 4.0, "crossover": 3.0, "crossover_selsync": 1.0}


class PairSite(FakeSite):
    """A system's own seconds for one job; jobs at the same time wait for each other, and take half as long again."""

    def __init__(self, broken: str = "", off: tuple[float, ...] = ()) -> None:
        super().__init__(off)
        self.broken = broken
        self.jobs: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.meeting = threading.Barrier(2, timeout=20.0)

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        launcher: str,
        timeout: float,
        variables: Mapping[str, str] | None = None,
    ) -> list[Any]:
        task, variables = json.loads(arguments[1]), dict(variables or {})
        self.jobs.append((task, variables))
        [name] = task["systems"]
        if name == self.broken:
            raise JobError("rank 1 failed", 1)
        if task["jobs"] == 2:
            self.meeting.wait()
        seconds = SECONDS[name] * (1.0 if task["jobs"] == 1 else 1.5 + 0.1 * task["seed"])
        accuracies = [0.1, 0.8, 0.8 + 0.1 * (task["seed"] % 2)]
        answer = {"seconds": [0.0, seconds / 2, seconds], "accuracies": accuracies, "steps": task["steps"]}
        return [{name: answer}, {name: answer}]


def options(*words: str) -> Any:
    return pair_to_accuracy.options_of(["--workloads", "vgg", "--cr", "2", "--steps", "40", *words])


def test_two_trainings_as_one() -> None:
    first, second = Curve([0.0, 1.0, 4.0], [0.1, 0.5, 0.9], 8), Curve([0.0, 2.0, 3.0], [0.1, 0.7, 0.7], 8)
    assert pair_curve([first, second], turns=True) == Curve([0.0, 2.0, 4.0], [0.1, 0.6, 0.8], 8)
    assert pair_curve([first, second], turns=False) == Curve([0.0, 3.0, 7.0], [0.1, 0.6, 0.8], 8)


def test_every_system_one_after_the_other_and_with_turns() -> None:
    site = PairSite()
    asked = options("--systems", "crossover", "--repeats", "2")
    [(outcome, results)] = pair_to_accuracy.run(site, asked)
    ways = [Way("ddp", False), Way("crossover", False), Way("crossover", True)]
    assert list(results) == ways
    told = [(t["systems"][0], t["jobs"], t["seed"]) for t, _ in site.jobs]
    serial = [("ddp", 1, 0), ("ddp", 1, 1), ("crossover", 1, 0), ("crossover", 1, 1)]
    assert told[:4] == serial
    assert sorted(told[4:6]) == [("crossover", 2, 0), ("crossover", 2, 1)]
    assert {t[2] for t in told[6:]} == {2, 3}, "the second repeat has seeds of its own"
    assert told[-2:] == [("ddp", 1, 2), ("ddp", 1, 3)], "and the other order"
    for task, variables in site.jobs:
        turns = f"timeshare:job=job{task['seed']}" if task["jobs"] == 2 else None
        assert variables.get("CROSSOVER_SHARING") == turns
    assert len({variables["CROSSOVER_RUN_DIR"] for _, variables in site.jobs[4:6]}) == 1, "one arbiter for both"
    text = pair_to_accuracy.section(outcome, results, 40)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]
    assert [row[1:4] for row in rows] == [["8.0", "1.00", "8.0"], ["6.0", "1.33", "6.0"], ["5.1", "1.57", "5.1"]]
    assert "4 seeds; target: accuracy 0.8500" in text
    assert pair_to_accuracy.as_data([(outcome, results)])[0]["ways"][2]["turns"]


def test_what_is_not_exact_trains_longer_and_may_miss_the_target() -> None:
    way = Way("crossover_selsync", True)
    cells = pair_to_accuracy.row(way, [[Curve([0.0, 2.0], [0.1, 0.7], 50)] * 2], target=0.8, base_s=8.0)
    assert cells == ["Crossover, SelSync, taking turns", "not reached", "", "2.0", "0.7000", "0.0000", "50"]
    assert options().longer == 1.25
    assert options("--systems", "crossover,ddp").systems == ["ddp", "crossover"]


def test_a_broken_way_and_a_refused_link_are_said() -> None:
    [(outcome, results)] = pair_to_accuracy.run(
        PairSite(broken="crossover_selsync"), options("--systems", "crossover,crossover_selsync")
    )
    text = pair_to_accuracy.section(outcome, results, 40)
    assert text.count("cannot run") == 2
    assert "| Crossover, Overlapped, taking turns" in text
    [(outcome, results)] = pair_to_accuracy.run(PairSite(off=(CELL.rate,)), options())
    assert "Not measured: link 0 is off" in pair_to_accuracy.section(outcome, results, 40)
    [(outcome, results)] = pair_to_accuracy.run(PairSite(broken="ddp"), options("--systems", "crossover"))
    assert "No target without DDP" in pair_to_accuracy.section(outcome, results, 40)


def test_only_the_base_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--systems", "ddp")
    assert "--systems" in capsys.readouterr().err


def test_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.together.xo.rank", lambda: 0)
    monkeypatch.setattr("benchmarks.together.xo.size", lambda: 1)
    together.meet({"seed": 0}, "start")
    task = {"meeting": str(tmp_path), "jobs": 2}
    first = threading.Thread(target=together.meet, args=({**task, "seed": 0}, "start"))
    first.start()
    first.join(0.1)
    assert first.is_alive(), "it waits for the other job"
    together.meet({**task, "seed": 1}, "start")
    first.join(20.0)
    assert not first.is_alive()
    monkeypatch.setattr(together, "MEETING_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="come to the end"):
        together.meet({**task, "seed": 1}, "end")


def test_the_rate_of_a_cell_is_set_once_a_repeat() -> None:
    site = PairSite()
    pair_to_accuracy.run(site, options("--systems", "crossover", "--repeats", "2"))
    assert site.rates == [CELL.rate] * 2


def test_models_are_kept_and_evaluated_afterwards() -> None:
    workload = workloads.get("vgg", batch_size=8)
    task = {"steps": 24, "every": 8, "longer": 1.0}
    xo.init()
    try:
        answer = time_to_accuracy.measure(peers.get("crossover"), workload, {}, task)
    finally:
        xo.shutdown()
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    scheduler = workload.scheduler(optimizer, 24)
    expected = [workload.accuracy(model)]
    for step in range(24):
        inputs, targets = workload.batch(0, step, 1)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        if step % 8 == 7:
            expected.append(workload.accuracy(model))
    assert answer["accuracies"] == expected
    assert len(set(expected)) > 1, "training changes what is evaluated"
    assert answer["seconds"] == sorted(answer["seconds"])
    assert (answer["steps"], len(answer["seconds"])) == (24, 4)
