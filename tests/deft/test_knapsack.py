"""The solver against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from crossover.deft.knapsack import Item, pack_link, pack_links, place_all


def finish_of(items: list[Item], free: int) -> int:
    for item in items:
        free = max(free, item.release) + item.cost
    return free


def best_by_hand(items: list[Item], free: int, capacity: int) -> tuple[int, int]:
    """Value and, negative, the finish of the best choice."""
    best = (0, -free)
    for count in range(1, len(items) + 1):
        for chosen in itertools.combinations(items, count):
            if (end := finish_of(list(chosen), free)) <= capacity:
                best = max(best, (sum(item.value for item in chosen), -end))
    return best


def random_items(source: random.Random, released: bool, own_value: bool) -> list[Item]:
    releases = sorted(source.randint(0, 60) if released else 0 for _ in range(source.randint(1, 9)))
    return [
        Item(number, release, cost := source.randint(1, 40), source.randint(1, 40) if own_value else cost)
        for number, release in enumerate(releases)
    ]


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("own_value", [False, True])
def test_one_link_is_solved_exactly(released: bool, own_value: bool) -> None:
    source = random.Random(7)
    for _ in range(150):
        items = random_items(source, released, own_value)
        free, capacity = source.randint(0, 20), source.randint(0, 120)
        if capacity < free:
            continue
        packing = pack_link(items, free, capacity)
        chosen = [items[bucket] for bucket in packing.buckets]
        assert list(packing.buckets) == sorted(packing.buckets), "launch order is kept"
        assert packing.finish == finish_of(chosen, free) <= max(capacity, free)
        assert (sum(item.value for item in chosen), -packing.finish) == best_by_hand(items, free, capacity)


def test_several_links_share_what_the_fast_one_leaves() -> None:
    source = random.Random(3)
    for _ in range(100):
        count = source.randint(1, 8)
        fast = [source.randint(1, 40) for _ in range(count)]
        costs = [fast, [round(1.65 * cost) for cost in fast]]
        capacity = [source.randint(0, 90), source.randint(0, 90)]
        chosen = pack_links([(bucket, 0) for bucket in range(count)], costs, [0, 0], capacity)
        assert len({bucket for _, bucket in chosen}) == len(chosen), "each bucket once"
        for link in (0, 1):
            assert sum(costs[link][bucket] for place, bucket in chosen if place == link) <= capacity[link]
        items = [Item(bucket, 0, cost, cost) for bucket, cost in enumerate(fast)]
        assert sum(fast[bucket] for link, bucket in chosen if link == 0) == best_by_hand(items, 0, capacity[0])[0]


def test_all_are_placed_or_none() -> None:
    source = random.Random(5)
    for _ in range(200):
        count, links = source.randint(0, 7), source.randint(1, 3)
        fast = [source.randint(1, 40) for _ in range(count)]
        costs = [[cost + link * cost // 2 for cost in fast] for link in range(links)]
        capacity = [source.randint(0, 90) for _ in range(links)]
        placed = place_all(list(range(count)), costs, capacity)
        if placed is None:
            assert sum(fast) > capacity[0]
            if links == 1:
                continue
            # every bucket that the slow links left goes to the fast one, which then overflows
            continue
        chosen, finish = placed
        assert sorted(bucket for _, bucket in chosen) == list(range(count))
        for link in range(links):
            used = sum(costs[link][bucket] for place, bucket in chosen if place == link)
            assert used == finish[link] <= capacity[link]


def test_ties_do_not_depend_on_anything_but_the_order() -> None:
    items = [Item(2, 0, 60, 60), Item(1, 0, 60, 60)]
    assert pack_link(items, 0, 80).buckets == (1,)
    assert pack_link([Item(2, 0, 60, 61), Item(1, 0, 60, 61)], 0, 80).buckets == (1,)
    assert pack_link([], 5, 80).finish == 5
