"""A model as the simulator sees it: layers in forward order, each with its parameters and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from crossover.simulate.assumptions import Assumption

BACKWARD_FACTOR = 2.0
"""Backward over forward: one product for the inputs' gradients and one for the weights', where forward has one."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What has its gradients ready at one moment.

    Attributes:
        name: of the layer.
        parameters: how many.
        flops: of one example's forward pass; a multiplication with its addition counts as 2.
    """

    name: str
    parameters: int
    flops: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A published architecture.

    Attributes:
        name: as in :func:`crossover.simulate.models.model`.
        layers: in forward order.
        kind: ``"convolution"`` or ``"transformer"``: which of a processor's rates holds for it.
        batch: examples a rank and step, if nothing else is said.
        example: what one example is.
        source: of the definition.
    """

    name: str
    layers: tuple[Layer, ...]
    kind: str
    batch: int
    example: str
    source: str

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Of one example's forward pass."""
        return sum(layer.flops for layer in self.layers)

    def assumptions(self) -> list[Assumption]:
        """Sizes and their source."""
        size = (
            f"{self.parameters / 1e6:.1f} million parameters, {self.flops / 1e9:.1f} GFLOP forward per {self.example}"
        )
        return [
            Assumption(self.name, size, self.source),
            Assumption("backward", f"{BACKWARD_FACTOR:g} times forward", "two matrix products for one; our choice"),
        ]
