"""The notice board helps error messages: it never raises and never holds anyone up."""

from __future__ import annotations

import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, TCPStore

from crossover.comm.board import Board, State, any_store, http_store, tcp_store
from crossover.comm.vigil import Vigil
from tests.harness import free_port


def boards_on_a_store() -> tuple[TCPStore, list[Board]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    return store, [Board(tcp_store("127.0.0.1", store.port, "words"), rank) for rank in range(3)]


def test_words_are_read_by_the_others() -> None:
    _store, (first, second, third) = boards_on_a_store()
    first.post(State.WAITING, "bucket 3", since=1000.0)
    second.post(State.RAISED, "ValueError: no data")
    words, unreadable = third.gather([0, 1], 5.0)
    assert unreadable is None
    assert (words[0].state, words[0].text, words[0].since) == (State.WAITING, "bucket 3", 1000.0)
    assert "waiting in 'bucket 3' since" in str(words[0])
    assert "raised ValueError: no data" in str(words[1])
    first.post(State.LEFT)
    assert third.gather([0], 1.0)[0][0].state is State.LEFT


def test_only_failures_raise_the_alarm(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    first, second, third = (Board(any_store(store, "words"), rank) for rank in range(3))
    for state in (State.WAITING, State.WORKING, State.LEFT):
        first.post(state)
        assert not third.alarmed()
    second.post(State.GAVE_UP, "bucket 3")
    assert third.alarmed()
    assert not Board(None, 0).alarmed()


def test_silence_is_waited_for_only_so_long() -> None:
    _store, (first, second, _) = boards_on_a_store()
    first.post(State.LEFT)
    started = time.monotonic()
    words, unreadable = second.gather([0, 2], 0.3)
    assert 0.3 <= time.monotonic() - started < 5
    assert set(words) == {0}
    assert unreadable is None


def test_other_stores_serve_too() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder) / "store"), 1)
        Board(any_store(store, "words"), 0).post(State.LEFT)
        words, unreadable = Board(any_store(store, "words"), 1).gather([0, 2], 0.0)
        assert set(words) == {0}
        assert unreadable is None
        del store


@pytest.mark.horovod
def test_horovods_key_value_server_serves_too() -> None:
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init([])
    try:
        boards = [Board(http_store("127.0.0.1", port, "words"), rank) for rank in range(2)]
        assert boards[1].gather([0], 0.0) == ({}, None)
        boards[0].post(State.RAISED, "é: 100 % of it")
        assert boards[1].gather([0], 5.0)[0][0].text == "é: 100 % of it"
    finally:
        server.stop()


@pytest.mark.parametrize("connect", [tcp_store, http_store])
def test_a_board_that_is_gone_is_said_to_be(connect: object) -> None:
    board = Board(connect("127.0.0.1", free_port(), "words"), 0, "rank 0")  # type: ignore[operator]
    started = time.monotonic()
    board.post(State.LEFT)
    words, unreadable = board.gather([1], 1.0)
    assert time.monotonic() - started < 5
    assert words == {}
    assert unreadable is not None
    assert "as if rank 0 had ended" in unreadable
    assert not board.alarmed()


def test_a_board_that_does_not_answer_holds_nobody_up() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        started = time.monotonic()
        board = Board(http_store("127.0.0.1", deaf.getsockname()[1], "words"), 0)
        board.post(State.LEFT)
        assert board.gather([1], 0.0)[1] is not None
        assert time.monotonic() - started < 10


def test_without_a_board_the_error_still_names_everyone() -> None:
    vigil = Vigil("mpi", 1, (4, 5, 6), 2.0, 1.0, Board(None, 5))
    text = str(vigil.failure("x", 2.0))
    assert "'x' on rank 5 of ranks 4-6 (mpi) did not finish within the time-out of 2 s" in text
    assert "keeps no notice board" in text
    assert "rank 4: no word\n" in text
    assert "rank 6: no word\n" in text
    assert "rank 5: " not in text


def test_a_failed_poll_is_reported_with_its_cause() -> None:
    def poll(seconds: float) -> bool:
        raise RuntimeError("[/far/away.cc:12] peer closed. Advice.")

    with pytest.raises(RuntimeError, match=r"failed after 0\.0 s: peer closed\.") as caught:
        Vigil("gloo", 0, (0, 1), 2.0, 1.0, Board(None, 0)).wait("x", poll)
    assert isinstance(caught.value.__cause__, RuntimeError)
