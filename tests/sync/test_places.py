"""Where an arbiter's socket is, and who may put one there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crossover.sync.arbiter.places import Place, directory, is_shared


def test_hosts_and_devices_have_sockets_of_their_own(tmp_path: Path) -> None:
    pairs = [("host0", "cpu0"), ("host1", "cpu0"), ("host0", "cpu1"), ("a.b", "c"), ("a", "b.c"), ("x" * 200, "y")]
    pairs += [("a/b", "c"), ("a-b", "c"), ("x" * 200, "z"), ("h", "GPU-1d2f3e4a-0000-1111-2222-333344445555")]
    names = {Place(tmp_path, *pair).name for pair in pairs}
    assert len(names) == len(pairs)
    assert all("/" not in name and len(name) <= 64 for name in names)
    assert "host0.cpu0" in names


def test_a_directory_of_ones_own(tmp_path: Path) -> None:
    made = directory({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert made == tmp_path / "crossover"
    assert made.stat().st_mode & 0o7777 == 0o700
    assert not is_shared(made)


def test_a_directory_for_a_group(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2770)
    assert is_shared(directory({"CROSSOVER_RUN_DIR": str(tmp_path / "shared")}))


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ValueError, match="could pose as the arbiter"):
        directory({"CROSSOVER_RUN_DIR": str(tmp_path / "open")})


def test_a_link_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    with pytest.raises(ValueError, match="no directory"):
        directory({"CROSSOVER_RUN_DIR": str(tmp_path / "link")})


def test_a_path_that_a_socket_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        _ = Place(tmp_path / ("x" * 100), "h", "d").socket
