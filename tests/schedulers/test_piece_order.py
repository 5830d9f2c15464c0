"""The order of a priority queue with a credit window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crossover.schedulers.piece_order import Piece, priority_order

pieces = st.lists(
    st.builds(Piece, st.integers(0, 9), st.integers(0, 50), st.integers(1, 20), st.integers(1, 9)), max_size=20
)


@given(pieces, st.integers(1, 30))
def test_every_piece_is_sent_once(given_pieces, credit):
    assert sorted(priority_order(given_pieces, credit)) == list(range(len(given_pieces)))


@given(pieces)
def test_all_ready_means_by_priority(given_pieces):
    ready = [Piece(piece.priority, 0, piece.duration, piece.nbytes) for piece in given_pieces]
    order = priority_order(ready, credit=1)
    assert [ready[n].priority for n in order] == sorted(piece.priority for piece in ready)


@given(pieces)
def test_endless_credit_means_in_order_of_arrival(given_pieces):
    order = priority_order(given_pieces, credit=10**9)
    assert [given_pieces[n].ready for n in order] == sorted(piece.ready for piece in given_pieces)


def test_urgent_piece_overtakes_what_has_not_entered():
    background = [Piece(1, 0, 10, 1)] * 4
    urgent = Piece(0, 15, 10, 1)
    assert priority_order([*background, urgent], credit=1) == [0, 1, 4, 2, 3]
    assert priority_order([*background, urgent], credit=2) == [0, 1, 2, 4, 3]


def test_piece_larger_than_all_credit_enters_alone():
    assert priority_order([Piece(0, 0, 5, 100), Piece(1, 0, 5, 1)], credit=10) == [0, 1]
