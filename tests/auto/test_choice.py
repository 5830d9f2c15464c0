"""Decisions as functions of a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crossover.auto.choice import EXPOSED_SHARE, MOST_LOCAL, choose_gate, choose_schedule, measured_cluster
from crossover.auto.choice import wanted_local_share as wanted
from crossover.deft import Preserver, Profile
from crossover.deft.cost import LinkCost

LINK = LinkCost(latency_us=200.0, us_per_byte=0.001)
NOISE = tuple(0.01 * (7 * step % 20 + 1) for step in range(20))


def profile(coverage: float, noise_scale: float | None = None) -> Profile:
    """Four buckets of 4 MB, 100 ms of computing, and an all-reduce of so many times that."""
    reduce_us = round(coverage * 100_000 / 4)
    times = (7_500,) * 4, (15_000,) * 4, 10_000, ((reduce_us,) * 4,), (4_000_000,) * 4
    return Profile(*times, ("gloo",), 2, 20, noise_scale, (NOISE, NOISE[::-1]))


def test_the_links_cost_is_what_all_transfers_took_together() -> None:
    cluster = measured_cluster(profile(1.0), LINK)
    assert cluster.ranks == 2
    assert 4 * cluster.network.all_reduce_s(4_000_000) == pytest.approx(0.1)
    assert cluster.network.all_reduce_s(0) == pytest.approx(200e-6)
    slow_probe = measured_cluster(profile(0.001), LinkCost(10_000.0, 1.0))
    assert 4 * slow_probe.network.all_reduce_s(4_000_000) == pytest.approx(1e-4)


def test_little_communication_stays_plain_and_says_so() -> None:
    choice = choose_schedule(profile(0.05), LINK)
    assert not choice.changes
    assert choice.action.startswith("plain: nothing to gain")
    assert choice.numbers["computing"] == "100.0 ms"


def test_communication_that_fits_under_computing_is_delayed_without_merging() -> None:
    choice = choose_schedule(profile(0.9), LINK)
    assert choice.changes
    assert choice.numbers["updates a step"] == 1
    assert choice.numbers["efficiency"] == 1.0


def test_merging_has_to_pass_the_preserver() -> None:
    free, strict = (choose_schedule(profile(3.0, noise), LINK) for noise in (1000.0, 0.0))
    assert free.changes
    assert free.numbers["updates a step"] < 1
    assert free.numbers["efficiency"] == pytest.approx(1.0, abs=0.05)
    assert strict.numbers.get("updates a step", 1) == 1, "an update of merged steps would be worth no more than one"
    none = choose_schedule(profile(3.0, 1000.0), LINK, Preserver(least_gain=0.9))
    assert not none.changes


def test_the_line_has_the_numbers() -> None:
    text = str(choose_schedule(profile(3.0, 1000.0), LINK))
    for word in ("deft: gains ", "coverage rate 3", "plain 3", " ms a step", "noise scale 1e+03", "efficiency "):
        assert word in text, text


@pytest.mark.parametrize(("coverage", "share"), [(0.1, 0.0), (0.4, 0.5), (1.0, 0.8), (2.0, 0.9), (8.0, 0.9)])
def test_local_steps_are_as_many_as_make_the_wait_a_small_part_of_computing(coverage: float, share: float) -> None:
    found = wanted(1.0, coverage)
    assert found == pytest.approx(share)
    assert (1 - found) * coverage <= EXPOSED_SHARE + 1e-9 or found == MOST_LOCAL


def test_the_gate_opens_at_the_delta_for_that_share() -> None:
    choice = choose_gate(profile(2.0), LINK)
    assert choice.changes
    local = sum(max(values) < choice.delta for values in zip(NOISE, NOISE[::-1], strict=True))  # type: ignore[type-var]
    assert local / len(NOISE) == pytest.approx(0.9)
    for word in ("local steps: gains", "delta ", "wanted 90%", "waited for"):
        assert word in str(choice)
    assert choose_gate(profile(0.9), LINK).delta < choice.delta  # type: ignore[operator]


def test_the_gate_stays_shut_where_it_gains_nothing() -> None:
    hidden = choose_gate(profile(0.1), LINK)
    assert (hidden.changes, hidden.delta) == (False, None)
    assert "hidden already" in hidden.action
    unknown = choose_gate(replace(profile(2.0), significance=((None,) * 5,) * 2), LINK)
    assert (unknown.changes, unknown.delta) == (False, None)


def test_a_profile_keeps_what_was_watched() -> None:
    kept = Profile.from_json(profile(2.0, 12.5).as_json())
    assert kept == profile(2.0, 12.5)
    older = kept.as_json().replace('"noise_scale": 12.5', '"steps": 20').split('"significance"')[0].rstrip(", \n") + "}"
    assert Profile.from_json(older).significance == ()
