"""The buckets of one optimizer, and the order in which they are sent: the same on every rank, whatever hooks do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from crossover.adoption import agree_on_newcomers
from crossover.buckets import Bucket
from crossover.layout import BucketOptions, arrange
from crossover.parameters import NamedParameter
from crossover.reduction import Reduction
from crossover.schedulers.schedule import Schedule
from crossover.sparse import is_sparse, reduce_sparse
from crossover.telemetry.records import Scalar


class Exchange:
    """Hands buckets to a schedule in launch order, and gives buckets to parameters that have none. Knows no autograd.

    Across ranks: all have the same buckets, and send the same of them in the same order in each shared pass.

    Attributes:
        reduction: how gradients are combined.
        schedule: when they travel.
        buckets: in launch order.
        sparse: parameters whose gradients travel as sparse ones, after the buckets.
        parameters: all that take part, by id, with a bucket or without.
        sent: buckets that were handed to the schedule in this pass.
        stepped: whether the optimizer has stepped since the last shared pass.
        joined: whether this rank only stands in, without gradients.
    """

    shares_all = True
    """Whether every step is shared, so that a gradient that is no average is an oversight."""

    def __init__(self, reduction: Reduction, schedule: Schedule, options: BucketOptions) -> None:
        self.reduction = reduction
        self.schedule = schedule
        self.buckets: list[Bucket] = []
        self.sparse: list[NamedParameter] = []
        self.parameters: dict[int, NamedParameter] = {}
        self.sent = 0
        self.stepped = False
        self.joined = False
        self._options = options
        self._sparse_sent = 0
        self._placed: set[int] = set()
        # Parameters on several devices have several autograd threads, and launch order is one for all of them.
        self._sending = threading.RLock()

    # -- parameters --------------------------------------------------------------------------------------------------

    @property
    def grown(self) -> bool:
        """Whether parameters of this rank have no bucket yet."""
        return len(self.parameters) > len(self._placed)

    def add(self, parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
        """Let parameters take part; returns those that did not before."""
        fresh = [parameter for parameter in parameters if id(parameter.tensor) not in self.parameters]
        self.parameters.update((id(parameter.tensor), parameter) for parameter in fresh)
        return fresh

    def newcomers(self) -> list[NamedParameter]:
        """Parameters that have no bucket yet."""
        return [parameter for key, parameter in self.parameters.items() if key not in self._placed]

    def observer(self, parameter: Tensor) -> Callable[[Tensor], None] | None:
        """What is to be called with ``parameter`` when its gradient arrives in a pass that is shared, if anything."""
        return None

    def adopt(self, newcomers: Sequence[NamedParameter], arrivals: Iterable[int]) -> None:
        """Agree with all ranks on ``newcomers``, and make buckets for them behind those there are. Collective."""
        self.reduction.others_grew = False
        name = f"{self.reduction.name}.adopt"
        self._place(newcomers, agree_on_newcomers(self.reduction.communicator, newcomers, arrivals, name=name))

    def _place(self, newcomers: Sequence[NamedParameter], facts: Sequence[dict[str, Any]]) -> None:
        """Make buckets for parameters that all ranks agree on."""
        if not self.buckets:
            self.schedule.expect_layout()
        sparse, members = arrange(newcomers, facts, self._options, self.schedule.bucket_cap_bytes)
        self.sparse += sparse
        self.sent = len(self.buckets)
        self.buckets += [Bucket(self.sent + number, named) for number, named in enumerate(members)]
        self._placed.update(self.parameters)
        self.schedule.layout(self.buckets)

    def _lay_out_again(self) -> None:
        """Make the buckets anew, of the size that the schedule wants now: the same on every rank, without asking."""
        parameters = [self.parameters[id(slot.parameter)] for bucket in self.buckets for slot in bucket.slots]
        facts = [{"order": range(len(parameters)), "sparse": ()}]
        _, members = arrange(parameters, facts, self._options, self.schedule.bucket_cap_bytes)
        self.buckets = [Bucket(number, named) for number, named in enumerate(members)]
        for bucket in self.buckets:
            bucket.move_in()
        self.schedule.layout(self.buckets)

    def unseen_gradients(self) -> list[str]:
        """Names of parameters with a gradient that is no average."""
        averages = self._averages()
        return [
            parameter.name
            for key, parameter in self.parameters.items()
            if (gradient := parameter.tensor.grad) is not None
            and not (key in averages and (is_sparse(gradient) or gradient.data_ptr() == averages[key]))
        ]

    def _averages(self) -> dict[int, int]:
        """Where the gradient of each parameter that has a place lies once it is an average; 0 for sparse ones."""
        averages = {id(slot.parameter): slot.pointer for bucket in self.buckets for slot in bucket.slots}
        averages.update((id(parameter.tensor), 0) for parameter in self.sparse)
        return averages

    # -- a shared pass -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.sent = 0
        self._sparse_sent = 0
        for bucket in self.buckets:
            bucket.reset()

    def share(self, arrivals: Iterable[int]) -> bool:
        """A backward pass ended whose gradients are shared. Collective.

        Args:
            arrivals: ids of parameters in the order in which their gradients arrived.

        Returns:
            Whether there are new buckets.
        """
        if self.buckets or self.sparse:
            self.finish()
        grew = self.grown or self.reduction.others_grew
        if grew:
            self.adopt(self.newcomers(), arrivals)
            self.finish()
        if self.schedule.revise():
            self._lay_out_again()
            return True
        return grew

    def last_arrival(self) -> Tensor | None:
        """The parameter whose place in launch order is the last of those that have arrived in this pass."""
        for bucket in reversed(self.buckets):
            if (place := bucket.arrived.rfind(1)) >= 0:
                return bucket.slots[place].parameter
        return None

    def send_full(self) -> None:
        """Send the buckets whose turn it is and whose gradients have all arrived."""
        with self._sending:
            while self.sent < len(self.buckets) and not self.buckets[self.sent].pending:
                self._send(self.buckets[self.sent])

    def finish(self) -> None:
        """Send what has not been sent, in launch order, and leave in ``p.grad`` what is due. Collective."""
        with self._sending:
            for bucket in self.buckets[self.sent :]:
                self._send(bucket)
        for parameter in self.sparse[self._sparse_sent :]:
            reduce_sparse(
                self.reduction.communicator,
                parameter.tensor,
                self.reduction.scaling,
                joined=self.joined,
                name=f"{self.reduction.name}.sparse.{parameter.name}",
            )
        self._sparse_sent = len(self.sparse)
        self.schedule.finish()

    def before_step(self) -> None:
        """The user's optimizer is about to step, or its gradients are about to be cleared."""
        self.schedule.before_step()

    def after_step(self) -> None:
        """The user's optimizer has stepped."""
        self.stepped = True
        self.schedule.stepped()

    def after_idle_step(self) -> None:
        """The user's optimizer has stepped, and no gradient had arrived since the step before."""

    def after_stand_in(self) -> None:
        """The optimizers of ranks that have data may have stepped."""
        self.schedule.settle()

    @property
    def absent(self) -> int:
        """How many ranks stood in when gradients were last shared."""
        return self.schedule.stood_in() if self.buckets else self.reduction.communicator.size

    def flush(self, *, stand_in: bool = False) -> None:
        """Bring all that is in flight to its end. Collective.

        Args:
            stand_in: other ranks have trained longer than this one, and count.
        """
        self.schedule.flush()

    def close(self) -> None:
        """Let go of the communicator. Not a collective."""
        self.reduction.communicator.close()

    def flush_at_shutdown(self) -> None:
        """:meth:`flush` where something is in flight or ranks differ: a rank that leaves early finds nobody else."""
        self.flush()

    @property
    def apart(self) -> bool:
        """Whether ranks may hold different parameters after a step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a continuation needs; empty where that is nothing. Never communicates."""
        schedule = self.schedule.state_dict()
        return {"schedule": schedule} if schedule else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        if "schedule" in state:
            self.schedule.load_state_dict(state["schedule"])

    def facts(self) -> tuple[bool, str, dict[str, Scalar]]:
        """Of the step that was just taken: whether anything was shared, why, and what else there is to record."""
        return True, *self.schedule.describe()

    def _send(self, bucket: Bucket) -> None:
        if not bucket.taken:
            self.schedule.prepare(bucket)
        bucket.announces = self.grown
        bucket.stepped = None if self.joined else self.stepped
        if self.joined:
            bucket.join()
        else:
            bucket.gather(self.reduction.scaling.before)
        self.sent += 1
        self.schedule.ready(bucket)
