from __future__ import annotations

import pytest

from crossover.deft import Profile
from crossover.simulate import Network, calibrate, cluster, cluster_names, gpus, resized
from crossover.simulate.network import parse_rate


def test_ring_by_hand() -> None:
    network = Network(nodes=4, bit_s=8e9, latency_s=1e-5, goodput=0.5)
    assert network.all_reduce_s(1_000_000) == pytest.approx(6e-5 + 1.5 * 1e6 / 0.5e9)


def test_tree_wins_for_small_buckets_and_ring_for_large_ones() -> None:
    ring, tree, best = (Network(64, 10e9, algorithm=name) for name in ("ring", "tree", "best"))
    assert tree.all_reduce_s(1_000) < ring.all_reduce_s(1_000)
    assert ring.all_reduce_s(10**9) < tree.all_reduce_s(10**9)
    for nbytes in (0, 1_000, 10**7, 10**9):
        assert best.all_reduce_s(nbytes) == min(ring.all_reduce_s(nbytes), tree.all_reduce_s(nbytes))


def test_one_node_pays_only_for_transfers_within_it() -> None:
    network = Network(1, 1e9, local_bytes_s=1e11, launch_s=2e-5)
    assert network.all_reduce_s(10**8) == pytest.approx(1e-3 + 2e-5)


def test_two_halves_make_an_all_reduce() -> None:
    network = Network(8, 10e9, latency_s=2e-5)
    assert 2 * network.half_s(10**6) == pytest.approx(network.all_reduce_s(10**6))


def test_a_straight_line_comes_back_from_a_profile() -> None:
    network = Network(8, 2e9, latency_s=5e-5, goodput=1.0)
    sizes = (10_000, 1_000_000, 25_000_000)
    row = tuple(round(1e6 * network.all_reduce_s(n)) for n in sizes)
    profile = Profile((1,) * 3, (1,) * 3, 0, (row,), sizes, ("nccl",), size=8)
    found = calibrate(profile)
    assert found.bit_s == pytest.approx(2e9, rel=1e-3)
    assert found.latency_s == pytest.approx(5e-5, rel=1e-2)


@pytest.mark.parametrize(("size", "link", "what"), [(1, 0, "of 1 rank"), (2, 1, "link: is 1")])
def test_profile_that_tells_nothing_is_refused(size: int, link: int, what: str) -> None:
    profile = Profile((1,), (1,), 0, ((1,),), (1,), ("gloo",), size=size)
    with pytest.raises(ValueError, match=what):
        calibrate(profile, link)


@pytest.mark.parametrize(
    ("name", "value"),
    [("nodes", 0), ("bit_s", 0.0), ("goodput", -1.0), ("latency_s", -1.0), ("algorithm", "star"), ("launch_s", -1.0)],
)
def test_network_refuses(name: str, value: object) -> None:
    settings: dict[str, object] = {"nodes": 2, "bit_s": 1e9, name: value}
    with pytest.raises(ValueError, match=name):
        Network(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "fast", "10", "0gbit", "1.2.3gbit"])
def test_rate_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="like 25gbit"):
        parse_rate(text)


@pytest.mark.parametrize("name", cluster_names())
def test_every_preset_says_where_it_comes_from(name: str) -> None:
    texts = [str(assumption) for assumption in cluster(name).assumptions("convolution")]
    assert all("[" in text and not text.endswith("[]") for text in texts)
    assert any("TFLOP/s" in text for text in texts)


def test_resized_keeps_ranks_on_a_node() -> None:
    larger = resized(gpus(16, 10e9), 1024)
    assert (larger.ranks, larger.network.nodes) == (1024, 128)


def test_pace_is_the_same_for_the_same_seed_and_differs_between_steps() -> None:
    place = gpus(16, 10e9)
    assert (place.pace(3) == place.pace(3)).all()
    assert (place.pace(3) != place.pace(4)).any()
