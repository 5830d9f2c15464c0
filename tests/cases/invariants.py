"""What has to hold after every situation, whatever was tried in it.

    invariants.start()                                        # in place of xo.init()
    job = invariants.Job(model, sgd(model), schedule="priority")
    ...                                                       # train with job.optimizer
    job.check(steps=8)

``check`` is a collective: it flushes, and then requires that all ranks hold the same parameters, that all started the
same collectives in the same order, that none is left open, that the optimizer stepped as often as was asked, and that
its state goes into the bare optimizer and back.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from crossover import runtime
from crossover.attachment import Attachment
from crossover.comm.communicator import Communicator, ReduceOp, Work
from crossover.schedulers import Overlapped, Priority
from tests.training import batch

# The parameters of tests.training.make_model fall into five buckets of this size.
SMALL_BUCKETS = {"bucket_cap_mb": 1e-3, "first_bucket_cap_mb": 1e-4}


@dataclass(frozen=True)
class Collective:
    """One collective as this rank started it."""

    channel: str
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Log:
    """Every collective since :func:`start`, and those that have not been waited for."""

    collectives: list[Collective] = field(default_factory=list)
    open: dict[int, str] = field(default_factory=dict)

    def since(self, mark: int, optimizer: Any = None) -> list[Collective]:
        """Those started after the first ``mark``, of one optimizer only if one is given."""
        prefix = "" if optimizer is None else prefix_of(optimizer)
        return [entry for entry in self.collectives[mark:] if entry.name.startswith(prefix)]

    def open_of(self, optimizer: Any) -> list[str]:
        """Names of one optimizer's collectives that have not been waited for."""
        return sorted(name for name in self.open.values() if name.startswith(prefix_of(optimizer)))

    @property
    def mark(self) -> int:
        """The number of collectives started so far."""
        return len(self.collectives)


class RecordedWork(Work):
    """A collective that is open until it has been waited for."""

    def __init__(self, inner: Work, log: Log) -> None:
        self.name = inner.name
        self._inner = inner
        self._log = log
        log.open[id(self)] = self.name

    def wait(self) -> None:
        self._inner.wait()
        self._log.open.pop(id(self), None)

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def when_completed(self, callback: Callable[[int], None]) -> None:
        self._inner.when_completed(callback)


class Recorder(Communicator):
    """Another communicator, whose collectives are noted in ``log``; so are those of the groups made from it."""

    def __init__(self, inner: Communicator, log: Log, channel: str = "job") -> None:
        self.inner = inner
        self.log = log
        self.channel = channel
        self.rank, self.size, self.ranks = inner.rank, inner.size, inner.ranks
        self.backend, self.timeout = inner.backend, inner.timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    @property
    def control_device(self) -> torch.device:
        return self.inner.control_device

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        return self.inner.unsupported_reason(dtype, device)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        return self._noted(f"all_reduce {op.value}", name, tensor, self.inner.all_reduce(tensor, op, name=name))

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        return self._noted(f"broadcast from {root}", name, tensor, self.inner.broadcast(tensor, root, name=name))

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        return self._noted("all_gather", name, tensor, self.inner.all_gather(output, tensor, name=name))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        work = self.inner.reduce_scatter(output, tensor, op, name=name)
        return self._noted(f"reduce_scatter {op.value}", name, tensor, work)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        work = self.inner.all_to_all(output, tensor, output_splits, input_splits, name=name)
        return self._noted("all_to_all", name, tensor, work)

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        group = self.inner.new_group(ranks, name=name)
        return None if group is None else Recorder(group, self.log, f"{self.channel}/{name}")

    def close(self) -> None:
        self.inner.close()

    def _noted(self, kind: str, name: str, tensor: Tensor, work: Work) -> Work:
        self.log.collectives.append(Collective(self.channel, kind, name, tuple(tensor.shape), str(tensor.dtype)))
        return RecordedWork(work, self.log)


_log = Log()


def start() -> Log:
    """``xo.init()``, with every collective of the job recorded."""
    global _log
    xo.init()
    _log = Log()
    assert runtime._job is not None
    context = runtime._job.context
    communicator = context.communicator
    inner = communicator.inner if isinstance(communicator, Recorder) else communicator
    runtime._job.context = replace(context, communicator=Recorder(inner, _log))
    return _log


def everywhere(value: Any) -> list[Any]:
    """Every rank's ``value``. A collective that is not recorded."""
    communicator = xo.runtime.context().communicator
    inner = communicator.inner if isinstance(communicator, Recorder) else communicator
    return inner.all_gather_object(value, name="invariants")


def require_same(what: str, value: Any) -> None:
    """Fail on every rank unless all have an equal ``value``. Collective."""
    for rank, other in enumerate(values := everywhere(value)):
        assert other == values[0], f"{what}: rank {rank} has {other}, rank 0 has {values[0]}"


def engine_of(optimizer: Any) -> Any:
    """What brings this wrapped optimizer's gradients together."""
    attachment = Attachment.of(optimizer)
    assert attachment is not None
    assert attachment.engine is not None
    return attachment.engine


def prefix_of(optimizer: Any) -> str:
    """What the names of all collectives of this wrapped optimizer begin with."""
    return f"{engine_of(optimizer).reduction.name}."


def digests(model: nn.Module) -> dict[str, str]:
    """A hash of each parameter and buffer."""
    return {name: _digest(tensor) for name, tensor in model.state_dict().items()}


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


class Job:
    """A model, and its optimizer wrapped with ``options``, whose steps are counted.

    ``schedule="priority"`` is one with pieces so small that these models have several buckets, of several pieces.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.model = model
        self.steps = 0
        optimizer.register_step_post_hook(self._count)
        options.setdefault("named_parameters", list(model.named_parameters()))
        if options.get("schedule") == "priority":
            options["schedule"] = Priority(partition_bytes=512, credit_bytes=2048, fuse_bytes=128)
        self.optimizer: Any = xo.DistributedOptimizer(optimizer, **options)

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def check(self, steps: int) -> None:
        """Require the invariants. Collective."""
        _require_nothing_open(self.optimizer)
        assert self.steps == steps, f"the optimizer stepped {self.steps} times, {steps} were asked for"
        require_same("parameters", digests(self.model))
        require_same_collectives()
        require_state_to_fit_the_bare_optimizer(self.optimizer)


def _require_nothing_open(optimizer: Any) -> None:
    if isinstance(engine_of(optimizer).schedule, Overlapped):
        assert not _log.open_of(optimizer), f"between steps {_log.open_of(optimizer)} have not been waited for"
    optimizer.flush()
    assert not _log.open_of(optimizer), f"after flush() {_log.open_of(optimizer)} have not been waited for"


def require_same_collectives() -> None:
    """Fail on every rank unless all started the same collectives in the same order. Collective."""
    for rank, other in enumerate(lists := everywhere(_log.collectives)):
        for number, pair in enumerate(zip(lists[0], other, strict=False)):
            assert pair[0] == pair[1], f"collective {number}: rank 0 started {pair[0]}, rank {rank} {pair[1]}"
        assert len(other) == len(lists[0]), f"rank 0 started {len(lists[0])} collectives, rank {rank} {len(other)}"


def require_state_to_fit_the_bare_optimizer(optimizer: Any) -> None:
    """The state goes into a bare optimizer of the class, from there back, and is the same each time."""
    groups = [
        {**group, "params": [p.detach().clone().requires_grad_(p.requires_grad) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    arguments = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in arguments}
    bare = type(optimizer)(copy.deepcopy(groups), **defaults)
    saved = copy.deepcopy(optimizer.state_dict())
    assert {"state", "param_groups"} <= saved.keys()
    bare.load_state_dict(saved)
    require_equal_state(bare.state_dict(), saved)
    optimizer.load_state_dict(bare.state_dict())
    require_equal_state(optimizer.state_dict(), saved)


def require_equal_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """State and options of two ``state_dict()``s are equal bit for bit."""
    for key in ("state", "param_groups"):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0, equal_nan=True, check_stride=False)


def require_close(what: str, actual: Any, reference: Any, atol: float = 1e-12) -> None:
    """Fail unless tensors (or a list of numbers) are equal but for rounding in double precision."""
    torch.testing.assert_close(actual, reference, rtol=1e-12, atol=atol, msg=lambda text: f"{what}: {text}")


def parts_of_step(step: int, ranks: Sequence[int], part: int = 0) -> list[tuple[int, Tensor, Tensor]]:
    """Rank, inputs and targets of each of ``ranks``: with ``[xo.rank()]`` for a rank, with all for a reference."""
    return [(rank, *batch(rank, step, part)) for rank in ranks]


@contextlib.contextmanager
def warnings_of_the_library() -> Iterator[list[str]]:
    """What the library logs inside, on this rank."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("crossover")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
