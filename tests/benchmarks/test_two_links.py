"""What is made of the answers of ranks with one link and with two."""

from __future__ import annotations

import pytest

from benchmarks import two_links


def test_a_row_counts_updates_and_takes_the_slowest_rank() -> None:
    ranks = [
        {"seconds": [0.1] * two_links.STEPS, "updates": 12, "plan": "a plan"},
        {"seconds": [0.2] * two_links.STEPS, "updates": 12, "plan": "a plan"},
    ]
    assert two_links.row(True, [ranks]) == ["two links", "200.0", "200.0 to 200.0", "0.50", "2.50", "a plan"]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert two_links.options_of(["--quick"]).repeats == 1
    with pytest.raises(SystemExit):
        two_links.options_of(["--repeats", "0"])
    assert "at least 1" in capsys.readouterr().err
