"""Names of parameters, and the number by which equal weights are recognised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossover.parameters import ParameterBook, checksum, name_parameters


def parameters(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_names_are_taken_from_pairs():
    first, second, _ = three = parameters()
    named = name_parameters([second, first], [("a", first), ("b", second), ("c", three[2])])
    assert [parameter.name for parameter in named] == ["b", "a"]


def test_names_are_made_from_positions_without_pairs():
    assert [p.name for p in name_parameters(parameters(2), None)] == ["parameter 0", "parameter 1"]


def test_first_name_of_a_tied_parameter_counts():
    [tied] = parameters(1)
    assert name_parameters([tied], [("embedding", tied), ("output", tied)])[0].name == "embedding"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ([], "generator can be walked only once"),
        ([("a", nn.Parameter(torch.zeros(1)))], "have no name"),
        (["a"], "has to be a pair"),
        ([("a", 3)], "is a int"),
        ([("a", nn.Parameter(torch.zeros(1))), ("a", nn.Parameter(torch.zeros(1)))], "names two parameters"),
    ],
)
def test_unusable_names_are_refused(named, words):
    with pytest.raises(ValueError, match=words):
        name_parameters(parameters(1), named)


def test_book_notices_what_came_and_what_was_unfrozen():
    first, second, third = parameters()
    second.requires_grad_(False)
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    book = ParameterBook(optimizer, None)
    assert book.changed()
    assert [p.tensor for p in book.trainable()] == [first]
    assert not book.changed()
    second.requires_grad_(True)
    assert book.changed()
    assert len(book.trainable()) == 2
    optimizer.add_param_group({"params": [third]})
    assert book.changed()


def test_book_does_not_keep_the_optimizer_alive():
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    book = ParameterBook(optimizer, None)
    del optimizer
    assert book.trainable() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_checksum_tells_tensors_apart(dtype, shape):
    torch.manual_seed(0)
    tensor = (torch.randn(shape) > 0).to(dtype) if dtype is torch.bool else torch.randn(shape).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    if tensor.numel():
        other = tensor.clone()
        other.view(-1)[0] = ~other.view(-1)[0] if dtype is torch.bool else other.view(-1)[0] * 2 + 1
        assert checksum(other) != checksum(tensor)
    if tensor.numel() > 4 and dtype is not torch.bool:
        assert checksum(tensor.flatten().flip(0)) != checksum(tensor.flatten())


def test_checksum_ignores_layout():
    tensor = torch.randn(4, 3, 2, 2)
    assert checksum(tensor.to(memory_format=torch.channels_last)) == checksum(tensor)
