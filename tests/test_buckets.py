"""What one bucket does to gradients."""

from __future__ import annotations

import pytest
import torch

from crossover.buckets import Bucket

LAYOUTS = {
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "matrix": lambda: torch.randn(5, 3),
    "transposed": lambda: torch.randn(5, 3).t(),
    "channels last": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "channels last 1x1": lambda: torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "complex": lambda: torch.randn(3, 2, dtype=torch.complex64),
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
}


def bucket_of(*tensors: torch.Tensor) -> Bucket:
    return Bucket(0, [(n, f"p{n}", torch.nn.Parameter(tensor)) for n, tensor in enumerate(tensors)])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gradients_come_back_as_they_went_in(layout, scale):
    bucket = bucket_of(LAYOUTS[layout](), LAYOUTS[layout](), LAYOUTS[layout]())
    gradients = [torch.randn_like(slot.parameter).contiguous() for slot in bucket.slots]
    for slot, gradient in zip(bucket.slots, gradients, strict=True):
        slot.parameter.grad = gradient.clone()
    bucket.gather(scale)
    bucket.scatter()
    for slot, gradient in zip(bucket.slots, gradients, strict=True):
        assert torch.equal(slot.parameter.grad, gradient * scale)
        assert slot.parameter.grad is slot.view
        if layout != "expanded":
            assert slot.parameter.grad.stride() == slot.parameter.stride()


def test_a_gradient_that_lives_in_the_bucket_is_not_copied():
    bucket = bucket_of(torch.randn(3), torch.randn(4))
    for slot in bucket.slots:
        slot.parameter.grad = slot.view
        slot.view.fill_(2.0)
    bucket.gather(0.25)
    assert bucket.slots[1].parameter.grad.tolist() == [0.5] * 4


@pytest.mark.parametrize("taken", [(), (0,), (0, 2)])
def test_each_gradient_is_scaled_once_in_a_bucket_of_many_small_and_a_few_large(taken):
    tensors = [torch.rand(100, 100) if place in (0, 2) else torch.rand(10) for place in range(12)]
    bucket = bucket_of(*tensors)
    for slot in bucket.slots:
        slot.parameter.grad = slot.parameter.detach().clone()
    for place in taken:
        bucket.take(place, 0.5)
    bucket.gather(0.5)
    bucket.scatter()
    for slot in bucket.slots:
        assert torch.equal(slot.parameter.grad, slot.parameter.detach() / 2)


def test_missing_gradient_counts_as_zero_and_stays_none_where_no_rank_has_one():
    bucket = bucket_of(torch.randn(3), torch.randn(4))
    bucket.buffer.fill_(9.0)
    bucket.slots[0].parameter.grad = torch.ones(3)
    bucket.gather(1.0)
    assert bucket.flags.tolist() == [1.0, 0.0]
    assert bucket.slots[1].view.tolist() == [0.0] * 4
    bucket.scatter()
    assert bucket.slots[1].parameter.grad is None


def test_missing_gradient_is_filled_in_where_another_rank_has_one():
    bucket = bucket_of(torch.randn(3))
    bucket.gather(1.0)
    bucket.slots[0].view.fill_(4.0)
    bucket.flags[0] = 1
    bucket.scatter()
    assert bucket.slots[0].parameter.grad.tolist() == [4.0] * 3


def test_sparse_gradient_in_a_dense_bucket_stays_sparse():
    bucket = bucket_of(torch.randn(4, 2))
    indices = torch.tensor([[1, 3]])
    bucket.slots[0].parameter.grad = torch.sparse_coo_tensor(indices, torch.ones(2, 2), (4, 2))
    bucket.gather(0.5)
    bucket.scatter()
    gradient = bucket.slots[0].parameter.grad
    assert gradient.layout is torch.sparse_coo
    assert gradient.to_dense()[:, 0].tolist() == [0.0, 0.5, 0.0, 0.5]


def test_joined_rank_adds_nothing_and_says_so():
    bucket = bucket_of(torch.randn(3))
    bucket.slots[0].parameter.grad = torch.ones(3)
    bucket.join()
    assert bucket.gradients.abs().sum() == 0
    assert bucket.flags.tolist() == [0.0]
    assert bucket.absent.tolist() == [1.0]


def test_changed_dtype_is_named():
    bucket = bucket_of(torch.randn(3))
    parameter = bucket.slots[0].parameter
    parameter.data = parameter.data.double()
    parameter.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'p0'.*float32.*float64"):
        bucket.gather(1.0)
