"""Checkpoints in one piece, and evaluation over ranks with uneven shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from tests.harness import run_ranks
from tests.imagenet.example import importable

checkpoint, data, evaluation, recipe = (importable(n) for n in ("checkpoint", "data", "evaluate", "recipe"))


class Unwritable:
    """An object that fails when it is being written."""

    def __reduce__(self) -> str:
        raise OSError("the disk is full")


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "checkpoint.pt"
    checkpoint.write({"step": torch.tensor(1)}, path)
    with pytest.raises(OSError, match="disk is full"):
        checkpoint.write({"step": torch.tensor(2), "more": Unwritable()}, path)
    assert torch.load(path, weights_only=True) == {"step": torch.tensor(1)}


def make(seed: int, ema: bool = True) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    average = recipe.Ema(model, 0.9) if ema else None
    optimizer = xo.DistributedOptimizer(
        torch.optim.SGD(recipe.parameter_groups(model, 1e-3), lr=0.1, momentum=0.9), model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return model, optimizer, checkpoint.Trained(model, optimizer, scaler, average, {"model": "small"})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, trained: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(recipe.seed_of(step, xo.rank()))
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        trained.ema.update(model, step)


def tensors(model: nn.Module, trained: Any) -> list[torch.Tensor]:
    return [*model.state_dict().values(), *trained.ema.module.state_dict().values()]


def save_and_go_on(folder: str, seed_by_rank: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Train 3 steps, save, train 3 more; then a second set-up resumes and trains the same 3."""
    xo.init()
    path = Path(folder) / "checkpoint.pt"
    model, optimizer, trained = make(seed=xo.rank() if seed_by_rank else 0)
    trained.restore(None)
    train(model, optimizer, trained, range(3))
    trained.save([path], checkpoint.Position(epoch=1, images=48, totals=[1.0, 2.0, 3.0]))
    train(model, optimizer, trained, range(3, 6))

    resumed_model, resumed_optimizer, resumed = make(seed=10 + xo.rank())
    own = path if xo.rank() == 0 else Path(folder) / "not here"  # only rank 0 has the file
    position = resumed.restore(own)
    train(resumed_model, resumed_optimizer, resumed, range(3, 6))
    return tensors(model, trained), tensors(resumed_model, resumed), [position.epoch, position.images, *position.totals]


def test_resumed_is_bit_equal_and_only_rank_0_reads(tmp_path: Path) -> None:
    ranks = run_ranks(save_and_go_on, 2, str(tmp_path), True)
    for unbroken, resumed, position in ranks:
        assert all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))
        assert position == [1, 48, 1.0, 2.0, 3.0]


def refuse(folder: str) -> str:
    xo.init()
    _, _, trained = make(seed=0)
    trained.facts["model"] = "another"
    with pytest.raises(ValueError, match="cannot be resumed from") as caught:
        trained.restore(Path(folder) / "checkpoint.pt")
    return str(caught.value)


def test_an_unfit_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save_and_go_on, 1, str(tmp_path), False, launcher="none")
    first, second = run_ranks(refuse, 2, str(tmp_path))
    assert first == second
    assert "model was 'small' and is 'another'" in first


def average() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    xo.init()
    torch.manual_seed(xo.rank())
    model = nn.BatchNorm1d(4)
    model(torch.randn(16, 4))
    mine = [buffer.clone() for buffer in model.buffers()]
    evaluation.average_buffers(model)
    return mine, list(model.buffers())


def test_running_statistics_become_their_mean() -> None:
    ranks = run_ranks(average, 2)
    for number in range(2):  # mean and variance; the third is a count
        expected = (ranks[0][0][number] + ranks[1][0][number]) / 2
        assert not torch.equal(ranks[0][0][number], ranks[1][0][number])
        assert all(torch.equal(after[number], expected) for _, after in ranks)
    assert ranks[0][1][2] == 1


class Remembering(nn.Module):
    """Class scores by mean colour, and the images that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, ...]] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = images.mean(dim=(2, 3))
        self.seen += [tuple(row) for row in images.flatten(1)[:, :40].tolist()]
        return torch.cat([means, means[:, :1] - means[:, 1:2]], dim=1)


def evaluate_tree(root: str, expected: int) -> tuple[list[tuple[float, ...]], Any]:
    xo.init()
    cpu = torch.device("cpu")
    images = data.ImageTree(Path(root) / "val", data.evaluation_transform(32, 36))
    keys = data.evaluation_keys(len(images), xo.rank(), xo.size())
    loader = data.make_loader(images, keys, 8, 0, cpu, whole_batches=False)
    convert = data.ToDevice(cpu, channels_last=False)
    model = Remembering()
    batches = (convert(*batch) for batch in loader)
    return model.seen, evaluation.evaluate(model, batches, lambda m, x: m(x), cpu, expected)


def test_uneven_shares_count_each_image_once(tree: Path) -> None:
    [(everything, alone)] = run_ranks(evaluate_tree, 1, str(tree), 44, launcher="none")
    assert len(set(everything)) == 44  # images can be told apart
    ranks = run_ranks(evaluate_tree, 3, str(tree), 44)
    assert [len(seen) for seen, _ in ranks] == [15, 15, 14]  # and two batches each, the last one smaller
    assert sorted(image for seen, _ in ranks for image in seen) == sorted(everything)
    for _, accuracy in ranks:
        assert (accuracy.top1, accuracy.top5, accuracy.images) == (alone.top1, 1.0, 44)
        assert accuracy.loss == pytest.approx(alone.loss, rel=1e-6)
    assert 0 < alone.top1 < 1


def test_a_miscount_is_an_error(tree: Path) -> None:
    first, second = run_ranks(evaluate_tree, 2, str(tree), 45, expect_failure=True)
    assert [first.error, second.error] == ["RuntimeError", "RuntimeError"]
    assert "44 images were counted, the set has 45" in first.message
