"""The question scripts without a network: systems in turn, statistics, tables, command lines."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from benchmarks import command, figures, harness, moonshot, scaling, step_time, time_to_accuracy
from benchmarks.harness import Cell, Measured, Outcome
from benchmarks.sites import Emulated
from benchmarks.testbed import JobError
from benchmarks.time_to_accuracy import Curve
from benchmarks.workloads.measure import ComputeTime

from .fake_site import COMPUTE, FakeSite

CELL = Cell("vgg", 1.0, COMPUTE, hosts=2)


class AnsweringSite(FakeSite):
    """Answers at once; ``broken`` systems end their whole job."""

    def __init__(self, broken: tuple[str, ...] = (), off: tuple[float, ...] = ()) -> None:
        super().__init__(off)
        self.broken = broken
        self.jobs: list[tuple[str, dict[str, Any]]] = []

    def run(self, module: str, arguments: Any, launcher: str, timeout: float, variables: Any = None) -> list[Any]:
        task = json.loads(arguments[1])
        self.jobs.append((launcher, task))
        if any(name in self.broken for name in task["systems"]):
            raise JobError("rank 1 failed first; its last lines:\nValueError: boom\n\n", 1)
        answer = {"windows": [0.05, 0.07], "choice": {"x": 1} if task["tune"] else {}, "tried": {}, "facts": {}}
        return [{name: dict(answer, rank=rank) for name in task["systems"]} for rank in range(2)]

    def refuses(self, system: Any) -> str | None:
        return "no CUDA" if system.name == "ddp_bf16" else None


SYSTEMS = ["ddp", "ddp_bf16", "crossover", "horovod"]


def measure(site: AnsweringSite, cells: list[Cell], repeats: int) -> list[Outcome]:
    return harness.in_turn(site, "module", cells, SYSTEMS, repeats, lambda cell: 8, {"tune": True})


def test_systems_take_turns_in_alternating_order_and_keep_their_choice() -> None:
    site = AnsweringSite()
    [outcome] = measure(site, [CELL], repeats=2)
    orders = [(launcher, task["systems"]) for launcher, task in site.jobs]
    forth = [("torchrun", ["ddp", "crossover"]), ("horovod", ["horovod"])]
    back = [("horovod", ["horovod"]), ("torchrun", ["crossover", "ddp"])]
    assert orders == forth + back
    assert [task["seed"] for _, task in site.jobs] == [0, 0, 1, 1]
    assert site.jobs[0][1]["choices"] == {}
    # crossover takes DDP's
    assert site.jobs[-1][1]["choices"] == {name: {"x": 1} for name in ("ddp", "horovod")}
    assert len(outcome.systems["crossover"].runs) == 2
    assert outcome.systems["ddp_bf16"].reason == "no CUDA"
    assert not outcome.systems["ddp_bf16"].ran
    assert outcome.sentence == f"2 hosts; {CELL.rate:g} bit/s"


def test_a_system_that_breaks_its_job_is_found_and_takes_none_along() -> None:
    site = AnsweringSite(broken=("crossover",))
    [outcome] = measure(site, [CELL], repeats=2)
    assert outcome.systems["crossover"].reason == "failed: ValueError: boom"
    assert len(outcome.systems["ddp"].runs) == len(outcome.systems["horovod"].runs) == 2
    assert all("crossover" not in task["systems"] for _, task in site.jobs[4:]), "it is not tried again"


def test_a_link_that_is_off_refuses_its_cell_only() -> None:
    other = Cell("vgg", 2.0, COMPUTE, hosts=2)
    site = AnsweringSite(off=(CELL.rate,))
    refused, measured = measure(site, [CELL, other], repeats=2)
    assert refused.refused == "link 0 is off"
    assert len(measured.systems["ddp"].runs) == 2
    assert command.exit_code([refused, measured]) == command.OFF
    assert command.exit_code([measured]) == 0
    assert "Not measured: link 0 is off" in step_time.section(refused, argparse.Namespace())


def test_a_cells_link_rate_gives_its_coverage_rate() -> None:
    assert Cell("vgg", 2.0, COMPUTE, 2).all_reduce_s == pytest.approx(0.080)
    assert Cell("vgg", 2.0, COMPUTE, 4).all_reduce_s == pytest.approx(0.080)
    assert Cell("vgg", 2.0, COMPUTE, 4).rate == pytest.approx(1.5 * Cell("vgg", 2.0, COMPUTE, 2).rate)
    assert CELL.limit_s() == 0.050
    assert CELL.limit_s(0.030) == pytest.approx(0.040)


def test_statistics() -> None:
    assert figures.slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    assert figures.median_ratio([2.0, 9.0, 3.0], [1.0, 3.0, 2.0]) == 2.0
    with pytest.raises(ValueError, match="argument 2"):
        figures.slowest([[1.0], [1.0, 2.0]])


def ran(*windows: list[list[float]]) -> Measured:
    """One system: for each repeat the ranks' windows."""
    measured = Measured()
    for ranks in windows:
        measured.add([{"windows": rank, "choice": {}, "tried": {}, "facts": {"bucket": 4}} for rank in ranks])
    return measured


def outcome_of(**systems: Measured) -> Outcome:
    return Outcome(CELL, systems, "2 hosts", "2 hosts; 800 Mbit/s")


def test_step_time_rows() -> None:
    alone = ran([[0.040], [0.040]], [[0.040], [0.040]], [[0.030], [0.050]])
    ddp = ran([[0.060], [0.050]], [[0.070], [0.080]], [[0.060], [0.060]])
    ours = ran([[0.030], [0.030]], [[0.060], [0.020]], [[0.066], [0.010]])
    broken = Measured(reason="no CUDA")
    rows = step_time.rows(outcome_of(alone=alone, ddp=ddp, crossover=ours, ddp_bf16=broken))
    by_label = {row[0]: row[1:] for row in rows}
    assert step_time.seconds(ddp) == [0.060, 0.080, 0.060]
    # exposed 60 - 40 ms of an all-reduce of 40 ms
    assert by_label["DDP"] == ["60.0", "60.0 to 80.0", "1.000", "20.0", "50%"]
    # ratios 0.5, 0.75, 1.1 within the repeats
    assert by_label["Crossover, Overlapped"] == ["60.0", "30.0 to 66.0", "0.750", "20.0", "50%"]
    assert by_label["DDP, bf16 hook"] == ["cannot run", "", "", "", ""]
    assert by_label["limit: max(computing, all-reduce) = all-reduce"][0] == "40.0"


def test_step_time_section_says_what_has_to_be_known() -> None:
    outcome = outcome_of(alone=ran([[0.1]]), ddp=ran([[0.2]]), ddp_bf16=Measured(reason="no CUDA"))
    options = argparse.Namespace(repeats=1, steps=8)
    text = step_time.section(outcome, options)
    assert "2 hosts; 800 Mbit/s." in text
    assert "4.00 MB" in text
    assert "50.0 ms a step" in text
    assert "cannot run: DDP, bf16 hook. no CUDA" in text
    assert "DDP: bucket 4 (documented defaults, no search)" in text
    assert "limit: max(computing, all-reduce) = computing" in text
    assert "| DDP " in step_time.summary([outcome])
    assert step_time.summary([outcome_of(ddp=Measured(reason="no"))]) == ""


def test_scaling_columns() -> None:
    outcome = outcome_of(
        alone=ran([[0.050]]), ddp=ran([[0.100]]), crossover=ran([[0.080]]), horovod=Measured(reason="x")
    )
    assert scaling.columns(outcome, "crossover") == ["80.0", "0.800", "0.62"]
    assert scaling.columns(outcome, "horovod") == ["-", "-", "-"]
    text = scaling.overview([outcome, outcome])
    assert text.count("2 hosts: step, ms") == 2


def test_steps_of_a_run_fit_into_its_time() -> None:
    options = argparse.Namespace(steps=12)
    slow = Cell("vgg", 4.0, ComputeTime("vgg", 64, 4_000_000, 0.2, 0.21, 0.0), 2)
    middling = Cell("vgg", 4.0, ComputeTime("vgg", 64, 4_000_000, 0.05, 0.21, 0.0), 2)
    assert step_time.steps_for(options, CELL) == 12
    assert step_time.steps_for(options, middling) == 8
    assert step_time.steps_for(options, slow) == 4
    assert step_time.steps_for(argparse.Namespace(steps=4), CELL) == 4


def test_time_to_a_target() -> None:
    first = Curve([0.0, 1.0, 2.0, 3.0], [0.1, 0.5, 0.9, 0.8], 30)
    second = Curve([0.0, 1.2, 2.4, 3.6], [0.1, 0.4, 0.6, 0.9], 30)
    mean = time_to_accuracy.mean_curve([first, second])
    assert mean.seconds == pytest.approx([0.0, 1.1, 2.2, 3.3])
    assert mean.accuracies == pytest.approx([0.1, 0.45, 0.75, 0.85])
    assert mean.time_to(0.7) == pytest.approx(2.2)
    assert mean.time_to(mean.accuracies[-1]) == pytest.approx(3.3)
    assert mean.time_to(0.86) is None
    label, reached, ratio, by, final, sd, steps, step, exposed = time_to_accuracy.row(
        "X", [first, second], 0.7, 1.1, 0.05
    )
    assert steps == "30"
    assert (label, reached, ratio, final) == ("X", "2.2", "2.000", "0.8500")
    assert by == "2 of 2 (2.0 to 3.6 s)"
    assert sd == "0.0707"
    assert (step, exposed) == ("110.0", "60.0")
    assert time_to_accuracy.row("X", [first], 0.95, 1.1, 0.05)[1:4] == ["not reached", "", "0 of 1"]


def trained(seconds: list[list[float]], accuracies: list[float]) -> Measured:
    measured = Measured()
    measured.add(
        [
            {"seconds": own, "accuracies": accuracies, "steps": 20, "choice": {}, "tried": {}, "facts": {}}
            for own in seconds
        ]
    )
    return measured


def test_time_to_accuracy_is_ddps_final_and_the_slowest_ranks() -> None:
    ddp = trained([[0.0, 1.0, 2.0], [0.0, 1.5, 2.0]], [0.1, 0.5, 0.8])
    ours = trained([[0.0, 0.5, 1.0], [0.0, 0.4, 0.9]], [0.1, 0.8, 0.9])
    target, rows = time_to_accuracy.rows(outcome_of(ddp=ddp, crossover=ours), steps=20)
    assert target == 0.8
    assert rows[0][1:3] == ["2.0", "1.000"]
    assert rows[1][1:3] == ["0.5", "0.250"]
    # 20 steps at the limit of 50 ms beside DDP's 2 s
    assert rows[2][1:3] == ["1.0", "0.500"]
    assert "target: accuracy 0.8000" in time_to_accuracy.section(outcome_of(ddp=ddp, crossover=ours), 20)


def test_moonshot_measures_by_ddp_on_the_open_link() -> None:
    def trained(seconds: list[float], accuracies: list[float]) -> Measured:
        answer = {"seconds": seconds, "accuracies": accuracies, "steps": 40}
        return Measured([[answer, answer]])

    opened = [time_to_accuracy.curve(trained([0.0, 2.0, 4.0], [0.1, 0.8, 0.9]).runs[0])]
    systems = {
        "crossover_fp16": trained([0.0, 3.0, 5.0], [0.1, 0.8, 0.9]),
        "crossover_both_fp16": trained([0.0, 2.0, 3.0], [0.1, 0.8, 0.89]),
        "crossover_deft_fp16": Measured(reason="no luck"),
    }
    lines = moonshot.table(opened, [Outcome(CELL, systems)], "vgg").splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == ["-", "1", "1", "1"]
    assert [row[3] for row in rows] == ["1.000", "1.250", "", ""]
    assert [row[2] for row in rows] == ["4.0", "5.0", "not reached", "cannot run"]
    assert moonshot.table(opened, [Outcome(CELL, systems)], "gpt").count("\n") == 2, "another workload's cells"


def test_quick_and_usual_options() -> None:
    usual = (["resnet", "vgg", "gpt", "mlp"], "0.5,1,2,4", 3)
    options = step_time.options_of([], "", usual)
    assert (options.workloads, options.cr, options.repeats) == (usual[0], [0.5, 1.0, 2.0, 4.0], 3)
    assert options.systems[0] == "ddp"
    assert "alone" not in options.systems
    quick = step_time.options_of(["--quick", "--cr", "3", "--systems", "crossover"], "", usual)
    assert (len(quick.workloads), quick.cr, quick.repeats, quick.systems) == (1, [3.0], 1, ["ddp", "crossover"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--systems", "ddp,nccl"], "give some of"),
        (["--workloads", ""], "give some of"),
        (["--cr", "1,-2"], "above 0"),
        (["--cr", "one"], "above 0"),
        (["--hosts", "1"], "2 or more"),
        (["--steps", "6"], "multiple of 4"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_wrong_options_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_time.options_of(words, "", (["vgg"], "1", 1))
    assert said in capsys.readouterr().err


def test_without_a_testbed_the_emulated_link_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.testbed.requirements.os.geteuid", lambda: 1000)
    assert step_time.main(["--quick"]) == command.UNAVAILABLE
    said = capsys.readouterr().err
    assert "root is needed" in said
    assert "--emulated" in said


def test_an_emulated_link_is_labelled_and_carries_our_systems_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import peers

    monkeypatch.setattr("benchmarks.sites.os.sched_getaffinity", lambda pid: {0, 1})
    site = Emulated(2)
    assert "EMULATED" in site.place()
    assert site.refuses(peers.get("crossover")) is None
    assert "testbed" in str(site.refuses(peers.get("ddp")))
    with pytest.raises(ValueError, match="one to a core"):
        Emulated(3)
