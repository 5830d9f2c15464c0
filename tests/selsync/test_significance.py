"""The norm that is measured, and the rule that it feeds, on floats and on tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from crossover.selsync.significance import (
    CPU_PIECE,
    SignificanceTracker,
    TensorSignificanceTracker,
    is_significant,
    paper_factor,
    relative_change,
    squared_norm,
    votes_needed,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

GRADIENTS = {
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "matrix": lambda: torch.randn(5, 3),
    "transposed": lambda: torch.randn(5, 3).t(),
    "channels last": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "every second": lambda: torch.randn(10)[::2],
    "float64": lambda: torch.randn(7, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "float16": lambda: torch.randn(7).half(),
    "complex": lambda: torch.randn(3, 2, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, 2, dtype=torch.complex128).conj(),
    "sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 3]]), torch.randn(2, 4), (5, 4), check_invariants=True),
    "compressed": lambda: torch.randn(4, 4).to_sparse_csr(),
    "long": lambda: torch.randn(3 * CPU_PIECE + 5),
    "long transposed": lambda: torch.randn(1100, 700).t(),
    "long, one row": lambda: torch.randn(2 * CPU_PIECE, 2).t()[:1],
}


def reference(gradients: list[torch.Tensor]) -> float:
    dense = [gradient.to_dense() if gradient.layout is not torch.strided else gradient for gradient in gradients]
    return sum(gradient.to(torch.complex128).abs().square().sum().item() for gradient in dense)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_squared_norm_of_each_kind(kind):
    torch.manual_seed(0)
    gradients = [GRADIENTS[kind](), GRADIENTS[kind]()]
    assert squared_norm(gradients).item() == pytest.approx(reference(gradients), rel=5e-5)


def test_squared_norm_of_all_kinds_together():
    torch.manual_seed(0)
    gradients = [make() for make in GRADIENTS.values()]
    norm = squared_norm(gradients)
    assert norm.dtype is torch.float64
    assert norm.shape == ()
    assert norm.item() == pytest.approx(reference(gradients), rel=5e-5)


def test_float64_is_summed_in_float64():
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert squared_norm([values]).item() == pytest.approx(values.square().sum().item(), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_neither_overflows_nor_rounds(dtype):
    large = torch.full((1000,), 40000.0, dtype=dtype)
    norm = squared_norm([large] * 3)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(3000 * large[0].item() ** 2, rel=1e-5)
    ones = torch.ones(3000, dtype=dtype)  # beyond 256 (2048) a sum in this dtype no longer grows by one
    assert squared_norm([ones]).item() == pytest.approx(3000, rel=1e-6)


def test_nothing_has_norm_zero():
    for nothing in ([], [torch.randn(0)], [torch.zeros(4, 2).to_sparse(1)]):
        norm = squared_norm(nothing)
        assert norm.item() == 0
        assert norm.dtype is torch.float32


def test_rows_that_meet_in_a_sparse_gradient_are_added_first():
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 3), (4, 3), check_invariants=True)
    assert squared_norm([twice]).item() == 12


def test_small_squares_count_in_a_long_tensor():
    values = torch.randn(8_000_000, generator=torch.Generator().manual_seed(0))
    assert squared_norm([values]).item() == pytest.approx(values.double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_gradient_shows(bad):
    assert not math.isfinite(squared_norm([torch.ones(3), torch.tensor([1.0, bad])]).item())


def test_norm_needs_no_graph():
    assert not squared_norm([torch.ones(3, requires_grad=True) * 2]).requires_grad


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tensors", [8, 161])
def test_cost_in_operations_does_not_grow_with_the_number_of_tensors(tensors):
    gradients = [torch.ones(16) for _ in range(tensors)]
    with CountOperations() as norm:
        squared_norm(gradients)
    assert len(norm.names) <= 5, norm.names


@pytest.mark.parametrize("window", [None, 25])
def test_an_update_is_a_fixed_few_operations(window):
    tracker = TensorSignificanceTracker(window=window)
    counts = []
    for sample in (1.0, 2.0, math.nan, 3.0):
        norm = torch.tensor(sample)
        with CountOperations() as update:
            tracker.update(norm)
            tracker.vote(0.3)
        counts.append(len(update.names))
    assert set(counts) == {counts[0]}
    assert counts[0] <= 30


@pytest.mark.parametrize("window", [None, 25])
def test_no_step_reads_a_value_back(window):
    """A tensor on the meta device has no values: whatever reads one raises."""
    tracker = TensorSignificanceTracker(window=window)
    tracker.update(torch.tensor(1.0))
    for _ in range(2):
        tracker.update(squared_norm([torch.ones(4, 3, device="meta"), torch.ones(3, device="meta").half()]))
        assert tracker.vote(0.3).device.type == "meta"
    with pytest.raises(RuntimeError):
        tracker.value()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 25])
def test_on_a_gpu_nothing_waits(window):
    gradients = [torch.randn(1000, 10, device="cuda"), torch.randn(7, device="cuda").half()]
    tracker = TensorSignificanceTracker(window=window, warmup_steps=2)
    tracker.update(squared_norm(gradients))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tracker.update(squared_norm([gradient * 2 for gradient in gradients]))
        vote = tracker.vote(0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert vote.tolist() == [1]
    assert squared_norm(gradients).item() == pytest.approx(reference([g.cpu() for g in gradients]), rel=1e-5)


# --- the rule

finite = st.floats(1e-6, 1e6)
samples = st.lists(st.one_of(finite, finite, finite, st.sampled_from([0.0, math.inf, math.nan])), max_size=40)
factors = st.floats(0.01, 1.0)
windows = st.one_of(st.none(), st.integers(1, 8))
warmups = st.integers(0, 6)


def follow(tracker: SignificanceTracker | TensorSignificanceTracker, given_samples: list[float]) -> list[float | None]:
    values = []
    for sample in given_samples:
        if isinstance(tracker, TensorSignificanceTracker):
            tracker.update(torch.tensor(sample, dtype=torch.float64))
            values.append(tracker.value())
        else:
            values.append(tracker.update(sample))
    return values


@given(samples, factors, warmups)
def test_both_forms_give_the_same_numbers(given_samples, factor, warmup_steps):
    floats = SignificanceTracker(factor, warmup_steps=warmup_steps)
    tensors = TensorSignificanceTracker(factor, warmup_steps=warmup_steps)
    assert follow(floats, given_samples) == follow(tensors, given_samples)
    assert floats.state_dict() == tensors.state_dict()


@given(samples, factors, st.integers(1, 8), warmups)
def test_both_forms_agree_with_a_window(given_samples, factor, window, warmup_steps):
    floats = SignificanceTracker(factor, window=window, warmup_steps=warmup_steps)
    tensors = TensorSignificanceTracker(factor, window=window, warmup_steps=warmup_steps)
    for one, other in zip(follow(floats, given_samples), follow(tensors, given_samples), strict=True):
        assert (one is None) == (other is None)
        assert one is None or one == pytest.approx(other, rel=1e-9, abs=1e-9)
    assert floats.state_dict()["samples"] == tensors.state_dict()["samples"]


@given(samples, st.floats(0, 2), factors)
def test_both_forms_vote_alike(given_samples, delta, factor):
    tensors = TensorSignificanceTracker(factor, warmup_steps=2)
    floats = SignificanceTracker(factor, warmup_steps=2)
    for sample in given_samples:
        tensors.update(torch.tensor(sample, dtype=torch.float64))
        vote = tensors.vote(delta)
        assert vote.dtype is torch.int32
        assert vote.tolist() == [int(is_significant(floats.update(sample), delta))]


@given(samples, factors, windows, warmups)
def test_a_bad_sample_never_enters(given_samples, factor, window, warmup_steps):
    with_bad = SignificanceTracker(factor, window=window, warmup_steps=warmup_steps)
    without = SignificanceTracker(factor, window=window, warmup_steps=warmup_steps)
    values = follow(with_bad, given_samples)
    good = [sample for sample in given_samples if math.isfinite(sample)]
    assert [v for v, x in zip(values, given_samples, strict=True) if math.isfinite(x)] == follow(without, good)
    assert all(v is None for v, x in zip(values, given_samples, strict=True) if not math.isfinite(x))
    assert with_bad.state_dict() == without.state_dict()


@given(st.lists(finite, min_size=2, max_size=20), factors)
def test_significance_is_the_factor_times_the_relative_jump(given_samples, factor):
    tracker = SignificanceTracker(factor, warmup_steps=0)
    for sample in given_samples:
        before = tracker.smoothed
        value = tracker.update(sample)
        if before:
            assert value == pytest.approx(factor * abs(sample / before - 1), rel=1e-6, abs=1e-12)


@given(st.lists(finite, min_size=1, max_size=12), factors, st.integers(1, 8))
def test_window_is_the_weighted_mean_of_the_newest(given_samples, factor, window):
    tracker = SignificanceTracker(factor, window=window)
    follow(tracker, given_samples)
    newest = given_samples[::-1][:window]
    weights = [(1 - factor) ** (age + 1) if factor < 1 else float(age == 0) for age in range(len(newest))]
    mean = sum(w * x for w, x in zip(weights, newest, strict=True)) / sum(weights)
    assert tracker.smoothed == pytest.approx(mean, rel=1e-9)


@given(samples, st.integers(-8, 8), windows)
def test_scaling_all_gradients_changes_nothing(given_samples, power, window):
    plain = follow(SignificanceTracker(window=window, warmup_steps=0), given_samples)
    scaled = follow(SignificanceTracker(window=window, warmup_steps=0), [x * 4.0**power for x in given_samples])
    assert plain == scaled


@pytest.mark.parametrize(("settings", "unknown"), [({}, 24), ({"window": 5}, 4), ({"warmup_steps": 3}, 2)])
@pytest.mark.parametrize("form", [SignificanceTracker, TensorSignificanceTracker])
def test_unknown_until_warm(form, settings, unknown):
    values = follow(form(**settings), [1.0] * 30)
    assert values == [None] * unknown + [0.0] * (30 - unknown)


@pytest.mark.parametrize("form", [SignificanceTracker, TensorSignificanceTracker])
def test_the_first_sample_has_nothing_to_be_compared_with(form):
    assert follow(form(0.5, warmup_steps=0), [2.0, 4.0]) == [None, 0.5]


@pytest.mark.parametrize("form", [SignificanceTracker, TensorSignificanceTracker])
def test_after_zero_the_average_starts_anew(form):
    assert follow(form(0.5, warmup_steps=0), [0.0, 0.0, 4.0, 8.0]) == [None, None, None, 0.5]


@pytest.mark.parametrize("form", [SignificanceTracker, TensorSignificanceTracker])
def test_a_change_beyond_all_numbers_is_unknown(form):
    assert follow(form(1.0, warmup_steps=0), [1e-300, 1e300]) == [None, None]


@pytest.mark.parametrize("write", [SignificanceTracker, TensorSignificanceTracker])
@pytest.mark.parametrize("read", [SignificanceTracker, TensorSignificanceTracker])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("before", [0, 2, 9])
def test_resumes_from_either_form(write, read, window, before):
    stream = [float(n * n % 7 + 1) for n in range(15)]
    unbroken = follow(SignificanceTracker(window=window, warmup_steps=5), stream)
    saved, resumed = write(window=window, warmup_steps=5), read(window=window, warmup_steps=5)
    follow(saved, stream[:before])
    resumed.load_state_dict(saved.state_dict())
    for one, other in zip(follow(resumed, stream[before:]), unbroken[before:], strict=True):
        assert (one is None) == (other is None)
        assert one == other or (window and one == pytest.approx(other, rel=1e-9))


def test_the_settings_are_checked():
    for settings, match in (
        ({"factor": 0}, "factor: is 0"),
        ({"factor": 1.5}, "factor: is 1.5"),
        ({"factor": math.nan}, "factor: is nan"),
        ({"window": 0}, "window: is 0"),
        ({"window": 2.5}, "window: is 2.5"),
        ({"warmup_steps": -1}, "warmup_steps: is -1"),
    ):
        for form in (SignificanceTracker, TensorSignificanceTracker):
            with pytest.raises(ValueError, match=match):
                form(**settings)


def test_other_input_is_checked():
    tracker = TensorSignificanceTracker(window=4)
    with pytest.raises(ValueError, match="lacks"):
        tracker.load_state_dict({"smoothed": 1.0})
    with pytest.raises(ValueError, match="holds 2 samples, but window=4 needs 3"):
        tracker.load_state_dict({"smoothed": 1.0, "seen": 3, "samples": [1.0, 1.0]})
    with pytest.raises(ValueError, match="delta: is -1"):
        tracker.vote(-1)
    with pytest.raises(ValueError, match="delta: is nan"):
        is_significant(0.5, math.nan)
    with pytest.raises(ValueError, match="sample: is -1"):
        SignificanceTracker().update(-1.0)
    with pytest.raises(ValueError, match="quorum: is 0"):
        votes_needed(0, 4)
    with pytest.raises(ValueError, match="size: is 0"):
        paper_factor(0)


def test_thresholds_at_their_ends():
    assert is_significant(0.0, 0.0)
    assert is_significant(0.3, 0.3)
    assert not is_significant(0.3, math.inf)
    assert is_significant(None, math.inf)
    tracker = TensorSignificanceTracker(0.5, warmup_steps=2)
    assert tracker.vote(math.inf).tolist() == [1]
    follow(tracker, [4.0, 8.0])
    exact = tracker.value()
    assert exact == 0.5
    assert tracker.vote(exact).tolist() == [1]
    assert tracker.vote(math.nextafter(exact, 1.0)).tolist() == [0]
    assert tracker.vote(math.inf).tolist() == [0]


def test_a_vote_in_flight_is_not_touched_by_the_next_one():
    tracker = TensorSignificanceTracker(0.5, warmup_steps=2)
    follow(tracker, [4.0, 8.0])
    vote = tracker.vote(0.3)
    follow(tracker, [6.0])
    assert tracker.vote(0.3).tolist() == [0]
    assert vote.tolist() == [1]


@given(st.integers(1, 1000).flatmap(lambda size: st.tuples(st.integers(1, size), st.just(size))))
def test_a_quorum_of_whole_ranks_is_exact(pair):
    ranks, size = pair
    assert votes_needed(ranks / size, size) == ranks


def test_factor_of_the_paper_is_kept_in_its_range():
    assert [paper_factor(size) for size in (1, 2, 16, 99, 100, 1024)] == [0.01, 0.02, 0.16, 0.99, 0.99, 0.99]


def test_relative_change_counts_both_ways():
    assert relative_change(1.0, 2.0) == relative_change(3.0, 2.0) == 0.5
    assert relative_change(0.0, 0.0) is None
    assert relative_change(math.inf, 1.0) is None
