"""The environment variables that mean something here, and a word about those that look like one of them."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping

PREFIX = "CROSSOVER_"
KNOWN = frozenset(
    PREFIX + name
    for name in (
        *("BACKEND", "CHECK", "COMPRESSION", "DEVICE", "ELASTIC_DIR", "EMULATED_LINK", "GATE", "HOST", "KEEP_MEMORY"),
        *("LEASE", "PROFILE", "PROFILE_STEPS", "RECORDS", "RUN_DIR", "SCHEDULE", "SECOND_IFACE", "SHARING"),
        *("STALL_WARNING", "TENSORBOARD", "TIMELINE", "TIMEOUT"),
    )
)
CLOSE = 0.75
_log = logging.getLogger("crossover")


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are none of ours but look like one, each with the one that was probably meant.

    Others that begin like ours may be somebody's own.

    Example:
        >>> misspelt({"CROSSOVER_SHEDULE": "deft", "CROSSOVER_GATE": "auto", "CROSSOVER_TEAM": "blue"})
        {'CROSSOVER_SHEDULE': 'CROSSOVER_SCHEDULE'}
    """
    names = [name.removeprefix(PREFIX) for name in sorted(KNOWN)]
    found = {}
    for name in sorted(set(environment) - KNOWN):
        if name.startswith(PREFIX):
            close = difflib.get_close_matches(name.removeprefix(PREFIX), names, n=1, cutoff=CLOSE)
            if close:
                found[name] = PREFIX + close[0]
    return found


def warn_of_misspelt() -> None:
    """Log a warning for each: a misspelt name would change nothing, without a word."""
    for name, meant in misspelt(os.environ).items():
        _log.warning("%s: is set and means nothing here; did you mean %s?", name, meant)
