from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from crossover import doctor, selftest
from crossover.cli import app
from crossover.telemetry import JsonLines, TimelineWriter
from tests.telemetry.samples import record

runner = CliRunner()


@pytest.fixture
def records(tmp_path: Path) -> Path:
    for rank in range(2):
        sink = JsonLines(tmp_path / "records", rank, 2)
        for step in range(11):
            sink.log(record(step, rank))
        sink.close()
    return tmp_path / "records"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_report_prints_figures_and_advice(records: Path) -> None:
    result = runner.invoke(app, ["report", str(records)])
    assert result.exit_code == 0
    assert "step, median           10 ms" in result.stdout
    assert "10% of the step" in result.stdout


def test_report_as_json_and_picture(records: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    result = runner.invoke(app, ["report", str(records), "--json", "--picture", str(picture)])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["exposed_share"] == pytest.approx(0.1)
    assert picture.stat().st_size > 10_000


def test_report_without_records_names_the_remedy_and_fails(tmp_path: Path) -> None:
    result = runner.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert f"CROSSOVER_RECORDS={tmp_path}" in result.stderr


def test_timeline_merge(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        writer = TimelineWriter(tmp_path / "run.json", rank)
        writer.span("step", f"of rank {rank}", 0, 10)
        writer.close()
        paths.append(str(writer.path))
    Path(paths[1]).write_text(Path(paths[1]).read_text()[:-5])
    result = runner.invoke(app, ["timeline", "merge", *paths, "--out", str(tmp_path / "all.json")])
    assert result.exit_code == 0
    assert "of 2 file(s)" in result.stdout
    assert "1 line(s) cut short" in result.stderr
    assert json.loads((tmp_path / "all.json").read_text())


def test_timeline_merge_refuses_missing_files(tmp_path: Path) -> None:
    result = runner.invoke(app, ["timeline", "merge", str(tmp_path / "none.json"), "--out", str(tmp_path / "all.json")])
    assert result.exit_code == 2
    assert "paths: cannot read" in result.stderr


@pytest.mark.skipif("gloo" not in doctor._testable(), reason="this torch has no Gloo")
@pytest.mark.timeout(240)
def test_self_test_runs_two_ranks_even_under_a_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "7", "MASTER_ADDR": "203.0.113.1"}.items():
        monkeypatch.setenv(name, value)
    result = selftest.run(timeout_s=200)
    assert result.ok, result.problem
    assert result.bytes_per_s is not None
    assert result.bytes_per_s > 0


@pytest.mark.timeout(240)
def test_self_test_that_hangs_is_ended_and_explained() -> None:
    result = selftest.run(timeout_s=0.05)
    assert not result.ok
    assert "did not end within 0.05 s" in result.problem
    assert "firewall" in result.remedy


@pytest.mark.timeout(240)
def test_self_test_names_the_rank_that_failed() -> None:
    result = selftest.run(backend="carrier-pigeon", timeout_s=200)
    assert not result.ok
    assert "ended with exit code 1" in result.problem
    assert "carrier-pigeon" in result.problem


def test_doctor_fails_with_the_remedy_when_something_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = selftest.SelfTest("gloo", False, None, "rank 1 said no", "ask rank 1 again")
    monkeypatch.setattr(selftest, "run", lambda backend, timeout_s: broken)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "BROKEN" in result.stdout
    assert "ask rank 1 again" in result.stdout


def test_doctor_looks_at_everything_and_leaks_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run", lambda backend, timeout_s: selftest.SelfTest(backend, True, 2.5e9))
    monkeypatch.setenv("HOROVOD_RANK", "3")
    monkeypatch.setenv("_HOROVOD_SECRET_KEY", "hunter2")
    monkeypatch.setenv("CROSSOVER_RECORDS", "somewhere")
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert "hunter2" not in result.stdout
    findings = {item["name"]: item["value"] for item in json.loads(result.stdout)["findings"]}
    assert {"python", "torch", "horovod", "torch.distributed", "GPUs", "cores", "network interfaces"} <= findings.keys()
    assert "HOROVOD_RANK=3" in findings["launcher variables"]
    assert findings["crossover variables"] == "CROSSOVER_RECORDS=somewhere"
    assert any("2500 MB/s" in value for value in findings.values())


def test_host_name_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(doctor.socket, "getaddrinfo", unknown)
    (finding,) = doctor._host_name()
    assert not finding.ok
    assert "GLOO_SOCKET_IFNAME" in finding.remedy


def test_python_dash_m_is_the_command(records: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crossover", "report", str(records)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "advice:" in done.stdout


def test_missing_typer_is_explained_in_one_line() -> None:
    hide = "import sys; sys.modules['typer'] = None; import crossover.cli"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "crossover: the command line needs typer, which is not installed; pip install 'crossover[cli]'"
    )
