"""Weighted fair queueing, classes and ageing, by simulation on a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossover.sync.arbiter import policy
from crossover.sync.arbiter.policy import AGEING_TURNS, ARREARS_S, Claim, admit, charge, choose, serve


def backlogged(claims: list[Claim], turn_s: dict[str, float], until_s: float) -> dict[str, float]:
    """Seconds that each held the device, all of them asking all the time."""
    held = dict.fromkeys(turn_s, 0.0)
    while sum(held.values()) < until_s:
        chosen = choose(claims)
        serve(chosen, claims)
        charge(chosen, turn_s[chosen.job])
        held[chosen.job] += turn_s[chosen.job]
    return held


@pytest.mark.parametrize("turns", [(0.01, 0.01), (0.03, 0.01), (0.01, 0.05)])
def test_shares_are_as_the_weights(turns: tuple[float, float]) -> None:
    held = backlogged([Claim("a", weight=3.0), Claim("b")], dict(zip("ab", turns, strict=True)), 30.0)
    assert held["a"] / sum(held.values()) == pytest.approx(0.75, rel=0.01)


def test_equal_weights_share_time_and_not_turns() -> None:
    held = backlogged([Claim("a"), Claim("b"), Claim("c")], {"a": 0.01, "b": 0.02, "c": 0.04}, 30.0)
    assert max(held.values()) - min(held.values()) <= 0.04


def test_a_higher_class_goes_first_and_a_lower_one_is_not_starved() -> None:
    claims = [Claim("urgent", priority=1), Claim("usual")]
    served = []
    for _ in range(100):
        chosen = choose(claims)
        serve(chosen, claims)
        charge(chosen, 0.01)
        served.append(chosen.job)
    gaps = [later - earlier for earlier, later in zip(*[iter_places(served)[i:] for i in (0, 1)], strict=False)]
    assert set(gaps) == {AGEING_TURNS + 1}


def iter_places(served: list[str]) -> list[int]:
    return [place for place, job in enumerate(served) if job == "usual"]


def test_no_claim_for_the_time_of_an_absence() -> None:
    veteran, newcomer = Claim("veteran", virtual_s=500.0), Claim("newcomer")
    admit(newcomer, [veteran, newcomer], returning=True)
    held = backlogged([veteran, newcomer], {"veteran": 0.01, "newcomer": 0.01}, 1.0)
    assert held["veteran"] == pytest.approx(held["newcomer"], abs=0.011)


def test_arrears_of_one_that_waited_for_its_network_are_kept_within_bounds() -> None:
    slow = Claim("slow", virtual_s=9.5)
    admit(slow, [Claim("fast", virtual_s=10.0), slow], returning=False)
    assert slow.virtual_s == 9.5
    admit(slow, [Claim("fast", virtual_s=100.0), slow], returning=False)
    assert slow.virtual_s == 100.0 - ARREARS_S


def test_the_only_one_is_placed_anywhere() -> None:
    alone = Claim("alone", virtual_s=3.0)
    admit(alone, [alone], returning=True)
    assert alone.virtual_s == 3.0


def test_the_order_is_the_same_on_every_node() -> None:
    one, other = Claim("a", rank=1), Claim("a", rank=0)
    assert choose([one, other]) is choose([other, one]) is other


def test_nobody_waits() -> None:
    with pytest.raises(ValueError, match="empty"):
        choose([])


@given(
    weights=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=5),
    turns=st.lists(st.floats(0.005, 0.05), min_size=5, max_size=5),
)
def test_nobody_is_further_from_its_share_than_a_turn(weights: list[float], turns: list[float]) -> None:
    names = "abcde"[: len(weights)]
    claims = [Claim(name, weight=weight) for name, weight in zip(names, weights, strict=True)]
    backlogged(claims, dict(zip(names, turns, strict=False)), 5.0)
    virtual = [claim.virtual_s for claim in claims]
    longest = max(turn / weight for turn, weight in zip(turns, weights, strict=False))
    assert max(virtual) - min(virtual) <= longest + 1e-9


def test_patience_is_for_those_who_come_back_at_once() -> None:
    assert policy.patience_s(0.1, 0.0005) == policy.PATIENCE_S
    assert policy.patience_s(0.01, 0.0005) == pytest.approx(0.001)
    assert policy.patience_s(0.1, 0.05) == 0.0
    assert policy.patience_s(None, None) == 0.0


def test_leases_grow_with_the_turns() -> None:
    assert policy.lease_s(None) == policy.LEASE_S
    assert policy.lease_s(2.0) == policy.LEASE_TURNS * 2.0
    assert policy.lease_s(0.001, least_s=0.3) == 0.3
