"""GPT-2 and BERT, from their papers' and released configurations."""

from __future__ import annotations

from collections.abc import Iterator

from crossover.simulate.layers import Layer, ModelShape


def _norm(width: int) -> int:
    return 2 * width


def _block(name: str, width: int, length: int) -> Iterator[Layer]:
    """Self-attention and a feed-forward part of four times the width, each with its normalisation."""
    scores = 2 * 2.0 * length * length * width
    yield Layer(f"{name}.qkv", 3 * width * width + 3 * width + _norm(width), 2.0 * 3 * width * width * length)
    yield Layer(f"{name}.projection", width * width + width, 2.0 * width * width * length + scores)
    yield Layer(f"{name}.feed", 4 * width * width + 4 * width + _norm(width), 2.0 * 4 * width * width * length)
    yield Layer(f"{name}.out", 4 * width * width + width, 2.0 * 4 * width * width * length)


def gpt2(
    name: str = "gpt2", layers: int = 12, width: int = 768, vocabulary: int = 50257, context: int = 1024, batch: int = 8
) -> ModelShape:
    """GPT-2; the outputs share the word embedding's weights, whose gradient is therefore the last to be ready.

    Example:
        >>> gpt2().parameters
        124439808
    """
    made = [Layer("embeddings", vocabulary * width + context * width, 0.0)]
    for number in range(layers):
        made += _block(f"h.{number}", width, context)
    made.append(Layer("logits", _norm(width), 2.0 * vocabulary * width * context))
    source = "Radford et al., Language Models are Unsupervised Multitask Learners (2019), table 2"
    return ModelShape(name, tuple(made), "transformer", batch, f"sequence of {context} tokens", source)


def bert(
    name: str = "bert-base",
    layers: int = 12,
    width: int = 768,
    vocabulary: int = 30522,
    positions: int = 512,
    length: int = 128,
    batch: int = 32,
) -> ModelShape:
    """BERT with its pooler, without the heads of pre-training; ``length`` tokens a sequence.

    Example:
        >>> bert().parameters, bert("bert-large", 24, 1024).parameters
        (109482240, 335141888)
    """
    made = [Layer("embeddings", (vocabulary + positions + 2) * width + _norm(width), 0.0)]
    for number in range(layers):
        made += _block(f"layer.{number}", width, length)
    made.append(Layer("pooler", width * width + width, 2.0 * width * width))
    source = "Devlin et al., BERT (NAACL 2019), section 3; vocabulary of the released uncased models"
    return ModelShape(name, tuple(made), "transformer", batch, f"sequence of {length} tokens", source)
