"""SelDP: N ranks in N chunks at every step, all data on every rank, equal numbers of steps, exact resumption."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from crossover.selsync.sampler import SelSyncSampler


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def ranks(settings: dict[str, Any]) -> list[SelSyncSampler]:
    return [SelSyncSampler(rank=rank, **settings) for rank in range(settings["size"])]


def batches(sampler: SelSyncSampler) -> list[list[int]]:
    indices = list(sampler)
    return [indices[n : n + sampler.batch_size] for n in range(0, len(indices), sampler.batch_size)]


@st.composite
def settings_of_ranks(draw: st.DrawFn) -> dict[str, Any]:
    size, batch_size, drop_last = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.booleans())
    least = size * batch_size if drop_last else size
    return {
        "data": draw(st.integers(least, least + 40)),
        "batch_size": batch_size,
        "size": size,
        "drop_last": drop_last,
        "shuffle": draw(st.booleans()),
        "contiguous": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "chunks_per_epoch": draw(st.integers(1, size)),
    }


@given(settings_of_ranks(), st.integers(0, 7))
def test_at_every_step_ranks_are_in_different_chunks(settings, epoch):
    samplers = ranks(settings)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    plans = [batches(sampler) for sampler in samplers]
    assert {len(plan) for plan in plans} == {samplers[0].batches_per_epoch}
    assert samplers[0].batches_per_epoch > 0
    for step, together in enumerate(zip(*plans, strict=True)):
        assert len({sampler.chunk(step) for sampler in samplers}) == len(samplers)
        assert all(len(batch) == settings["batch_size"] for batch in together)
        assert sum(len(set(batch)) for batch in together) == len(set().union(*together)), "ranks share a sample"


@given(settings_of_ranks(), st.integers(0, 3))
def test_over_a_pass_every_rank_sees_all_data(settings, a_pass):
    if (a_pass * settings["size"]) % settings["chunks_per_epoch"]:
        settings["chunks_per_epoch"] = 1
    epochs = -(-settings["size"] // settings["chunks_per_epoch"])
    seen = []
    for sampler in ranks(settings):
        indices: list[int] = []
        for epoch in range(epochs):
            sampler.set_epoch(a_pass * settings["size"] // settings["chunks_per_epoch"] + epoch)
            indices += list(sampler)
        indices = indices[: sampler.batches_per_chunk * sampler.batch_size * settings["size"]]
        seen.append(sorted(indices))
    assert all(indices == seen[0] for indices in seen), "ranks see other samples, or others twice"
    if settings["drop_last"]:
        assert len(set(seen[0])) == len(seen[0])
        assert settings["data"] - len(seen[0]) < settings["size"] * settings["batch_size"]
    else:
        assert set(seen[0]) == set(range(settings["data"]))


@given(settings_of_ranks(), st.integers(0, 4))
def test_chunks_of_a_text_keep_its_order(settings, epoch):
    settings.update(contiguous=True, drop_last=True, chunks_per_epoch=settings["size"])
    settings["data"] += settings["size"] * settings["batch_size"]
    for sampler in ranks(settings):
        sampler.set_epoch(epoch)
        indices, length = list(sampler), sampler.batches_per_chunk * sampler.batch_size
        for start in range(0, len(indices), length):
            chunk = indices[start : start + length]
            assert chunk == list(range(chunk[0], chunk[0] + length))


def test_order_of_the_paper():
    samplers = ranks({"data": 4, "batch_size": 1, "size": 4, "shuffle": False})
    assert [list(sampler) for sampler in samplers] == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]


def test_chunks_that_do_not_divide_are_dropped_or_filled_up():
    settings = {"data": 11, "batch_size": 2, "size": 2, "shuffle": False}
    first, second = ranks(settings)
    assert batches(first) == [[0, 1], [2, 3], [5, 6], [7, 8]]
    assert batches(second) == [[5, 6], [7, 8], [0, 1], [2, 3]]
    first, _ = ranks({**settings, "drop_last": False})
    assert batches(first) == [[0, 1], [2, 3], [4, 0], [5, 6], [7, 8], [9, 10]]


def test_a_few_samples_fill_whole_batches():
    first, second = ranks({"data": 2, "batch_size": 3, "size": 2, "shuffle": False, "drop_last": False})
    assert (list(first), list(second)) == ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("contiguous", [False, True])
def test_passes_differ_and_seeds_differ(contiguous):
    def order(seed: int, epoch: int) -> list[int]:
        sampler = SelSyncSampler(60, 2, rank=0, size=6, seed=seed, contiguous=contiguous)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    orders = [order(seed, epoch) for seed in range(2) for epoch in range(4)]
    assert len({tuple(indices) for indices in orders}) > 6


def test_an_epoch_of_one_chunk_is_as_long_as_with_distributed_sampler():
    usual = DistributedSampler(Numbers(96), num_replicas=4, rank=1)
    ours = SelSyncSampler(Numbers(96), 8, rank=1, size=4, chunks_per_epoch=1)
    assert len(ours) == len(usual) == len(list(ours))
    assert len(SelSyncSampler(Numbers(96), 8, rank=1, size=4)) == 4 * len(usual)


@given(settings_of_ranks(), st.integers(0, 3), st.floats(0, 1))
def test_resumes_at_the_next_batch(settings, epoch, share):
    sampler = SelSyncSampler(rank=settings["size"] - 1, **settings)
    sampler.set_epoch(epoch)
    whole = batches(sampler)
    done = int(share * len(whole))
    loader = iter(sampler)
    for _ in range(done * sampler.batch_size):
        next(loader)
    state = sampler.state_dict()
    assert state == sampler.state_dict(batches=done)
    resumed = SelSyncSampler(rank=settings["size"] - 1, **settings)
    resumed.load_state_dict(state)
    resumed.set_epoch(resumed.epoch)
    assert resumed.state_dict() == state
    assert batches(resumed) == whole[done:]
    assert batches(resumed) == whole, "the iteration after that is whole"


def test_any_ranks_state_resumes_every_rank():
    one, other = ranks({"data": 24, "batch_size": 2, "size": 2})
    assert one.state_dict(batches=5) == other.state_dict(batches=5)


def test_the_next_epoch_starts_at_its_beginning():
    sampler = SelSyncSampler(24, 2, rank=0, size=2)
    sampler.load_state_dict({**sampler.state_dict(batches=5), "epoch": 3})
    sampler.set_epoch(4)
    assert len(list(sampler)) == 24
    assert sampler.state_dict()["epoch"] == 4


def test_state_follows_a_data_loader():
    sampler = SelSyncSampler(Numbers(24), 2, rank=1, size=2)
    loader = DataLoader(Numbers(24), batch_size=2, sampler=sampler)
    whole = [batch.tolist() for batch in loader]
    assert len(whole) == len(loader) == 12
    for number, _ in enumerate(loader):
        assert sampler.state_dict()["batch"] == number + 1
        if number == 6:
            break
    resumed = SelSyncSampler(Numbers(24), 2, rank=1, size=2)
    resumed.load_state_dict(sampler.state_dict())
    assert [batch.tolist() for batch in DataLoader(Numbers(24), batch_size=2, sampler=resumed)] == whole[7:]


def test_state_is_plain_and_can_be_saved(tmp_path):
    sampler = SelSyncSampler(24, 2, rank=0, size=2)
    torch.save(sampler.state_dict(batches=3), tmp_path / "state")
    sampler.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert len(list(sampler)) == 18


def test_after_a_change_of_size_training_goes_on_at_the_same_share():
    state = SelSyncSampler(240, 2, rank=0, size=2).state_dict(batches=30)
    samplers = ranks({"data": 240, "batch_size": 4, "size": 3})
    for sampler in samplers:
        with pytest.warns(UserWarning, match=r"batch 15 of 60.*size 2 -> 3, batch_size 2 -> 4"):
            sampler.load_state_dict(state)
    plans = [batches(sampler) for sampler in samplers]
    assert [len(plan) for plan in plans] == [45, 45, 45]
    for together in zip(*plans, strict=True):
        assert len(set().union(*together)) == 12


def test_equal_settings_resume_without_a_warning():
    sampler = SelSyncSampler(24, 2, rank=0, size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.load_state_dict(SelSyncSampler(24, 2, rank=1, size=2).state_dict(batches=2))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"data": 0}, "data: has 0 samples, fewer than the 4"),
        ({"data": 3}, "data: has 3 samples.*smaller batch_size, or drop_last=False"),
        ({"data": 1, "drop_last": False}, "data: has 1 samples, fewer than the 2.*fewer ranks"),
        ({"data": iter([1])}, "has no length"),
        ({"batch_size": 0}, "batch_size: is 0"),
        ({"batch_size": 2.0}, r"batch_size: is 2\.0"),
        ({"rank": 2}, "rank, size: are 2, 2"),
        ({"rank": -1}, "rank, size: are -1, 2"),
        ({"size": None}, "rank, size: are 0, None"),
        ({"seed": -1}, "seed: is -1"),
        ({"chunks_per_epoch": 3}, "chunks_per_epoch: is 3.*1 to 2"),
        ({"chunks_per_epoch": 0}, "chunks_per_epoch: is 0"),
    ],
)
def test_arguments_are_checked(change, match):
    with pytest.raises(ValueError, match=match):
        SelSyncSampler(**{"data": 8, "batch_size": 2, "rank": 0, "size": 2, **change})


def test_calls_are_checked():
    sampler = SelSyncSampler(8, 2, rank=0, size=2)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match="epoch: is -1"):
        sampler.set_epoch(-1)
    with pytest.raises(ValueError, match="batch: is 4; it has to be 0 to 3"):
        sampler.chunk(4)
    with pytest.raises(ValueError, match="batches: is 5; it has to be 0 to 4"):
        sampler.state_dict(batches=5)
    with pytest.raises(ValueError, match="lacks"):
        sampler.load_state_dict({"epoch": 0})
    with pytest.raises(ValueError, match="saved with seed=1, this sampler has seed=0"):
        sampler.load_state_dict({**state, "seed": 1})
    with pytest.raises(ValueError, match="samples=9"):
        sampler.load_state_dict({**state, "samples": 9})
