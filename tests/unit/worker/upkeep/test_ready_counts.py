"""How often ready tasks are counted for metrics."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from django_pglock.worker.upkeep import ready_counts
from django_pglock.worker.upkeep.ready_counts import ReadyCounts


@pytest.mark.parametrize(("took", "rest"), [(0.01, 10), (0.1, 20), (3, 40)])
def test_a_count_that_takes_long_is_made_less_often(monkeypatch, took, rest):
    """Each of forty workers counts. In an incident a count takes a hundred times as long as before."""
    clock, counted = [100.0], []

    def count(using):
        counted.append(clock[0])
        clock[0] += took
        return {}

    monkeypatch.setattr(ready_counts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ready_counts, "ready_counts", count)
    counts = ReadyCounts("default")
    for second in range(100):
        clock[0] = max(clock[0], 100.0 + second)
        counts.ask()
        counts.look()
    assert {round(later - earlier) for earlier, later in itertools.pairwise(counted)} == {rest}
