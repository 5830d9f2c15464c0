"""What the library tells users whose script wastes communication, or trains nothing: once, and on the first rank."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

logger = logging.getLogger("crossover")

WASTEFUL_STEPS, WASTEFUL_WINDOW = 3, 20
IDLE_STEPS = 5
PARTIAL_WINDOWS = 2


class Advice:
    """Follows the steps of one optimizer and warns of what goes on.

    Attributes:
        silent: say nothing, as on all ranks but the first.
    """

    def __init__(self) -> None:
        self.silent = False
        self._partial_windows = 0
        self._idle_steps = 0
        self._wasteful_steps: deque[int] = deque(maxlen=WASTEFUL_STEPS)
        self._told: set[str] = set()

    def window_ended(self, passes: int, length: int) -> None:
        """``step()`` was called after ``passes`` unshared backward passes, 0 where the last one was shared."""
        self._partial_windows = self._partial_windows + 1 if passes else 0
        if self._partial_windows == PARTIAL_WINDOWS:
            self._tell_once(
                "partial windows",
                f"step() is called after {passes} of {length} backward passes, time after time, so every window is "
                "shared early; call step() once in backward_passes_per_step passes, or set backward_passes_per_step=1",
            )

    def unseen_gradients(self, names: Sequence[str]) -> None:
        """``step()`` found gradients of these parameters that ``backward()`` had not announced."""
        self._tell_once(
            "unseen gradients",
            f"step() averages gradients that backward() did not, of {len(names)} parameters, the first "
            f"{names[0]!r}: they were set by hand, or their tensors were swapped or unfrozen since; what comes "
            "before step(), such as clipping, saw this rank's own",
        )

    def step_idle(self) -> None:
        """No gradient arrived for a step. If it goes on the model's parameters are no longer those of the optimizer."""
        self._idle_steps += 1
        if self._idle_steps == IDLE_STEPS:
            self._tell_once(
                "idle steps",
                f"in {IDLE_STEPS} calls of step() one after the other no parameter of this optimizer had a gradient; "
                "if the model's parameters were exchanged since it was built, as load_state_dict(assign=True) does, "
                "build it anew",
            )

    def step_shared(self, step: int, shares: int) -> None:
        """Gradients were averaged ``shares`` times for this step; more than once now and then where a scaler skips."""
        self._idle_steps = 0
        if shares < 2:
            return
        self._wasteful_steps.append(step)
        if len(self._wasteful_steps) == WASTEFUL_STEPS and step - self._wasteful_steps[0] < WASTEFUL_WINDOW:
            self._tell_once(
                "wasted shares",
                f"gradients were averaged over ranks {shares} times for one step(), and so they were in "
                f"{WASTEFUL_STEPS} of the last {WASTEFUL_WINDOW} steps, where once would do; freeze parameters that a "
                "loss does not train (requires_grad_(False)), or run its backward() within optimizer.no_sync()",
            )

    def state_of_one_replica(self) -> None:
        """A state was taken while ranks hold different parameters."""
        self._tell_once(
            "one replica",
            "state_dict() was called between two synchronisations, when ranks hold different parameters: save within "
            "optimizer.flushed() for a checkpoint of one model, or every rank's model and optimizer",
        )

    def state_without_ours(self) -> None:
        """A state was loaded that knows nothing of what this optimizer counts."""
        self._tell_once(
            "bare state",
            'the optimizer\'s state that was loaded has no entry "crossover": the gate goes on with the counts it has',
        )

    def _tell_once(self, subject: str, message: str) -> None:
        if subject not in self._told and not self.silent:
            logger.warning("crossover: %s", message)
        self._told.add(subject)
