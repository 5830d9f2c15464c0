"""``run``: calls the training function again where that can be right."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from crossover import runtime
from crossover.collectives import handles
from crossover.elastic.state import HostsUpdatedInterrupt, State, horovod_is_elastic
from crossover.errors import CommunicationError

logger = logging.getLogger("crossover")

DIRECTORY_VARIABLE = "CROSSOVER_ELASTIC_DIR"

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def run(func: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a training function elastic: see :mod:`crossover.elastic` for what that means under which launcher.

    Args:
        func: takes a :class:`State` first. It may be called again from the start, and has to go on from what the state
            says. It makes no collective before the ``init()`` of the script.

    Returns:
        A function of the same arguments. It takes rank 0's state (or the last commit in ``$CROSSOVER_ELASTIC_DIR``),
        then calls ``func`` until that returns.

    Raises:
        CommunicationError: a rank failed, and the launcher is not one that brings ranks back within the process.
    """

    @functools.wraps(func)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        state = _state_of(args, kwargs)
        file = _commit_file()
        if file is not None:
            _load(state, file)
            state._committed = functools.partial(_write, file=file)
        if horovod_is_elastic():
            result = _run_with_horovod(state, lambda: func(*args, **kwargs))
        else:
            state.sync()
            result = func(*args, **kwargs)
        if file is not None and runtime.rank() == 0:
            file.unlink(missing_ok=True)  # the next job starts anew
        return result

    return wrapper


def _state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
    state = args[0] if args else kwargs.get("state")
    if not isinstance(state, State):
        raise ValueError(
            f"state: is a {type(state).__name__}; pass a crossover.elastic.TorchState as the first argument"
        )
    return state


def _run_with_horovod(state: State, call: Callable[[], _Result]) -> _Result:
    from horovod.common.elastic import notification_manager
    from horovod.common.exceptions import HorovodInternalError

    notification_manager.init()
    notification_manager.register_listener(state)
    in_sync = False
    try:
        while True:
            try:
                if not in_sync:
                    state.sync()
                return call()
            except (CommunicationError, HorovodInternalError) as error:
                reason = str(error).partition("\n")[0]
                logger.warning("a rank failed (%s): back to the last commit, with the ranks that are left", reason)
                state.restore()
                in_sync = False
            except HostsUpdatedInterrupt as interrupt:
                logger.warning("hosts have changed: meeting anew")
                in_sync = interrupt.skip_sync
            handles.forget_all()
            runtime.shutdown()
            runtime.init()
            state.on_reset()
    finally:
        notification_manager.remove_listener(state)


def _commit_file() -> Path | None:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    return Path(directory) / "commit.pt" if directory else None


def _load(state: State, file: Path) -> None:
    """On rank 0 only: :meth:`State.sync` gives it to the others."""
    if runtime.rank() != 0 or not file.exists():
        return
    # written by this job's own rank 0; anyone who can write there can run code here
    _persistent(state).load_state_dict(torch.load(file, map_location="cpu", weights_only=False))
    logger.warning("going on from the commit in %s", file)


def _write(state: State, file: Path) -> None:
    if runtime.rank() != 0:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    torch.save(_persistent(state).state_dict(), part)
    os.replace(part, file)  # a kill while writing leaves the commit before


def _persistent(state: State) -> Any:
    if not callable(getattr(state, "state_dict", None)) or not callable(getattr(state, "load_state_dict", None)):
        raise ValueError(
            f"state: a {type(state).__name__} has no state_dict() and load_state_dict(), which {DIRECTORY_VARIABLE} "
            "needs; use TorchState or ObjectState, or define them"
        )
    return state
