"""When gradients travel and when they are applied: the interface between the optimizer and a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from crossover.buckets import Bucket
    from crossover.reduction import Reduction


class Schedule(ABC):
    """Decides when each bucket of gradients is sent and when its average lands in ``p.grad``.

    The optimizer calls the methods below in the same order on every rank: ``layout`` whenever the buckets were
    (re)built, then for each shared backward pass ``ready`` once per bucket in launch order, ``finish`` when backward
    ends, ``revise``, and ``stepped`` after the user's optimizer has stepped. A schedule must start the same
    collectives in the same order on every rank: it may not look at the clock, at queue lengths or at local values.

    One schedule object serves one optimizer.
    """

    reduction: Reduction
    buckets: Sequence[Bucket] = ()
    bucket_cap_bytes: int | None = None  # a schedule that works on smaller units than the user's bucket size says so

    def attach(self, reduction: Reduction, optimizer: torch.optim.Optimizer) -> None:
        """Take the means to average a bucket, and the optimizer, which is to be held weakly.

        Raises:
            ValueError: this object drives another optimizer, or cannot drive this one.
        """
        if hasattr(self, "reduction"):
            raise ValueError(
                f"schedule: this {type(self).__name__} already drives another optimizer; "
                f"give each DistributedOptimizer a {type(self).__name__}() of its own"
            )
        self.reduction = reduction

    def detach(self) -> None:
        """Let go of the optimizer and of what is in flight, without waiting for it; :meth:`attach` may follow."""
        del self.reduction
        self.buckets = ()

    def layout(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets, in launch order.

        Called again in the middle of a pass when buckets were added behind those that there were, which have been
        through :meth:`ready` and :meth:`finish` then and may be in flight; the new ones follow.
        """
        self.buckets = buckets

    def expect_layout(self) -> None:
        """Buckets are about to be made for the first time: the last moment to say of what size. Collective."""

    def revise(self) -> bool:
        """A shared pass has ended. Whether all buckets are to be made anew, so that :meth:`layout` follows at once.

        Only where nothing is in flight. What is due in ``p.grad`` stays due. Collective.
        """
        return False

    def prepare(self, bucket: Bucket) -> None:
        """The buffer of ``bucket`` is about to be written to: nothing of it may be in flight any more."""

    @abstractmethod
    def ready(self, bucket: Bucket) -> None:
        """This rank's gradients of ``bucket`` are in its buffer. Called inside backward, in launch order."""

    @abstractmethod
    def finish(self) -> None:
        """Backward ended: leave in every ``p.grad`` what ``step()`` is to apply, or ``None`` where nothing is due."""

    def before_step(self) -> None:
        """The user's optimizer is about to step, or its gradients are about to be cleared."""

    def before_update(self) -> None:
        """The user's optimizer steps now: called after :meth:`before_step`, once for each :meth:`stepped`."""

    def stepped(self) -> None:
        """The user's optimizer has stepped with what :meth:`finish` left."""

    def flush(self) -> None:
        """Apply or drop by rule all that is in flight. Collective; equal parameters on all ranks afterwards."""

    def settle(self) -> None:
        """Wait for what this rank has in flight; start and apply nothing."""

    def stood_in(self) -> int:
        """How many ranks only stood in when gradients were last brought together; known after :meth:`settle`."""
        return int(self.buckets[-1].absent.item())

    def describe(self) -> tuple[str, dict[str, Any]]:
        """For the step's record: why it shared or applied what it did, in a few words, and further values by name."""
        return f"{type(self).__name__}: every step is shared", {}

    def state_dict(self) -> dict[str, Any]:
        """What a bit-equal continuation needs. Never communicates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
