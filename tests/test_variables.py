"""Environment variables: one list of them, in the code and in the guide, and a word where a name is misspelt."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import crossover as xo
from crossover import variables
from crossover.collectives.compression import BF16Compressor, NoneCompressor, compressor_of
from crossover.selsync import gate_of

ROOT = Path(__file__).parents[1]


def test_the_list_is_that_of_the_code() -> None:
    sources = [path for path in (ROOT / "crossover").rglob("*.py") if path.name != "variables.py"]
    used = {name for path in sources for name in re.findall(r"CROSSOVER_[A-Z_]*[A-Z]", path.read_text())}
    assert used == set(variables.KNOWN)


def test_the_guide_explains_every_one() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    explained = re.findall(r"`CROSSOVER_([A-Z_]+)", guide) + re.findall(r"`_([A-Z_]+)`", guide)
    assert {variables.PREFIX + name for name in explained} == set(variables.KNOWN)


def test_a_misspelt_name_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CROSSOVER_SHEDULE", "deft")
    monkeypatch.setenv("CROSSOVER_TEAM", "blue")
    with caplog.at_level(logging.WARNING, "crossover"):
        xo.shutdown()  # of a job that another test may have left
        xo.init()
        xo.shutdown()
    assert [record.getMessage() for record in caplog.records] == [
        "CROSSOVER_SHEDULE: is set and means nothing here; did you mean CROSSOVER_SCHEDULE?"
    ]


def test_compressors_have_names() -> None:
    assert compressor_of(" BF16 ") is BF16Compressor
    assert compressor_of(NoneCompressor) is compressor_of("none") is compressor_of("") is NoneCompressor
    with pytest.raises(ValueError, match=r"compression: is 'int8'; use 'none', 'fp16' or 'bf16'"):
        compressor_of("int8")


@pytest.mark.parametrize("text", ["selsync:x", "periodic:2.5", "periodic:many"])
def test_a_gate_whose_numbers_are_none_is_told_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="selsync:DELTA"):
        gate_of(text)
