"""The ways in which the collectives are run by the tests of this folder."""

from __future__ import annotations

import pytest

EVERY_WAY = [
    pytest.param("torch", 2, id="torch-2"),
    pytest.param("torch", 3, id="torch-3"),
    pytest.param("horovod", 2, id="horovod-2", marks=pytest.mark.horovod),
    pytest.param("horovod", 3, id="horovod-3", marks=pytest.mark.horovod),
]
TWO_RANKS = [EVERY_WAY[0], EVERY_WAY[2]]
THREE_RANKS = [EVERY_WAY[1], EVERY_WAY[3]]
