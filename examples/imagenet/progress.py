"""What rank 0 tells: a progress bar on a terminal, plain lines elsewhere, and TensorBoard scalars."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]


class Progress:
    """Reports for one run. On ranks other than 0 every method does nothing.

    Args:
        speaks: whether this is rank 0.
        tensorboard: folder for scalars, or ``None``.
        first_step: number of the first step of this run; scalars of an earlier run from there on are hidden.

    Raises:
        ImportError: ``tensorboard`` is given and TensorBoard is not installed.
    """

    def __init__(self, speaks: bool, tensorboard: Path | None, first_step: int) -> None:
        self.speaks = speaks
        self.bar: tqdm[Any] | None = None
        self.writer: Any = None
        if speaks and tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(tensorboard), purge_step=first_step)
        self._clock = time.perf_counter()
        self._images = 0
        self._epoch_clock = self._clock
        self._epoch_images = 0

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self.speaks:
            tqdm.write(line)
            sys.stdout.flush()

    def start_epoch(self, epoch: int, epochs: int, steps: int, first_step: int) -> None:
        """Show the bar of an epoch, and start the clock."""
        self._clock = self._epoch_clock = time.perf_counter()
        self._images = self._epoch_images = 0
        if self.speaks and sys.stderr.isatty():
            label = f"epoch {epoch + 1}/{epochs}"
            self.bar = tqdm(total=steps, initial=first_step, desc=label, unit="step", leave=False, dynamic_ncols=True)

    def step(self, images: int) -> None:
        """One step with this many images, of all ranks, is done."""
        self._images += images
        self._epoch_images += images
        if self.bar is not None:
            self.bar.update()

    def report(self, step: int, place: str, values: dict[str, float]) -> None:
        """Report training so far: ``values`` and the images a second since the last report."""
        now = time.perf_counter()
        values = {**values, "images_per_second": self._images / max(now - self._clock, 1e-9)}
        self._clock, self._images = now, 0
        self.scalars("train", values, step)
        if self.bar is not None:
            self.bar.set_postfix_str(_as_text(values))
        else:
            self.say(f"{place}  {_as_text(values)}")

    def end_epoch(self) -> float:
        """Close the bar.

        Returns:
            Images a second, of all ranks, in the epoch's training.
        """
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        return self._epoch_images / max(time.perf_counter() - self._epoch_clock, 1e-9)

    def scalars(self, group: str, values: dict[str, float], step: int) -> None:
        """Write ``group/name`` for each value."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Finish the bar and the event file."""
        self.end_epoch()
        if self.writer is not None:
            self.writer.close()


def _as_text(values: dict[str, float]) -> str:
    formats = {"loss": "loss {:.3f}", "top1": "top-1 {:.1%}", "lr": "lr {:.4f}", "images_per_second": "{:.0f} images/s"}
    return "  ".join(formats[name].format(value) for name, value in values.items())
