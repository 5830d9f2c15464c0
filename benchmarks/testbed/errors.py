"""Why a testbed could not be built, a job on it failed, or its links cannot be trusted."""

from __future__ import annotations


class TestbedError(RuntimeError):
    """The testbed cannot be built or used here; the message says what is missing."""

    __test__ = False


class BandwidthError(TestbedError):
    """A link's measured bandwidth is too far from the one asked for, so that figures taken on it would be wrong."""


class JobError(TestbedError):
    """A job on the testbed failed or ran out of time; the message names the rank and shows its last lines.

    Attributes:
        exit_code: the first failing rank's exit code (128 + signal number if a signal ended it), 124 after a time-out.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
