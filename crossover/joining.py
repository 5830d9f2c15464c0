"""Uneven inputs: ranks that run out of data stand in until the last one has finished."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from crossover import runtime
from crossover.attachment import Attachment
from crossover.collectives.model_state import broadcast_tensors
from crossover.collectives.optimizer_state import share_optimizer_state
from crossover.engine import Engine


class OptimizerJoinHook(JoinHook):
    """What a rank without data does for one optimizer within ``torch.distributed.algorithms.Join``."""

    def __init__(self, attachment: Attachment) -> None:
        if attachment.engine is not None and not dist.is_initialized():
            raise ValueError(
                f"Join: needs a torch.distributed process group, and this job runs on "
                f"{attachment.engine.communicator.backend}; call crossover.join() after the loop instead"
            )
        self._attachment = attachment

    def main_hook(self) -> None:
        """Stand in for one shared pass."""
        if self._attachment.engine is not None:
            self._attachment.engine.stand_in()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the state of a rank that trained to the end."""
        if self._attachment.engine is not None:
            self._attachment.engine.exchange.flush(stand_in=not is_last_joiner)
            _take_state_of_last(self._attachment, int(is_last_joiner))
            self._attachment.engine.exchange.stepped = False


def join(device: int = -1) -> int:
    """Stand in for all optimizers until every rank has called ``join()``. Collective in that sense.

    Gradients are then averages over the ranks that still have data. Afterwards every rank holds the parameters and
    the optimizer state of the last rank to join. Several optimizers are served in the order in which they were
    wrapped, so each step has to share each of them once, in that order; those that this rank has not used since the
    last ``join()`` are left out if it used others. Other collectives of ranks that go on are not stood in for.

    Args:
        device: accepted for Horovod scripts; not needed.

    Returns:
        The last rank to join; of several, the highest.

    Example:
        >>> import crossover as xo
        >>> xo.init()
        >>> xo.join()
        0
    """
    communicator = runtime.context().communicator
    everyone = Attachment.in_use()
    attachments = [a for a in everyone if _engine(a).shares > _engine(a).shares_at_join] or list(everyone)
    rounds = 0
    while attachments:
        absent = [_engine(attachment).stand_in() for attachment in attachments]
        if all(count == _engine(a).communicator.size for a, count in zip(attachments, absent, strict=True)):
            break
        rounds += 1
    # The fewer rounds a rank stood in, the later it joined.
    waited = communicator.all_gather_object(rounds, name="join.rounds")
    last = max(rank for rank, count in enumerate(waited) if count == min(waited))
    for attachment in attachments:
        _engine(attachment).exchange.flush(stand_in=rounds > min(waited))
        if len(set(waited)) > 1:
            _take_state_of_last(attachment, -rounds)
    for attachment in everyone:
        _engine(attachment).shares_at_join = _engine(attachment).shares
    return communicator.ranks[last]


def _engine(attachment: Attachment) -> Engine:
    assert attachment.engine is not None
    return attachment.engine


def _take_state_of_last(attachment: Attachment, claim: int) -> None:
    """Copy parameters and optimizer state from the rank with the highest ``claim``, of several the last. Collective."""
    communicator = _engine(attachment).communicator
    name = f"join.optimizer{attachment.number}"
    claims = communicator.all_gather_object(claim, name=f"{name}.last")
    root = max(rank for rank, other in enumerate(claims) if other == max(claims))
    groups = attachment.optimizer.param_groups
    tensors = [parameter.data for group in groups for parameter in group["params"]]
    broadcast_tensors(communicator, tensors, root, f"{name}.parameters")
    share_optimizer_state(communicator, attachment.optimizer, root, f"{name}.state")
