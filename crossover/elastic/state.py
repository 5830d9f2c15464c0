"""What has to survive when ranks come and go: plain values."""

from __future__ import annotations

import copy
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any

from crossover import runtime
from crossover.collectives.objects import allgather_object, broadcast_object

REMOVED_ONLY = 1  # Horovod's flag for "hosts were removed, none was added"


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Hosts have joined or are about to leave, and training has to meet anew. :func:`crossover.elastic.run` handles it.

    Attributes:
        skip_sync: hosts were only removed, so all that are left hold the same state already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class State:
    """Base of states: commits, and news about hosts.

    Args:
        bcast_object: sends an object of rank 0 to all; ``None`` for this library's.
        get_rank: tells this process's rank; ``None`` for this library's.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or broadcast_object
        self._rank = get_rank or runtime.rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._committed: Callable[[State], None] | None = None

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Call these after ranks have come or gone, before training goes on: to adapt a learning rate, for instance."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Ranks have come or gone and communication works again."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Horovod's launcher has found other hosts than before. Called by a thread of Horovod's."""
        self._host_messages.put((timestamp, int(update_res)))

    def commit(self) -> None:
        """Keep this state to come back to, and look for news about hosts. All ranks, at the same place.

        Copies everything to host memory: worth doing every so many batches rather than at each.

        Raises:
            HostsUpdatedInterrupt: hosts have changed; raised on every rank.
        """
        self.save()
        if self._committed is not None:
            self._committed(self)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Look for news about hosts, without keeping a state. All ranks, at the same place.

        Raises:
            HostsUpdatedInterrupt: hosts have changed; raised on every rank.
        """
        if not horovod_is_elastic():
            return
        known = self._last_updated_timestamp
        latest, flags = known, 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            latest = max(latest, timestamp)
            flags |= update
        everyone = allgather_object((known, latest, flags), name="elastic.hosts")
        # from what all ranks know: a rank that has just joined has not seen the news that brought it here
        self._last_updated_timestamp = max(newest for _, newest, _ in everyone)
        if self._last_updated_timestamp > max(before for before, _, _ in everyone):
            combined = 0
            for _, _, rank_flags in everyone:
                combined |= rank_flags
            raise HostsUpdatedInterrupt(skip_sync=combined == REMOVED_ONLY)

    def save(self) -> None:
        """Copy the state to host memory."""
        raise NotImplementedError(f"{type(self).__name__} has to define save()")

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError(f"{type(self).__name__} has to define restore()")

    def sync(self) -> None:
        """Take rank 0's state, on every rank, and save it. Collective."""
        raise NotImplementedError(f"{type(self).__name__} has to define sync()")

    def reset(self) -> None:
        """Adapt to the ranks that there are now, before :meth:`sync`."""


class ObjectState(State):
    """Plain values, each an attribute of this object.

    Args:
        bcast_object: sends an object of rank 0 to all; ``None`` for this library's.
        get_rank: tells this process's rank; ``None`` for this library's.
        kwargs: names and first values; picklable.

    Example:
        >>> import crossover as xo
        >>> state = xo.elastic.ObjectState(epoch=0)
        >>> state.epoch = 5
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = tuple(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Keep copies of the values."""
        self._saved_state = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Set every value to what was saved last."""
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Take rank 0's values, and save them."""
        if self._names:
            self._set(self._bcast_object(self._values()))
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """What was saved last; picklable."""
        return {"values": copy.deepcopy(self._saved_state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._saved_state = state_dict["values"]
        self.restore()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def horovod_is_elastic() -> bool:
    """Whether this process was started by ``horovodrun`` with host discovery."""
    return os.environ.get("HOROVOD_ELASTIC") == "1" and runtime.context().launcher == "horovod"
