"""Errors that name the rank, the thing that failed, and what to do about it.

Bad arguments raise :class:`ValueError`, as in torch. The two classes here are for what goes wrong between ranks.
"""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """A collective failed or did not finish within its time-out.

    The message names this rank, the collective, how long was waited, and what the other ranks said of themselves.
    The process group is not usable afterwards: end the process, or re-initialise.
    """


class RankMismatchError(ValueError):
    """Ranks hold different values of something that must be equal everywhere (parameters, options, plans).

    Every rank of the group raises it in the same call, with the first difference named.
    """
