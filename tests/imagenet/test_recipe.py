"""The recipe's formulas against values worked out by hand, and the tree's images."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.imagenet.example import importable

recipe, data, make_tiny_tree = importable("recipe"), importable("data"), importable("make_tiny_tree")


def test_warm_up_then_cosine() -> None:
    rate = recipe.LearningRate(peak=0.8, steps_per_epoch=10, epochs=6, warmup_epochs=2, floor=0.1)
    assert [rate(step) for step in (0, 4, 19)] == pytest.approx([0.8 / 20, 0.2, 0.8])
    assert rate(20) == 0.8  # the cosine starts at its top
    assert rate(40) == pytest.approx(0.45)  # half way between 0.8 and 0.1
    assert rate(30) == pytest.approx(0.1 + 0.7 * (1 + math.sqrt(0.5)) / 2)
    assert rate(60) == pytest.approx(0.1)
    rates = [rate(step) for step in range(60)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_step_decay() -> None:
    rate = recipe.LearningRate(
        peak=1.0, steps_per_epoch=4, epochs=90, warmup_epochs=5, decay="step", step_epochs=30, step_factor=0.1
    )
    assert [rate(4 * epoch) for epoch in (5, 29, 30, 59, 60, 89)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert rate(4 * 30 - 1) == 1.0


def test_no_warm_up() -> None:
    rate = recipe.LearningRate(peak=0.3, steps_per_epoch=7, epochs=3, warmup_epochs=0)
    assert rate(0) == 0.3


def test_only_matrices_and_kernels_decay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    decaying, others = recipe.parameter_groups(model, 0.05)
    assert [decaying["weight_decay"], others["weight_decay"]] == [0.05, 0.0]
    assert {id(p) for p in decaying["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert len(others["params"]) == 4


def test_moving_average_follows_its_formula() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    ema = recipe.Ema(model, decay=0.5)
    expected = model[0].weight.detach().clone()
    for step in range(12):
        with torch.no_grad():
            model[0].weight.add_(step + 1)
        model(torch.randn(4, 2, dtype=torch.float64))
        ema.update(model, step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model[0].weight.detach()
    assert torch.allclose(ema.module[0].weight, expected, atol=1e-13)
    assert ema.module[1].num_batches_tracked == 12  # counts are copied, not averaged
    assert not ema.module.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_moving_average_refuses(decay: float) -> None:
    with pytest.raises(ValueError, match="decay: is"):
        recipe.Ema(nn.Linear(1, 1), decay)


def test_top_k() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 3.0, 1.0]])
    targets = torch.tensor([0, 0, 0])
    assert [int(recipe.top_k_correct(logits, targets, k)) for k in (1, 2, 5)] == [1, 2, 3]


def test_an_image_is_augmented_alike_wherever_it_is_read(tree: Path) -> None:
    images = data.ImageTree(tree / "train", data.training_transform(32, "trivial"), seed=3)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first, target = images[2, 5]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    torch.rand(7)
    assert torch.equal(images[2, 5][0], first)
    assert not torch.equal(images[3, 5][0], first)  # another epoch
    assert first.dtype == torch.uint8
    assert (tuple(first.shape), target) == ((3, 32, 32), 0)


def test_sampler_goes_on_in_the_middle_with_another_number_of_ranks() -> None:
    def places(size: int, first: int, count: int | None = None) -> list[set[int]]:
        taken = []
        for rank in range(size):
            sampler = data.EpochSampler(range(48), size, rank, seed=1)
            sampler.set_epoch(4, first)
            keys = list(sampler)
            assert len(keys) == len(sampler)
            assert {epoch for epoch, _ in keys} == {4}
            taken.append({place for _, place in keys[:count]})
        return taken

    before = places(4, first=0, count=6)  # 24 of 48 images
    after = places(3, first=8)
    everything = [*before, *after]
    assert sum(map(len, everything)) == 48
    assert set.union(*everything) == set(range(48))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 60])
def test_every_image_is_evaluated_once(size: int) -> None:
    shares = [data.evaluation_keys(44, rank, size) for rank in range(size)]
    assert sorted(place for share in shares for _, place in share) == list(range(44))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_images_arrive_normalised() -> None:
    convert = data.ToDevice(torch.device("cpu"), channels_last=True)
    grey = torch.full((2, 3, 4, 4), 128, dtype=torch.uint8)
    images, _ = convert(grey, torch.zeros(2, dtype=torch.int64))
    assert images[0, :, 0, 0].tolist() == pytest.approx(
        [(128 / 255 - m) / d for m, d in zip((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), strict=True)], rel=1e-5
    )
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_tree_is_the_same_for_the_same_seed(tree: Path, tmp_path: Path) -> None:
    make_tiny_tree.make_tree(tmp_path, classes=4, train=18, val=11, pixels=40)
    files = sorted(path.relative_to(tree) for path in tree.rglob("*.JPEG"))
    assert len(files) == 4 * (18 + 11)
    assert all((tree / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)
    make_tiny_tree.make_tree(tmp_path, classes=4, train=18, val=11, pixels=40, seed=1)
    assert any((tree / file).read_bytes() != (tmp_path / file).read_bytes() for file in files)
