"""A schedule that hands every call on to another one, which may change from pass to pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from crossover.buckets import Bucket
from crossover.schedulers.schedule import Schedule


class Delegating(Schedule):
    """Does what the schedule at work does. What is attached, and when it changes, is for subclasses to say."""

    @property
    @abstractmethod
    def active(self) -> Schedule:
        """The schedule at work."""

    def layout(self, buckets: Sequence[Bucket]) -> None:
        """See :meth:`Schedule.layout`."""
        super().layout(buckets)
        self.active.layout(buckets)

    def prepare(self, bucket: Bucket) -> None:
        """See :meth:`Schedule.prepare`."""
        self.active.prepare(bucket)

    def ready(self, bucket: Bucket) -> None:
        """See :meth:`Schedule.ready`."""
        self.active.ready(bucket)

    def finish(self) -> None:
        """See :meth:`Schedule.finish`."""
        self.active.finish()

    def before_step(self) -> None:
        """See :meth:`Schedule.before_step`."""
        self.active.before_step()

    def before_update(self) -> None:
        """See :meth:`Schedule.before_update`."""
        self.active.before_update()

    def stepped(self) -> None:
        """See :meth:`Schedule.stepped`."""
        self.active.stepped()

    def flush(self) -> None:
        """See :meth:`Schedule.flush`."""
        self.active.flush()

    def settle(self) -> None:
        """See :meth:`Schedule.settle`."""
        self.active.settle()

    def stood_in(self) -> int:
        """See :meth:`Schedule.stood_in`."""
        return self.active.stood_in()
