"""The model of a slow link, with exact times from a virtual clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from crossover import runtime
from crossover.comm import EmulatedLink, LinkModel, RealClock, Solo, VirtualClock
from crossover.comm.communicator import Communicator, ReduceOp, Work
from crossover.comm.solo import CompletedWork
from tests.harness import run_ranks

LATENCY, BANDWIDTH = 0.25, 1024.0
KIB = torch.zeros(256)  # 1 s at that bandwidth


class FourRanks(Solo):
    """Says that it has four ranks, moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 4
        self.ranks = (0, 1, 2, 3)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        return CompletedWork(name)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        return CompletedWork(name)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        return CompletedWork(name)

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        return FourRanks()


def link() -> tuple[EmulatedLink, VirtualClock]:
    clock = VirtualClock()
    return EmulatedLink(FourRanks(), LinkModel(LATENCY, BANDWIDTH), clock), clock


def test_an_all_reduce_takes_its_rounds_and_its_bytes() -> None:
    slow, clock = link()
    work = slow.all_reduce(KIB, name="x")
    assert not work.is_completed()
    work.wait()
    assert clock.now() == 6 * LATENCY + 2 * 3 / 4 * 1.0
    assert work.is_completed()


def test_the_other_collectives() -> None:
    latency = 3 * LATENCY
    wide = torch.zeros(4, 256)
    slow, clock = link()
    slow.broadcast(KIB, 0, name="x").wait()
    assert clock.now() == latency + 1.0
    slow, clock = link()
    slow.all_gather(wide, KIB, name="x").wait()
    assert clock.now() == latency + 3.0
    slow, clock = link()
    slow.reduce_scatter(KIB, wide, name="x").wait()
    assert clock.now() == latency + 3.0


def test_an_all_to_all_ends_with_its_slower_direction() -> None:
    slow, clock = link()
    # Rank 0 keeps one row of 1 KiB; it sends three and receives one.
    slow.all_to_all(torch.zeros(2, 256), torch.zeros(4, 256), [1, 1, 0, 0], [1, 1, 1, 1], name="x").wait()
    assert clock.now() == 3 * LATENCY + 3.0
    # The direction in has been free since 0.75 + 1: only the one out makes the next wait.
    receives_only = slow.all_to_all(torch.zeros(3, 256), torch.zeros(0, 256), [0, 3, 0, 0], [0, 0, 0, 0], name="y")
    receives_only.wait()
    assert clock.now() == 3 * LATENCY + 3.0 + 3 * LATENCY + 3.0


def test_first_come_first_served_whatever_is_waited_for_first() -> None:
    slow, clock = link()
    each = 6 * LATENCY + 1.5
    first = slow.all_reduce(KIB, name="1")
    second = slow.all_reduce(KIB, name="2")
    second.wait()
    assert clock.now() == 2 * each
    assert first.is_completed()
    first.wait()
    assert clock.now() == 2 * each


def test_computing_hides_communication_and_an_idle_link_starts_at_once() -> None:
    slow, clock = link()
    each = 6 * LATENCY + 1.5
    work = slow.all_reduce(KIB, name="1")
    clock.advance(each - 0.5)
    assert not work.is_completed()
    work.wait()
    assert clock.now() == each
    clock.advance(10.0)
    slow.all_reduce(KIB, name="2").wait()
    assert clock.now() == 2 * each + 10.0


def test_duplicates_and_groups_share_the_link() -> None:
    slow, clock = link()
    each = 6 * LATENCY + 1.5
    twin = slow.duplicate(name="twin")
    part = slow.new_group([0, 1, 2, 3], name="part")
    assert part is not None
    slow.all_reduce(KIB, name="1")
    twin.all_reduce(KIB, name="2")
    part.all_reduce(KIB, name="3").wait()
    assert clock.now() == 3 * each


def test_one_rank_sends_nothing() -> None:
    clock = VirtualClock()
    alone = EmulatedLink(Solo(), LinkModel(LATENCY, BANDWIDTH), clock)
    alone.all_reduce(KIB, name="x").wait()
    alone.broadcast(KIB, 0, name="x").wait()
    alone.barrier()
    assert clock.now() == 0.0


def test_the_real_clock_sleeps() -> None:
    slow = EmulatedLink(FourRanks(), LinkModel(0.01, 1e9), RealClock())
    started, busy = time.monotonic(), time.process_time()
    slow.all_reduce(KIB, name="x").wait()
    assert time.monotonic() - started >= 0.06
    assert time.process_time() - busy < 0.03


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [("500mbit,1ms", 1e-3, 62.5e6), ("1gbit,0s", 0.0, 125e6), (" 64 KBIT , 20us ", 20e-6, 8000.0)],
)
def test_reading_a_model(text: str, latency: float, bandwidth: float) -> None:
    model = LinkModel.parse(text)
    assert model.latency_s == pytest.approx(latency)
    assert model.bandwidth_bytes_per_s == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    "text", ["", "500", "500mbit", "500mb,1ms", "fast,1ms", "0mbit,1ms", "1.2.3mbit,1ms", "1mbit,-1ms"]
)
def test_a_model_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"CROSSOVER_EMULATED_LINK: is .*'500mbit,1ms'"):
        LinkModel.parse(text)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="latency_s"):
        LinkModel(-1.0, 1.0)
    with pytest.raises(ValueError, match="bandwidth_bytes_per_s"):
        LinkModel(0.0, 0.0)


def reduced_slowly() -> tuple[list[float], float, str, int]:
    runtime.init()
    comm = runtime.context().communicator
    comm.barrier()
    tensor = torch.full((25_000,), float(comm.rank))
    started = time.monotonic()
    comm.all_reduce(tensor, name="x").wait()
    seconds = time.monotonic() - started
    group = torch.distributed.group.WORLD
    assert group is not None
    wrapped = runtime.communicator_of(group)
    return tensor[:2].tolist(), seconds, comm.backend, wrapped.size


def test_the_environment_slows_a_job_down_and_says_so() -> None:
    outcomes = run_ranks(reduced_slowly, 2, env={"CROSSOVER_EMULATED_LINK": "8mbit,10ms"}, expect_failure=True)
    for outcome in outcomes:
        values, seconds, backend, size = outcome.value
        assert values == [1.0, 1.0]
        assert seconds >= 0.12  # 2 rounds of 10 ms and 100 kB at 1 MB/s
        assert "emulated" in backend
        assert size == 2
        assert "all figures are emulated" in outcome.stderr
