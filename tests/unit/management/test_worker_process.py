"""The process of a worker."""

from __future__ import annotations

import gc

import pytest

from django_pglock.management.worker_process import GARBAGE, collect_garbage_less_often


@pytest.mark.parametrize(("before", "after"), [((700, 11, 12), (GARBAGE, 11, 12)), ((10**6, 5, 5), (10**6, 5, 5))])
def test_the_garbage_collector_runs_less_often_and_freezes_imported_objects(before, after):
    was = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        collect_garbage_less_often()
        assert gc.get_threshold() == after
        assert gc.get_freeze_count() > 10_000
        gc.set_threshold(0)
        collect_garbage_less_often()
        assert gc.get_threshold()[0] == 0, "somebody wanted it off"
    finally:
        gc.unfreeze()
        gc.set_threshold(*was)
