"""The communicator of a process that is alone: every collective is a copy or nothing at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crossover.comm.communicator import Communicator, ReduceOp, Work


class CompletedWork(Work):
    """A collective that was done as soon as it was started."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Always true."""
        return True


class Solo(Communicator):
    """One process by itself. No thread, no process group, no time-out that could pass.

    Example:
        >>> import torch
        >>> from crossover.comm import Solo
        >>> values = torch.arange(3.0)
        >>> Solo().all_reduce(values, name="values").wait()
        >>> values.tolist()
        [0.0, 1.0, 2.0]
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.rank = 0
        self.size = 1
        self.ranks = (0,)
        self.backend = "solo"
        self.timeout = timeout

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Nothing is unsupported: nothing is sent."""
        return None

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """Leave ``tensor`` as it is."""
        return CompletedWork(name)

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        """Leave ``tensor`` as it is.

        Raises:
            ValueError: ``root`` is not 0.
        """
        if root != 0:
            raise ValueError(f"root: is {root}; this process is alone, so pass 0")
        return CompletedWork(name)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Copy ``tensor`` to ``output[0]``."""
        output[0].copy_(tensor)
        return CompletedWork(name)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """Copy ``tensor[0]`` to ``output``."""
        output.copy_(tensor[0])
        return CompletedWork(name)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        """Copy ``tensor`` to ``output``."""
        output.copy_(tensor)
        return CompletedWork(name)

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        """Another ``Solo``; ``None`` for no ranks.

        Raises:
            ValueError: a rank other than 0.
        """
        if any(rank != 0 for rank in ranks):
            raise ValueError(f"ranks: is {list(ranks)}; this process is alone, so pass [0]")
        return Solo(self.timeout) if len(ranks) else None

    def close(self) -> None:
        """Nothing to release."""

    def barrier(self, *, name: str = "barrier") -> None:
        """Return at once."""
