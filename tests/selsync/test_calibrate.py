"""A suggested threshold does what it says on the steps from which it was found."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover.selsync.calibrate import lssr, shared_steps, suggest_delta

values = st.one_of(st.floats(0, 3), st.sampled_from([0.0, 0.25, 0.5]), st.sampled_from([None, math.nan, math.inf]))
quorums = st.one_of(st.none(), st.floats(0.01, 1))
shares = st.floats(0, 1)


@st.composite
def watched(draw: st.DrawFn) -> list[list[float | None]]:
    ranks, steps = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    table = [draw(st.lists(values, min_size=steps, max_size=steps)) for _ in range(ranks)]
    table[0][draw(st.integers(0, steps - 1))] = 0.3  # so that a value is known
    return table


def counted(table: list[list[float | None]]) -> list[list[float | None]]:
    """Without the steps of which nobody knows a value."""
    rows = [row for row in zip(*table, strict=True) if any(v is not None and math.isfinite(v) for v in row)]
    return [list(column) for column in zip(*rows, strict=True)]


@given(watched(), shares, quorums)
def test_the_share_it_promises_is_the_share_it_gives(table, share, quorum):
    result = suggest_delta(table, share, quorum)
    assert lssr(shared_steps(counted(table), result.delta, quorum)) == pytest.approx(result.local_share)
    assert result.steps == len(counted(table)[0])
    assert result.steps + result.left_out == len(table[0])


@given(watched(), shares, quorums, st.floats(0, 4))
def test_no_threshold_comes_nearer(table, share, quorum, other):
    result = suggest_delta(table, share, quorum)
    found = lssr(shared_steps(counted(table), other, quorum))
    assert abs(result.local_share - share) <= abs(found - share) + 1e-9


@given(watched(), shares, shares, quorums)
def test_more_local_steps_need_a_larger_threshold(table, one, other, quorum):
    low, high = sorted([one, other])
    assert suggest_delta(table, low, quorum).delta <= suggest_delta(table, high, quorum).delta


@given(watched(), st.floats(0, 3), st.floats(0, 3), quorums)
def test_lssr_rises_with_delta(table, one, other, quorum):
    low, high = sorted([one, other])
    assert lssr(shared_steps(table, low, quorum)) <= lssr(shared_steps(table, high, quorum))


@given(watched(), st.floats(0, 3))
def test_a_larger_quorum_shares_less(table, delta):
    results = [lssr(shared_steps(table, delta, quorum)) for quorum in (None, 0.5, 1.0)]
    assert results == sorted(results)


@given(watched(), quorums)
def test_zero_is_synchronous_and_infinity_shares_only_the_unknown(table, quorum):
    assert all(shared_steps(table, 0.0, quorum))
    assert suggest_delta(table, 0.0, quorum).delta == 0
    result = suggest_delta(table, 1.0, quorum)
    assert result.local_share == pytest.approx(1 - result.unknown / result.steps)
    assert lssr(shared_steps(counted(table), math.inf, quorum)) == pytest.approx(result.local_share)


def test_any_rank_and_quorum():
    table = [[0.1, 0.2, 0.3, 0.4], [0.9, 0.1, 0.1, 0.1], [0.1, 0.1, 0.8, 0.5]]
    assert shared_steps(table, 0.4) == [True, False, True, True]
    assert shared_steps(table, 0.4, quorum=0.5) == [False, False, False, True]
    assert suggest_delta(table, 0.5).delta == pytest.approx((0.5 + 0.8) / 2)
    assert suggest_delta(table, 0.5, quorum=0.5).delta == pytest.approx((0.1 + 0.3) / 2)


def test_one_unknown_value_is_a_vote():
    table = [[0.1, 0.1, 0.1], [0.1, None, 0.1]]
    assert shared_steps(table, 5.0) == [False, True, False]
    result = suggest_delta(table, 1.0)
    assert (result.unknown, result.left_out) == (1, 0)
    assert result.local_share == pytest.approx(2 / 3)


def test_report_can_be_read():
    table = [[None] * 24 + [n / 100 for n in range(1, 101)]] * 4
    report = str(suggest_delta(table, 0.75))
    assert "delta = 0.755 for 75% local steps" in report
    assert "watched 100 steps on 4 ranks, any rank decides: 75.0% of them would have been local" in report
    assert "left out 24 steps of warm-up; 0 steps" in report
    assert "90%                0.9                  0.9" in report
    assert "2 votes decide" in str(suggest_delta(table, 0.75, quorum=0.5))
    assert "on 1 rank:" in str(suggest_delta(table[:1], 0.75))


def test_quantiles_of_one_rank_and_of_the_deciding_value():
    result = suggest_delta([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], 0.5)
    assert result.own_quantiles[0.5] == pytest.approx(0.4)
    assert result.deciding_quantiles[0.5] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([[0.1]], 1.5), "local_share: is 1.5"),
        (([[0.1]], math.nan), "local_share: is nan"),
        (([], 0.5), "values_by_rank: is empty"),
        (([[0.1], [0.1, 0.2]], 0.5), "rank 0 has 1 steps and rank 1 has 2"),
        (([[0.1], [-0.1]], 0.5), "rank 1 has -0.1 at step 0"),
        (([[None, math.nan]], 0.5), "no rank knows its significance in 2 steps"),
        (([[0.1]], 0.5, 2.0), "quorum: is 2.0"),
    ],
)
def test_arguments_are_checked(arguments, match):
    with pytest.raises(ValueError, match=match):
        suggest_delta(*arguments)


def test_lssr():
    assert lssr([True, True]) == 0
    assert lssr([0, 0, 0, 1]) == 0.75
    with pytest.raises(ValueError, match="votes: there are none"):
        lssr([])
