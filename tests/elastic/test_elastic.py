"""States, the sampler, and going on after a restart."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import crossover as xo
from crossover import runtime
from tests.collectives.launchers import TWO_RANKS
from tests.harness import run_ranks


@pytest.fixture(autouse=True)
def _alone() -> Any:
    xo.init(backend="solo")
    yield
    xo.shutdown()


def _shares(monkeypatch: pytest.MonkeyPatch, length: int, ranks: int, processed: int) -> list[list[int]]:
    shares = []
    for rank in range(ranks):
        monkeypatch.setattr(
            runtime, "context", lambda r=rank: SimpleNamespace(communicator=SimpleNamespace(rank=r, size=ranks))
        )
        sampler = xo.elastic.ElasticSampler(range(length), seed=3)
        sampler.load_state_dict({"epoch": 0, "processed_num": processed})
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler)
    return shares


@pytest.mark.parametrize(
    ("length", "ranks", "processed"), [(10, 2, 0), (10, 3, 4), (7, 4, 6), (5, 2, 5), (5, 8, 0), (0, 2, 0)]
)
def test_sampler_gives_every_unprocessed_sample_to_some_rank(
    monkeypatch: pytest.MonkeyPatch, length: int, ranks: int, processed: int
) -> None:
    shares = _shares(monkeypatch, length, ranks, processed)
    assert len({len(share) for share in shares}) == 1
    given = [index for share in shares for index in share]
    assert len(set(given)) == length - processed
    assert len(given) - len(set(given)) < max(ranks, 1)
    done = _shares(monkeypatch, length, 1, 0)[0][:processed]
    assert not set(done) & set(given)


def test_sampler_goes_on_where_it_was() -> None:
    sampler = xo.elastic.ElasticSampler(range(8), shuffle=True, seed=1)
    first = list(sampler)
    assert sorted(first) == list(range(8))
    sampler.record_batch(0, 3)
    assert list(sampler) == first, "the epoch under way is not changed"
    again = xo.elastic.ElasticSampler(range(8), shuffle=True, seed=1)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == first[3:]
    again.set_epoch(1)
    assert sorted(again) == list(range(8))
    assert list(again) != first
    assert list(xo.elastic.ElasticSampler(range(4), shuffle=False)) == [0, 1, 2, 3]


def _made() -> tuple[nn.Linear, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    scheduler.step()


def test_restore_undoes_what_was_not_committed() -> None:
    model, optimizer, scheduler = _made()
    state = xo.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, seen=[1], epoch=0)
    _train(model, optimizer, scheduler)
    state.epoch = 1
    state.seen.append(2)
    state.commit()
    weight, momentum = model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"].clone()
    _train(model, optimizer, scheduler)
    state.epoch = 2
    state.seen.append(3)
    for _ in range(2):  # what is saved survives being restored
        state.restore()
        assert torch.equal(model.weight, weight)
        assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.25
        assert (state.epoch, state.seen) == (1, [1, 2])
        state.seen.append(4)
    replacement = nn.Linear(2, 1)
    state.model = replacement
    with torch.no_grad():
        replacement.weight.zero_()
    state.restore()
    assert replacement.weight.abs().sum() > 0


def test_reset_callbacks_come_after_samplers_have_adapted() -> None:
    sampler = xo.elastic.ElasticSampler(range(6), shuffle=False)
    state = xo.elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 2)
    seen: list[int] = []
    state.register_reset_callbacks([lambda: seen.append(len(sampler))])
    state.on_reset()
    assert seen == [4]


def test_run_needs_a_state_and_returns_what_the_function_returns() -> None:
    @xo.elastic.run
    def train(state: xo.elastic.ObjectState, extra: int) -> int:
        return state.epoch + extra

    assert train(xo.elastic.ObjectState(epoch=3), extra=4) == 7
    with pytest.raises(ValueError, match="state: is a int"):
        train(3, extra=4)
    for method in ("save", "restore", "sync"):
        with pytest.raises(NotImplementedError, match=method):
            getattr(xo.elastic.State(), method)()


def _synced() -> None:
    xo.init()
    rank = xo.rank()
    model, optimizer, scheduler = _made()
    for _ in range(1 + rank):
        _train(model, optimizer, scheduler)
    sampler = xo.elastic.ElasticSampler(range(20))
    sampler.record_batch(0, 2 + rank)
    state = xo.elastic.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, epoch=rank + 7, notes={"rank": rank}
    )

    @xo.elastic.run
    def train(state: xo.elastic.TorchState) -> list[Any]:
        momentum = optimizer.state[model.weight]["momentum_buffer"].tolist()
        rate = [optimizer.param_groups[0]["lr"], scheduler.last_epoch]
        return [model.weight.tolist(), momentum, rate, len(sampler), state.epoch, state.notes]

    everyone = xo.allgather_object(train(state))
    assert everyone[0] == everyone[1]
    assert everyone[0][2] == [0.25, 1]
    assert everyone[0][3:] == [8, 7, {"rank": 0}]
    state.epoch = 9
    state.commit()

    @xo.elastic.run
    def fails(state: xo.elastic.TorchState) -> None:
        raise xo.CommunicationError("a rank is gone")

    with pytest.raises(xo.CommunicationError, match="a rank is gone"):
        fails(state)
    xo.barrier()
    xo.shutdown()


@pytest.mark.parametrize(("launcher", "size"), TWO_RANKS)
def test_sync_takes_the_state_of_rank_0(launcher: str, size: int) -> None:
    run_ranks(_synced, size, launcher=launcher, timeout=60)


def _job(folder: str, fails: bool) -> list[int]:
    xo.init()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    epochs: list[int] = []

    @xo.elastic.run
    def train(state: xo.elastic.TorchState) -> None:
        while state.epoch < 4:
            epochs.append(state.epoch)
            if fails and state.epoch == 2 and xo.rank() == 1:
                sys.exit(3)
            xo.allreduce(torch.ones(1))
            with torch.no_grad():
                model.weight.add_(1)
            state.epoch += 1
            state.commit()

    train(xo.elastic.TorchState(model=model, epoch=0))
    assert model.weight.item() == 4
    xo.shutdown()
    return epochs


def test_a_restarted_job_goes_on_from_the_commit_on_disk(tmp_path: Path) -> None:
    env = {"CROSSOVER_ELASTIC_DIR": str(tmp_path / "commits")}
    outcomes = run_ranks(_job, 2, str(tmp_path), True, env=env, expect_failure=True, timeout=60)
    assert outcomes[1].exit_code == 3
    assert outcomes[0].error == "CommunicationError", outcomes[0].describe()
    assert [file.name for file in (tmp_path / "commits").iterdir()] == ["commit.pt"]
    assert run_ranks(_job, 2, str(tmp_path), False, env=env) == [[2, 3], [2, 3]]
    assert not list((tmp_path / "commits").iterdir()), "the next job starts anew"
    assert run_ranks(_job, 2, str(tmp_path), False) == [[0, 1, 2, 3]] * 2
