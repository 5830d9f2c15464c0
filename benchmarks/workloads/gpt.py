"""A small GPT on real English: the reference texts on the Python language that every Python installation carries."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .workload import Workload

VOCABULARY = 3584
UNKNOWN = 0
IGNORED = -100
CONTEXT = 32
TEST_SHARE = 0.1
_PIECE = re.compile(r"\w+|[^\w\s]|\n")


@functools.lru_cache(maxsize=1)
def tokens() -> Tensor:
    """The texts as numbers below ``VOCABULARY``, by falling frequency of words and punctuation; 0 is any rare word."""
    from pydoc_data.topics import topics

    pieces = _PIECE.findall("\n".join(topics[name].lower() for name in sorted(topics)))
    ranking = sorted(collections.Counter(pieces).items(), key=lambda item: (-item[1], item[0]))
    numbers = {piece: number for number, (piece, _) in enumerate(ranking[: VOCABULARY - 1], start=1)}
    return torch.tensor([numbers.get(piece, UNKNOWN) for piece in pieces], dtype=torch.int64)


@functools.lru_cache(maxsize=1)
def windows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and next words, test inputs and next words, each ``(windows, CONTEXT)``.

    Every tenth stretch of 16 windows is for testing. Rare words are never a target.
    """
    text = tokens()
    count = (len(text) - 1) // CONTEXT
    inputs = text[: count * CONTEXT].view(count, CONTEXT)
    targets = text[1 : count * CONTEXT + 1].view(count, CONTEXT).clone()
    targets[targets == UNKNOWN] = IGNORED
    testing = (torch.arange(count) // 16) % round(1 / TEST_SHARE) == 0
    return inputs[~testing], targets[~testing], inputs[testing], targets[testing]


class _Layer(nn.Module):
    """Causal self-attention and a feed-forward part, normalised in front."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        batch, length, width = inputs.shape
        qkv = self.attend(self.norm_attention(inputs)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed(self.norm_feed(inputs))
        return inputs + fed


class _Decoder(nn.Module):
    """Word and position embedding, layers, and outputs that share the word embedding's weights."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.05)
        nn.init.normal_(self.positions.weight, std=0.05)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.words(inputs) + self.positions(torch.arange(inputs.shape[1]))
        return nn.functional.linear(self.norm(self.layers(hidden)), self.words.weight)


class GPT(Workload):
    """Next-word prediction; the word embedding holds most of the gradients and is ready last in a backward pass.

    Word accuracy: always guessing the commonest word hits about a tenth of the test set.
    """

    name = "gpt"
    default_batch_size = 16
    learning_rate = 2e-3
    steps = 400
    target_accuracy = 0.35

    def build(self) -> nn.Module:
        return _Decoder(width=128, layers=2, heads=4)

    def training_set(self) -> tuple[Tensor, Tensor]:
        return windows()[:2]

    def test_set(self) -> tuple[Tensor, Tensor]:
        return windows()[2:]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)

    def optimizer(self, parameters: Iterable[nn.Parameter], scale: float = 1.0) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.learning_rate * scale)
