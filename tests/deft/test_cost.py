"""Times in ticks, links, and where buckets are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossover.deft.cost import BucketTimes, LinkCost, fit_link, quantise, second_link_pays
from crossover.deft.partition import bucket_bytes, cut_profile, cuts
from crossover.deft.profile import Profile, agreed, medians
from tests.deft.profiles import random_profile, random_times


def test_longer_ticks_never_promise_more_time() -> None:
    for seed in range(50):
        fine = random_times(seed, links=2)
        coarse = quantise(fine, 50)
        unit = -(-max(fine.forward_window, fine.backward_window) // 50)
        assert max(coarse.forward_window, coarse.backward_window) <= 50
        assert sum(coarse.forward) * unit <= sum(fine.forward)
        assert coarse.backward_window * unit <= fine.backward_window
        for exact, rounded in zip(fine.reduce, coarse.reduce, strict=True):
            assert all(r * unit >= e for e, r in zip(exact, rounded, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), ((),)), "no bucket"),
        (((1,), (1,), ()), "no bucket or no link"),
        (((1,), (1, 2), ((1,),)), "backward"),
        (((1,), (1,), ((1, 2),)), r"reduce\[0\]"),
        (((1,), (-1,), ((1,),)), "backward"),
        (((1.5,), (1,), ((1,),)), "forward"),
    ],
)
def test_times_are_checked(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketTimes(*arguments)  # type: ignore[arg-type]


def test_links_are_fitted() -> None:
    cost = fit_link([(nbytes, 80 + 0.02 * nbytes) for nbytes in (1000, 5000, 20_000)])
    assert cost.latency_us == pytest.approx(80)
    assert cost.us_per_byte == pytest.approx(0.02)
    assert cost.smallest_bucket == pytest.approx(4 * 80 / 0.02, abs=1)
    assert fit_link([(1000, 10.0), (2000, 30.0)]).latency_us == 0, "no latency below zero"
    assert fit_link([(1000, 10.0), (2000, 5.0)]).us_per_byte == 0, "no negative slope"
    with pytest.raises(ValueError, match="samples"):
        fit_link([])


def test_a_second_link_on_the_same_wire_does_not_pay() -> None:
    assert second_link_pays(100.0, [105.0, 170.0])
    assert not second_link_pays(100.0, [195.0, 205.0])


def test_buckets_are_as_small_as_latency_allows() -> None:
    quick, slow = LinkCost(10.0, 0.001), LinkCost(1000.0, 0.001)
    assert bucket_bytes(quick, 1_000_000) == 64 * 1024
    assert bucket_bytes(slow, 1_000_000) == 4_000_000
    assert bucket_bytes(quick, 400_000_000) == 10_000_000


def test_long_buckets_are_cut_and_their_computing_stays_whole() -> None:
    for seed in range(30):
        profile = random_profile(seed, buckets=1 + seed % 6)
        counts = cuts(profile, LinkCost(0.001, 1.0))
        pieces = cut_profile(profile, counts)
        assert sum(pieces.forward_us) == sum(profile.forward_us)
        assert pieces.times().backward_window == profile.times().backward_window
        window = min(profile.times().forward_window, profile.times().backward_window)
        assert max(pieces.reduce_us[0]) <= max(window // 4, 1)
        assert sum(pieces.reduce_us[0]) >= sum(profile.reduce_us[0])
        assert len(pieces.nbytes) == sum(counts)
        # pieces of a bucket become ready together: when the bucket did
        ready = [
            release for release, count in zip(profile.times().releases(), counts, strict=True) for _ in range(count)
        ]
        assert list(pieces.times().releases()) == ready


def test_profiles_are_kept_and_agreed_on(tmp_path: Path) -> None:
    profile = random_profile(3, buckets=4, links=2)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    other = random_profile(4, buckets=4, links=2)
    both = agreed([profile, other])
    assert both == agreed([other, profile])
    assert both.backward_us == tuple(map(max, zip(profile.backward_us, other.backward_us, strict=True)))
    assert both.reduce_us[1] == tuple(map(min, zip(profile.reduce_us[1], other.reduce_us[1], strict=True)))
    assert medians([[1.2, 5], [1.4, -3], [9, -2]]) == (1, 0)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="crossover profile"):
        Profile.load(tmp_path / "other.json")
