"""The generated shapes have the sizes that were published."""

from __future__ import annotations

import pytest

from crossover.simulate import from_shape, model, model_names, processor

PARAMETERS = {  # as torchvision and transformers count them
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
}
GIGA_MACS = {"resnet50": 4.09, "resnet101": 7.80, "vgg16": 15.47, "vgg19": 19.63}  # torchvision's documentation


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_parameters(name: str, parameters: int) -> None:
    assert model(name).parameters == parameters


def test_every_model_is_checked() -> None:
    assert set(model_names()) == set(PARAMETERS)


@pytest.mark.parametrize(("name", "giga"), GIGA_MACS.items())
def test_arithmetic_of_an_image(name: str, giga: float) -> None:
    assert model(name).flops / 2e9 == pytest.approx(giga, abs=0.02)


def test_arithmetic_of_a_token_is_about_two_operations_a_parameter_and_attention() -> None:
    shape = model("gpt2")
    attention = 12 * 4 * 1024 * 768  # scores and values of each layer, each with 2 operations a product
    matrices = 2 * (shape.parameters - 1024 * 768)
    assert shape.flops / 1024 == pytest.approx(matrices + attention, rel=0.01)


def test_resnet50_computes_as_fast_as_published() -> None:
    job = from_shape(model("resnet50"), processor("a100"), batch=256)
    assert 256 / job.compute_s == pytest.approx(938, rel=0.02)


@pytest.mark.parametrize("name", ["lenet", ""])
def test_unknown_model_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match="resnet50, resnet101"):
        model(name)


def test_batch_has_to_be_positive() -> None:
    with pytest.raises(ValueError, match="batch: is 0"):
        from_shape(model("resnet50"), processor("a100"), batch=0)
