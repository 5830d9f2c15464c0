"""Which parameters share a bucket."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crossover.bucket_plan import Item, plan_buckets

items = st.lists(
    st.builds(Item, st.integers(1, 100), st.sampled_from(["float32", "float64"]), st.sampled_from([None, None, 0, 1])),
    min_size=1,
    max_size=30,
)


@given(items, st.randoms(use_true_random=False), st.integers(1, 200), st.integers(1, 50))
def test_every_parameter_is_in_one_bucket_of_its_kind(given_items, random, cap, first_cap):
    order = list(range(len(given_items)))
    random.shuffle(order)
    buckets = plan_buckets(given_items, order, cap, first_cap)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(given_items)))
    for bucket in buckets:
        assert len({(given_items[index].kind, given_items[index].group) for index in bucket}) == 1


@given(items, st.integers(1, 200), st.integers(1, 50))
def test_a_bucket_is_over_its_cap_by_its_last_parameter_only(given_items, cap, first_cap):
    buckets = plan_buckets(given_items, range(len(given_items)), cap, first_cap)
    for bucket in buckets:
        if given_items[bucket[0]].group is None:
            assert sum(given_items[index].nbytes for index in bucket[:-1]) < max(cap, first_cap)


@given(items, st.integers(1, 200))
def test_buckets_stand_in_the_order_in_which_they_fill(given_items, cap):
    buckets = plan_buckets(given_items, range(len(given_items)), cap, 1)
    last = [bucket[-1] for bucket in buckets]
    assert last == sorted(last)


def test_first_bucket_is_small():
    twelve = [Item(10, "float32")] * 12
    assert [len(bucket) for bucket in plan_buckets(twelve, range(12), 50, 10)] == [1, 5, 5, 1]


def test_a_group_has_a_bucket_of_its_own():
    six = [Item(10, "f", 0), Item(10, "f"), Item(10, "f", 0), Item(10, "f"), Item(10, "f", 0), Item(10, "f")]
    assert plan_buckets(six, range(6), 1000, 1000) == [[0, 2, 4], [1, 3, 5]]
