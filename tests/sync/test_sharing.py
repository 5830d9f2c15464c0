"""What a user may say about sharing, and what is answered to what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crossover.sync import gpu
from crossover.sync.device import find_device, host_name
from crossover.sync.loops import place_in_job
from crossover.sync.sharing import Sharing, TimeShare, sharing_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"job": ""}, "job: is ''"),
        ({"job": "a\n"}, "job: is"),
        ({"job": "x" * 65}, "64 bytes"),
        ({"job": "a", "weight": 0}, "weight: is 0"),
        ({"job": "a", "weight": float("nan")}, "weight: is nan"),
        ({"job": "a", "priority": 1.5}, "priority: is 1.5"),
        ({"job": "a", "mode": "later"}, "'overlap', 'defer'"),
        ({"job": "a", "peak_memory": -1}, "peak_memory: is -1"),
    ],
)
def test_what_cannot_be_meant(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TimeShare(**arguments)  # type: ignore[arg-type]


def test_text_says_the_same_as_the_object() -> None:
    share = sharing_of("timeshare:job=a,weight=2,priority=-1,mode=defer,device=gpu,peak_memory=5")
    assert isinstance(share, TimeShare)
    assert (share.job, share.weight, share.priority, share.device, share.peak_memory) == ("a", 2.0, -1, "gpu", 5)
    assert share.deferred
    assert sharing_of("") is None
    assert sharing_of(None) is None
    assert sharing_of(share) is share


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timeshare", "has no name"),
        ("timeshare:weight=2", "has no name"),
        ("timeshare:job=a,wait=2", "'wait' is not known"),
        ("timeshare:job=a,weight=much", "could not convert"),
        ("mps:job=a", "'mps' is not known"),
    ],
)
def test_text_that_is_not_understood_names_what_would_be(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        sharing_of(text)
    assert "timeshare:job=" in str(caught.value)


def test_no_sharing_by_default_does_nothing() -> None:
    sharing = Sharing()
    sharing.attach(torch.device("cpu"), 0, 2, 0, "gloo")
    sharing.computing()
    sharing.communicating()
    sharing.detach()
    assert sharing.facts() == {}


def test_only_what_changes_collectives_has_to_be_equal() -> None:
    assert TimeShare("a").facts() == TimeShare("b", weight=2).facts() == {}
    assert TimeShare("a", mode="defer").facts() != {}


def test_hosts_and_slots_from_the_environment() -> None:
    cpu = torch.device("cpu")
    assert host_name({"CROSSOVER_HOST": "box"}) == "box"
    assert host_name({}) != ""
    assert find_device(cpu, 3, environ={}).name == "cpu3"
    assert find_device(cpu, 3, environ={"CROSSOVER_DEVICE": "slot"}).name == "slot"
    assert find_device(cpu, 3, "mine", {"CROSSOVER_DEVICE": "slot"}).name == "mine"


def test_place_in_a_job() -> None:
    assert place_in_job({}) == (0, 1, 0)


def test_mps_is_found_by_its_control_pipe(tmp_path: Path) -> None:
    import os

    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not gpu.mps_runs(environ)
    os.mkfifo(tmp_path / "control")
    assert gpu.mps_runs(environ)


def test_nccl_without_mps_is_warned_of_with_the_reason() -> None:
    text = gpu.advice("nccl", mps=False)
    assert text is not None
    assert "nvidia-cuda-mps-control" in text
    assert "one process at a time" in text


@pytest.mark.gpu
def test_a_gpu_is_named_by_its_uuid() -> None:
    device = find_device(torch.device("cuda", 0), 0, environ={})
    assert device.name.startswith(("GPU-", "MIG-"))
    assert device.capacity_bytes() > 0
    torch.ones(1 << 20, device="cuda")
    mark = device.mark()
    mark.wait()
    assert mark.passed()
    assert device.peak_bytes() > 0
