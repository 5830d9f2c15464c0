"""How fast a rank computes: rates that trainings were published with, not peaks."""

from __future__ import annotations

from dataclasses import dataclass

from crossover.simulate.assumptions import Assumption

UPDATE_BYTES = 20
"""Of memory traffic for each parameter of an update of SGD with momentum: three values are read, two are written."""

_EXAMPLES = "NVIDIA DeepLearningExamples, published training throughput"
_RESNET50_TRAINING = 3 * 2 * 4.089e9  # FLOP an image: forward, and twice that backward
_BERT_LARGE_TRAINING = 3 * 2 * 39.46e9  # FLOP a sequence of 128 tokens


@dataclass(frozen=True, slots=True)
class Processor:
    """One rank's device.

    Attributes:
        name: as in :func:`processor`.
        rates: by kind of model, the arithmetic that a training really got a second.
        memory_bytes_s: bandwidth of its memory.
        sources: by kind of model, where the rate comes from.
    """

    name: str
    rates: dict[str, float]
    memory_bytes_s: float
    sources: dict[str, str]

    def assumptions(self, kind: str) -> list[Assumption]:
        """Those that a model of this kind rests on."""
        rate = Assumption(f"{self.name}, {kind} models", f"{self.rates[kind] / 1e12:.1f} TFLOP/s", self.sources[kind])
        memory = f"{self.memory_bytes_s / 1e12:.1f} TB/s"
        return [
            rate,
            Assumption(f"{self.name}, memory", memory, "NVIDIA's data sheet"),
            Assumption("update", f"{UPDATE_BYTES} bytes of memory traffic a parameter", "SGD with momentum; our count"),
        ]


def _processor(name: str, images_s: float, sequences_s: float, memory: float, what: str) -> Processor:
    """Rates from the published images a second of ResNet-50 and sequences a second of BERT-large (128 tokens)."""
    rates = {"convolution": images_s * _RESNET50_TRAINING, "transformer": sequences_s * _BERT_LARGE_TRAINING}
    sources = {
        "convolution": f"{_EXAMPLES}: ResNet-50 v1.5, {what}, 1 GPU, {images_s:g} images/s",
        "transformer": f"{_EXAMPLES}: BERT-large, {what}, 1 GPU, {sequences_s:g} sequences/s of 128 tokens",
    }
    return Processor(name, rates, memory, sources)


_PROCESSORS = {
    made.name: made
    for made in (
        _processor("a100", 938, 317, 2.0e12, "A100 80 GB, TF32"),
        _processor("a100-amp", 2470, 580, 2.0e12, "A100 80 GB, mixed precision"),
    )
}


def processor_names() -> tuple[str, ...]:
    """What :func:`processor` knows."""
    return tuple(_PROCESSORS)


def processor(name: str) -> Processor:
    """A processor by name.

    Raises:
        ValueError: none of that name.
    """
    if name not in _PROCESSORS:
        raise ValueError(f"processor: is {name!r}; give one of {', '.join(_PROCESSORS)}")
    return _PROCESSORS[name]
