"""Data injection on two to four ranks in threads: what arrives, from whom, and what goes wrong together."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from crossover.errors import RankMismatchError
from crossover.selsync.injection import DataInjection, label_skew_indices, reduced_batch_size
from tests.selsync.threads import ThreadCommunicator, errors_of, run_threads

Pair = namedtuple("Pair", ["image", "target"])


def injection_of(communicator: ThreadCommunicator, batch_size: int = 12, **change: Any) -> DataInjection:
    return DataInjection(
        **{"alpha": 0.5, "beta": 0.5, "batch_size": batch_size, "communicator": communicator, **change}
    )


class Lone(ThreadCommunicator):
    """Only says how many ranks there are."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_the_papers_batch_sizes():
    assert reduced_batch_size(32, 0.5, 0.5, size=8) == 11
    assert reduced_batch_size(32, 0.75, 0.75, size=8) == 6


@given(st.integers(1, 512), st.floats(0, 1), st.floats(0, 1), st.integers(1, 64))
def test_reduced_batch_size_is_equation_3_rounded(batch_size, alpha, beta, size):
    reduced = reduced_batch_size(batch_size, alpha, beta, size)
    assert 1 <= reduced <= batch_size
    if size == 1:
        assert reduced == batch_size
    elif reduced > 1:
        assert abs(reduced - batch_size / (1 + alpha * beta * size)) <= 0.5 + 1e-9


@given(st.integers(1, 64), st.floats(0, 1), st.floats(0, 1), st.integers(1, 8), st.integers(0, 50), st.integers(0, 3))
def test_every_rank_receives_equally_much_from_others(batch_size, alpha, beta, size, step, seed):
    plans = [
        DataInjection(alpha, beta, batch_size=batch_size, communicator=Lone(rank, size), seed=seed)
        for rank in range(size)
    ]
    assert len({tuple(plan.drawn(step)) for plan in plans}) == 1
    for rank, plan in enumerate(plans):
        sources = plan.sources(step)
        assert len(set(sources)) == len(sources) == plan.sharers_per_step <= size - 1
        assert rank not in sources
        assert set(sources) <= set(plan.drawn(step))
        assert plan.shared_samples <= plan.local_batch_size
        assert plan.batch_size == plan.local_batch_size + len(sources) * plan.shared_samples
        assert len({p.batch_size for p in plans}) == 1


@given(st.integers(8, 128), st.floats(0.01, 1), st.sampled_from([2, 4, 8, 16]), st.integers(1, 15))
def test_only_rounding_moves_the_batch_from_the_one_asked_for(batch_size, beta, size, sharers):
    sharers = min(sharers, size - 1)
    plan = DataInjection(sharers / size, beta, batch_size=batch_size, communicator=Lone(0, size))
    assert plan.sharers_per_step == sharers
    if plan.local_batch_size > 1 and plan.shared_samples > 1:
        assert abs(plan.batch_size - batch_size) <= 0.5 * (1 + sharers * beta) + 0.5 * sharers + 1e-9


def test_ranks_cannot_receive_from_more_than_all_others():
    plan = DataInjection(1.0, 1.0, batch_size=32, communicator=Lone(0, 4))
    assert (plan.local_batch_size, plan.sharers_per_step, plan.shared_samples, plan.batch_size) == (6, 3, 6, 24)


def test_every_rank_is_drawn_in_time_and_seeds_differ():
    plan = DataInjection(0.5, 0.5, batch_size=8, communicator=Lone(0, 4))
    other = DataInjection(0.5, 0.5, batch_size=8, communicator=Lone(0, 4), seed=1)
    counts = [sum(rank in plan.sources(step) for step in range(300)) for rank in range(4)]
    assert counts[0] == 0
    assert all(150 < count < 250 for count in counts[1:])
    assert [plan.drawn(step) for step in range(8)] != [other.drawn(step) for step in range(8)]


def nested_batch(rank: int, samples: int, call: int) -> dict[str, Any]:
    """Every value says whose sample it is."""
    number = torch.arange(samples) + 100 * rank + 1000 * call
    return {
        "image": number.view(-1, 1, 1).expand(-1, 2, 3).float(),
        "flags": [number % 2 == 0, number.to(torch.int16)],
        "pair": Pair(number.to(torch.bfloat16).view(-1, 1), number),
        "wave": (number.to(torch.complex64), number.double().view(-1, 1).expand(-1, 3).t().contiguous().t()),
        "nothing": None,
        "empty": torch.zeros(samples, 0),
    }


def flat(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from flat(value)
    elif batch is not None:
        for value in batch:
            yield from flat(value)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (1.0, 0.3), (0.01, 1.0)])
def test_own_samples_first_then_those_of_the_sources(size, alpha, beta):
    def train(communicator: ThreadCommunicator) -> list[tuple[Any, list[int], DataInjection]]:
        injection = injection_of(communicator, alpha=alpha, beta=beta)
        results = []
        for call in range(4):
            sources = injection.sources(injection.step)
            results.append(
                (injection(nested_batch(communicator.rank, injection.local_batch_size, call)), sources, injection)
            )
        return results

    for rank, results in enumerate(run_threads(size, train)):
        for call, (batch, sources, injection) in enumerate(results):
            own = nested_batch(rank, injection.local_batch_size, call)
            given_by = [nested_batch(source, injection.local_batch_size, call) for source in sources]
            assert type(batch) is dict
            assert list(batch) == list(own)
            assert type(batch["pair"]) is Pair
            assert batch["nothing"] is None
            for found, *parts in zip(flat(batch), flat(own), *map(flat, given_by), strict=True):
                expected = torch.cat([parts[0], *(part[: injection.shared_samples] for part in parts[1:])])
                assert found.dtype is expected.dtype
                assert torch.equal(found, expected)
                assert len(found) == injection.batch_size


@pytest.mark.parametrize("batch", ["tensor", "pair of tensors", "mapping"])
def test_usual_batches_keep_their_type(batch):
    def train(communicator: ThreadCommunicator) -> tuple[Any, int]:
        injection = injection_of(communicator)
        tensor = torch.full((injection.local_batch_size, 2), float(communicator.rank))
        made = {"tensor": tensor, "pair of tensors": [tensor, tensor[:, 0].long()], "mapping": {"x": tensor}}[batch]
        return injection(made), injection.local_batch_size

    for rank, (found, local) in enumerate(run_threads(2, train)):
        assert type(found) is {"tensor": Tensor, "pair of tensors": list, "mapping": dict}[batch]
        first = next(flat(found))
        assert first[:local].eq(rank).all()
        assert first[local:].eq(1 - rank).all()
        assert len(first) > local


def test_ranks_that_are_not_drawn_send_nothing_of_theirs():
    def train(communicator: ThreadCommunicator) -> list[tuple[bool, bool]]:
        injection = injection_of(communicator, alpha=0.3)
        results = []
        for step in range(8):
            injection(torch.ones(injection.local_batch_size, 3))
            _, sent = communicator.calls[-1]
            results.append((communicator.rank in injection.drawn(step), bool(sent.any())))
        return results

    results = run_threads(4, train)
    assert {pair for row in results for pair in row} == {(True, True), (False, False)}


def test_every_step_is_one_collective_of_equal_name_and_size():
    def train(communicator: ThreadCommunicator) -> list[tuple[str, int]]:
        injection = injection_of(communicator)
        for call in range(3):
            injection(nested_batch(communicator.rank, injection.local_batch_size, call))
        return [(name, sent.numel()) for name, sent in communicator.calls if ".layout" not in name]

    first, *others = run_threads(3, train)
    assert len(first) == 3
    assert all(calls == first for calls in others)


@pytest.mark.parametrize(("size", "change"), [(1, {}), (3, {"alpha": 0}), (3, {"beta": 0})])
def test_where_nothing_is_injected_nothing_is_sent(size, change):
    def train(communicator: ThreadCommunicator) -> tuple[bool, int, int, int]:
        injection = injection_of(communicator, **change)
        batch = ["anything", torch.ones(3)]
        same = injection(batch) is batch and list(injection.wrap([batch])) == [batch]
        return same, injection.local_batch_size, injection.batch_size, len(communicator.calls)

    assert run_threads(size, train) == [(True, 12, 12, 0)] * size


def test_wrapped_loaders_end_together():
    def train(communicator: ThreadCommunicator) -> list[tuple[int, int, int]]:
        injection = injection_of(communicator)
        samples = (5 - communicator.rank) * injection.local_batch_size + 1
        loader = DataLoader(
            [(torch.ones(2), n) for n in range(samples)], batch_size=injection.local_batch_size, drop_last=True
        )
        wrapped = injection.wrap(loader)
        before = len(wrapped)
        epochs = [sum(len(target) == injection.batch_size for _, target in wrapped) for _ in range(2)]
        return [(before, len(wrapped), count) for count in epochs]

    assert run_threads(3, train) == [[(5, 3, 3)] * 2, [(4, 3, 3)] * 2, [(3, 3, 3)] * 2]


def test_resumes_with_the_same_draws():
    def train(communicator: ThreadCommunicator) -> bool:
        injection, resumed = injection_of(communicator), injection_of(communicator)
        batches = [nested_batch(communicator.rank, injection.local_batch_size, call) for call in range(6)]
        unbroken = [injection(batch) for batch in batches]
        half = injection_of(communicator)
        for batch in batches[:3]:
            half(batch)
        resumed.load_state_dict(half.state_dict())
        rest = [resumed(batch) for batch in batches[3:]]
        return all(
            torch.equal(one, other)
            for mine, theirs in zip(unbroken[3:], rest, strict=True)
            for one, other in zip(flat(mine), flat(theirs), strict=True)
        )

    assert run_threads(3, train) == [True] * 3


def test_batches_that_are_not_alike_are_refused_on_every_rank():
    def train(communicator: ThreadCommunicator) -> None:
        injection = injection_of(communicator)
        width = 4 if communicator.rank == 2 else 3
        injection({"x": torch.ones(injection.local_batch_size, width)})

    errors = errors_of(3, train)
    assert [type(error) for error in errors] == [RankMismatchError] * 3
    assert all("rank 0 and rank 2" in str(error) and "batch['x']" in str(error) for error in errors)


def test_a_batch_that_cannot_be_completed_is_reported_on_every_rank():
    def train(communicator: ThreadCommunicator) -> None:
        injection = injection_of(communicator)
        names = ["a"] * injection.local_batch_size
        injection([torch.ones(injection.local_batch_size), names if communicator.rank == 1 else None])

    first, second = errors_of(2, train)
    assert type(first) is RankMismatchError
    assert type(second) is ValueError
    assert "rank 1 cannot complete its batch. batch[1][0]: is a str" in str(first)
    assert "batch[1][0]: is a str" in str(second)


def test_a_later_batch_of_another_shape_is_named():
    def train(communicator: ThreadCommunicator) -> None:
        injection = injection_of(communicator)
        injection([torch.ones(injection.local_batch_size, 5)])
        injection([torch.ones(injection.local_batch_size, 6)])

    for error in errors_of(2, train):
        assert type(error) is ValueError
        assert "(5,) a sample against batch[0]" in str(error)
        assert "one fixed shape" in str(error)


@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_a_short_batch_is_named(shape):
    for error in errors_of(2, lambda communicator: injection_of(communicator)((torch.ones(shape),))):
        assert f"batch[0]: is a tensor of shape {shape}; its first dimension has to be 8" in str(error)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"alpha": 1.5}, "alpha: is 1.5"),
        ({"beta": -0.1}, "beta: is -0.1"),
        ({"alpha": float("nan")}, "alpha: is nan"),
        ({"batch_size": 0}, "batch_size: is 0"),
        ({"batch_size": 2.5}, "batch_size: is 2.5"),
        ({"seed": -1}, "seed: is -1"),
    ],
)
def test_arguments_are_checked(change, match):
    with pytest.raises(ValueError, match=match):
        injection_of(Lone(0, 2), **change)


def test_other_input_is_checked():
    injection = injection_of(Lone(0, 2))
    with pytest.raises(ValueError, match=r"loader: a .* without a length"):
        injection.wrap(iter([1]))
    with pytest.raises(ValueError, match="lacks"):
        injection.load_state_dict({})


# --- splits by label


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 10))
def test_a_split_by_label_is_disjoint_and_even(labels, size, labels_per_rank):
    kinds = len(set(labels))
    if labels_per_rank > kinds:
        with pytest.raises(ValueError, match=f"labels_per_rank: is {labels_per_rank}; it has to be 1 to {kinds}"):
            label_skew_indices(labels, 0, size, labels_per_rank)
        return
    owners = [
        [rank for rank in range(size) if (n - rank * labels_per_rank) % kinds < labels_per_rank] for n in range(kinds)
    ]
    counts = [labels.count(kind) for kind in sorted(set(labels))]
    if any(
        all(counts[n] <= owners[n].index(rank) for n in range(kinds) if rank in owners[n]) for rank in range(size)
    ):  # more ranks deal in a label than it has samples
        with pytest.raises(ValueError, match="leave a rank"):
            label_skew_indices(labels, 0, size, labels_per_rank)
        return
    shares = [label_skew_indices(labels, rank, size, labels_per_rank) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    together = [index for share in shares for index in share]
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(len(labels)))
    assert all(len({labels[index] for index in share}) <= labels_per_rank for share in shares)


def test_labels_are_dealt_in_turn():
    labels = torch.arange(10).repeat(6)

    def found(size: int, labels_per_rank: int) -> list[list[int]]:
        splits = [label_skew_indices(labels, rank, size, labels_per_rank) for rank in range(size)]
        return [sorted(set(labels[split].tolist())) for split in splits]

    assert found(5, 2) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert found(4, 1) == [[0], [1], [2], [3]]
    assert found(4, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9]]
    assert found(2, 10) == [list(range(10))] * 2


def test_label_input_is_checked():
    with pytest.raises(ValueError, match="labels: has shape"):
        label_skew_indices(torch.zeros(2, 2), 0, 1, 1)
    with pytest.raises(ValueError, match="labels: has shape"):
        label_skew_indices([], 0, 1, 1)
    with pytest.raises(ValueError, match="rank, size: are 3, 3"):
        label_skew_indices([0, 1], 3, 3, 1)
    with pytest.raises(ValueError, match="leave a rank of 3 without any"):
        label_skew_indices([0, 1], 0, 3, 1)
