"""What of the testbed needs no root: rates, shares, environments, messages, the command line."""

import os

import pytest

from benchmarks.testbed import Testbed, TestbedError, bandwidth, launchers, rates, requirements, shares, topology
from benchmarks.testbed.__main__ import OFF, UNAVAILABLE, main
from benchmarks.testbed.job import JobResult


@pytest.mark.parametrize(
    ("text", "bits"), [("500mbit", 500e6), ("1.5gbit", 1.5e9), ("8000kbit", 8e6), ("250 Mbit", 250e6), (1e9, 1e9)]
)
def test_rates_are_read(text, bits):
    assert rates.parse_rate(text) == bits
    assert rates.parse_rate(rates.format_rate(bits)) == bits


@pytest.mark.parametrize("text", ["fast", "500", "100gbit", "-5mbit", "500mb", 0, float("nan"), ""])
def test_bad_rates_are_refused(text):
    with pytest.raises(ValueError, match="rate: got"):
        rates.parse_rate(text)


def test_the_shaper_makes_up_for_headers_and_bursts_stay_small():
    # 1448 of 1514 bytes of a full frame are payload.
    assert rates.wire_rate(1_448_000_000) == 1_514_000_000
    for rate in (10**8, 5 * 10**8, 15 * 10**8):
        assert 2 * rates.GSO_BYTES <= rates.burst_bytes(rate) <= 0.04 * 1_000_000
        assert rates.queue_bytes(rate) > 10 * rates.burst_bytes(rate)


def test_cores_are_shared_out():
    own = shares.plan(2, [4, 5, 6, 7], "cgroup v1 quota")
    assert [share.cores for share in own] == [(4, 5), (6, 7)]
    assert {share.method for share in own} == {"own cores"}
    halves = shares.plan(4, [0, 1], "cgroup v2 quota")
    assert [share.cores for share in halves] == [(0,), (1,), (0,), (1,)]
    assert {(share.fraction, share.method) for share in halves} == {(0.5, "cgroup v2 quota")}
    thirds = shares.plan(3, [0, 1], "cgroup v1 quota")
    assert {share.cores for share in thirds} == {(0, 1)}
    assert thirds[0].fraction == pytest.approx(2 / 3)


def test_without_a_quota_shares_stay_equal_and_say_so():
    for hosts in (3, 4):
        planned = shares.plan(hosts, [0, 1], None)
        together = [sum(share.cores == other.cores for other in planned) for share in planned]
        assert {share.method for share in planned} == {"pinning only"}
        assert [share.fraction for share in planned] == pytest.approx([1 / count for count in together])
        assert len(set(together)) == 1
    with pytest.raises(ValueError, match="at least one"):
        shares.plan(0, [0], None)


def test_quota_support_is_found_by_trying(tmp_path):
    assert shares.quota_support(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_sweeping_leaves_what_is_not_ours_or_still_in_use(tmp_path):
    mine, other = tmp_path / f"{shares.PREFIX}-{os.getpid()}-0-host0", tmp_path / f"{shares.PREFIX}er"
    for group in (mine, other):
        group.mkdir()
    assert shares.sweep(tmp_path) == []
    assert mine.exists()
    assert other.exists()


def test_torchrun_variables():
    environment = launchers.torchrun(1, 3, "10.77.0.1", 29501)
    expected = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    assert expected.items() <= environment.items()
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.77.0.1", "29501")


def test_horovod_variables():
    environment = launchers.horovod(1, 3, "host1", "10.77.0.254", 4000)
    expected = {"RANK": "1", "SIZE": "3", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "CROSS_RANK": "1", "CROSS_SIZE": "3"}
    assert {f"HOROVOD_{key}": value for key, value in expected.items()}.items() <= environment.items()
    assert environment["HOROVOD_HOSTNAME"] == "host1"
    assert environment["HOROVOD_GLOO_IFACE"] == "eth0"
    assert environment["HOROVOD_CONTROLLER"] == environment["HOROVOD_CPU_OPERATIONS"] == "gloo"


def test_the_drivers_own_job_does_not_reach_the_ranks(monkeypatch):
    foreign = ["RANK", "MASTER_PORT", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "CROSSOVER_EMULATED_LINK", "SLURM_PROCID"]
    for name in foreign:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("CROSSOVER_SCHEDULE", "deft")
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    environment = launchers.common(0, second=False)
    assert not set(foreign) & set(environment)
    assert environment["CROSSOVER_SCHEDULE"] == "deft"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "CROSSOVER_SECOND_IFACE" not in environment
    assert launchers.common(0, second=True)["CROSSOVER_SECOND_IFACE"] == "eth1"


def test_both_ends_of_every_link_are_shaped():
    asked = [5 * 10**8, 3 * 10**8]
    assert len(topology.host_shaping(asked)) == 2
    lines = topology.switch_shaping(3, asked)
    assert len(lines) == len(set(lines)) == 6
    assert sum(f"rate {rates.wire_rate(asked[1])}bit" in line for line in lines) == 3


def test_the_exit_code_is_the_first_failing_ranks():
    nothing = ("", "")
    ended = JobResult((143, 7), 1, (), 1.0, nothing, ("", "boom\n"))
    assert ended.exit_code == 7
    with pytest.raises(TestbedError, match=r"rank 1 failed first, with exit code 7[\s\S]*boom"):
        ended.check()
    late = JobResult((0, 143), None, (1,), 1.0, nothing, nothing)
    assert late.exit_code == 124
    with pytest.raises(TestbedError, match="time-out"):
        late.check()
    assert JobResult((0, 0), None, (), 1.0, nothing, nothing).check().exit_code == 0


def test_without_root_or_tools_it_says_what_is_missing_and_offers_the_emulated_link(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(requirements.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    words = ["run", "--hosts", "3", "--rate", "250mbit", "--", "train.py", "--epochs", "2"]
    assert main(words) == UNAVAILABLE
    said = capsys.readouterr().err
    assert "root is needed" in said
    assert "user id 1000" in said
    assert "`tc` is not there" in said
    assert "`ip`" not in said
    assert 'CROSSOVER_EMULATED_LINK="250mbit,0.1ms" torchrun --nproc-per-node 3 train.py --epochs 2' in said
    with pytest.raises(TestbedError, match="root is needed"):
        Testbed(hosts=2, rate="250mbit").open()
    assert main(["check"]) == UNAVAILABLE


@pytest.mark.parametrize("words", [["run", "--rate", "500mbit"], ["run", "--rate", "500mbit", "--"], []])
def test_a_command_line_without_a_script_is_refused(words, capsys):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [{"hosts": 1}, {"hosts": 40}, {"rate": "0.1mbit"}, {"second_rate": "x"}])
def test_impossible_beds_are_refused(arguments):
    with pytest.raises(ValueError, match="got"):
        Testbed(**arguments)


def test_verification_refuses_a_link_that_stays_off(monkeypatch):
    bed = Testbed(rate="500mbit")
    tries = []

    def measured(bed, seconds):
        tries.append(seconds)
        return [{"link": 0, "asked": 500e6, "received": [498e6, 470e6], "worst": -0.06}]

    monkeypatch.setattr(bandwidth, "measure", measured)
    monkeypatch.setattr(bandwidth, "PAUSE_SECONDS", 0.0)
    with pytest.raises(TestbedError, match=r"carries 498mbit, 470mbit \(by host\) where 500mbit was asked: -6.0%"):
        bandwidth.verify(bed)
    assert len(tries) == bandwidth.ATTEMPTS


def test_check_fails_when_a_rate_is_off(monkeypatch, capsys):
    rows = [
        {"asked": 1e8, "received": [1e8, 1e8], "worst": 0.0, "message_s": 0.08, "message_ideal_s": 0.08},
        {"asked": 1e9, "received": [1e9, 9e8], "worst": -0.1, "message_s": 0.008, "message_ideal_s": 0.008},
    ]
    monkeypatch.setattr("benchmarks.testbed.__main__.missing", lambda: [])
    monkeypatch.setattr(Testbed, "open", lambda self: setattr(self, "shares", shares.plan(2, [0, 1], None)))
    monkeypatch.setattr(bandwidth, "check_rates", lambda bed, asked, seconds: rows[: len(asked)])
    assert main(["check", "--rate", "100mbit"]) == 0
    assert main(["check", "--rate", "100mbit", "--rate", "1gbit"]) == OFF
    output = capsys.readouterr()
    assert "NO" in output.out
    assert "more than 5% off at 1gbit" in output.err
