"""No deadline for single examples: on a shared machine the time of one says nothing."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("crossover", deadline=None)
settings.load_profile("crossover")
