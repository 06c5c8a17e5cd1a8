"""The buckets of durations, and the quantiles that follow from them."""

from __future__ import annotations

import random

import pytest

from django_pglock.store.numbers import BOUNDS, BUCKETS, bucket_of, quantile


def counted(values):
    counts = [0] * BUCKETS
    for value in values:
        counts[bucket_of(value)] += 1
    return counts


def test_buckets_of_stored_rows_never_change():
    assert (BUCKETS, BOUNDS[0], BOUNDS[2], BOUNDS[20]) == (62, 0.001, 0.002, 1.024)
    assert BOUNDS[-1] == pytest.approx(12.4 * 86_400, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(-1.0, 0), (0.0, 0), (0.001, 0), (0.00101, 1), (1.024, 20), (1.03, 21), (1e9, 61)]
)
def test_a_duration_belongs_to_the_bucket_of_the_next_bound(seconds, bucket):
    assert bucket_of(seconds) == bucket


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95, 1.0])
def test_quantile_is_within_a_bucket_of_the_truth(share):
    values = sorted(random.Random(7).lognormvariate(0, 2) for _ in range(5000))
    truth = values[min(len(values) - 1, round(share * len(values)))]
    assert truth / 1.42 < quantile(counted(values), share) < truth * 1.42


def test_quantiles_of_no_values_of_few_and_of_values_above_all_bounds():
    assert quantile([], 0.5) is None
    assert quantile([0] * BUCKETS, 0.5) is None
    assert 0 < quantile(counted([0.0002]), 0.5) <= 0.001
    assert quantile(counted([0.0002]), 1.0) == BOUNDS[0]
    assert quantile([0, 0, 4], 1.0) == pytest.approx(BOUNDS[2])
    assert quantile(counted([1e9]), 0.5) >= BOUNDS[-1]
