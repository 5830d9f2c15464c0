"""Late gradients in a checkpoint: what is saved of generations, and when it may be taken back.

The rule. With every rank's own state saved, and loaded again by as many ranks with the same buckets, training goes on
bit for bit. Otherwise, as with the state of rank 0 alone, gradients that were on their way are dropped and counted; the
counters go on where they were.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crossover.buckets import Bucket
from crossover.schedulers.generations import Generation, Piece
from crossover.schedulers.transfer import Arrived

if TYPE_CHECKING:
    from crossover.schedulers.delayed import DelayedSchedule

_log = logging.getLogger("crossover")


def save(schedule: DelayedSchedule) -> dict[str, Any]:
    """This rank's generations. Waits for its transfers, which all ranks have started; starts none."""
    schedule.settle()
    communicator, generations = schedule.reduction.communicator, schedule.generations
    return {
        "rank": communicator.rank,
        "size": communicator.size,
        "layout": layout_of(schedule.buckets),
        "pieces": [[piece.bucket, piece.start, piece.stop] for piece in generations.pieces],
        "number": generations.accumulating.number,
        "accumulating": _saved(schedule, generations.accumulating, schedule.buckets),
        "current": _saved(schedule, generations.current, generations.twins),
        "then": schedule.compensation.state_dict(),
        "counters": schedule.counters(),
    }


def layout_of(buckets: Sequence[Bucket]) -> list[list[str]]:
    """What the buckets hold, by name."""
    return [[slot.name for slot in bucket.slots] for bucket in buckets]


def _saved(
    schedule: DelayedSchedule, generation: Generation | None, buckets: Sequence[Bucket]
) -> dict[str, Any] | None:
    if generation is None or not generation.steps:
        return None
    return {
        "number": generation.number,
        "steps": generation.steps,
        "scale": generation.scale,
        "void": generation.void,
        "late": generation.late,
        "sent": [list(place) for place in generation.transfers],
        "remarks": schedule.saved_remarks(generation),
        "buffers": [bucket.buffer.clone() for bucket in buckets],
        "missing": [list(bucket.missing) for bucket in buckets],
    }


def own(schedule: DelayedSchedule, state: dict[str, Any]) -> bool:
    """Whether ``state`` is this rank's, of a job of this size with the same buckets."""
    communicator = schedule.reduction.communicator
    return bool(
        state["rank"] == communicator.rank
        and state["size"] == communicator.size
        and state["layout"] == layout_of(schedule.buckets)
    )


def restore(schedule: DelayedSchedule, state: dict[str, Any]) -> None:
    """Take back what :func:`save` gave: the same gradients, in the same memory, as far on their way."""
    generations = schedule.generations
    scale = schedule.loss_scale.current()
    generations.accumulating = Generation(state["number"], scale=scale)
    if state["accumulating"] is not None:
        generations.accumulating = _restored(schedule, state["accumulating"], schedule.buckets)
    generations.add(accumulates=generations.accumulating.steps > 0)
    generations.current = None
    if state["current"] is not None:
        generations.make_twins()
        generations.current = _restored(schedule, state["current"], generations.twins)
    schedule.compensation.load_state_dict(state["then"], generations.parameters)


def _restored(schedule: DelayedSchedule, saved: dict[str, Any], buckets: Sequence[Bucket]) -> Generation:
    for bucket, buffer, missing in zip(buckets, saved["buffers"], saved["missing"], strict=True):
        bucket.buffer.copy_(buffer)
        bucket.missing = list(missing)
    return Generation(
        saved["number"],
        saved["steps"],
        saved["scale"],
        {(bucket, start): Arrived() for bucket, start in saved["sent"]},
        schedule.restored_remarks(saved["remarks"]),
        saved["void"],
        late=saved["late"],
    )


def resume(schedule: DelayedSchedule, state: dict[str, Any] | None) -> None:
    """All ranks have the same buckets now: do they have states that fit together? Collective.

    Args:
        schedule: has just been given its buckets.
        state: what was loaded on this rank, if anything.
    """
    communicator = schedule.reduction.communicator
    fits = state is not None and own(schedule, state)
    mine = None if state is None else {key: state[key] for key in ("counters", "layout", "pieces")}
    everyone = communicator.all_gather_object((fits, mine), name=f"{schedule.reduction.name}.resume")
    known = [shared for _, shared in everyone if shared is not None]
    if not known:
        return
    kept = all(rank_fits for rank_fits, _ in everyone) and all(shared == known[0] for shared in known)
    if kept:
        assert state is not None
        restore(schedule, state)
    take_counters(schedule, known[0], kept)


def take_counters(schedule: DelayedSchedule, state: dict[str, Any], kept: bool) -> None:
    """Go on counting; a plan goes on only with the same buckets."""
    if state["layout"] == layout_of(schedule.buckets):
        schedule.generations.pieces = [Piece(*piece) for piece in state["pieces"]]
        schedule.load_counters(state["counters"], kept)
    elif schedule.reduction.communicator.rank == 0:
        _log.warning(
            "%s: the loaded state is of other buckets, as of another model: counts and plan begin anew, and gradients "
            "that were on their way are dropped",
            type(schedule).__name__,
        )
