"""The queues that have ready tasks."""

from __future__ import annotations

import pytest

from django_pglock.store.ready import ready_paths, ready_queues
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_ready_queues_are_found_without_reading_every_row():
    for queue in ("b", "a", "b", "c"):
        tasks.nothing.using(queue_name=queue).enqueue()
    assert ready_queues("default") == ["a", "b", "c"]


@pytest.mark.parametrize("fair", ["", "acdb", "ab", "cd"])
@pytest.mark.usefixtures("without_indexes")
def test_no_queue_is_left_out_whatever_the_plan(fair):
    for queue in ("c", "a", "d", "b"):
        tasks.nothing.using(queue_name=queue, fair="tenant" if queue in fair else None).enqueue()
    assert ready_queues("default") == ["a", "b", "c", "d"]
    assert sorted(ready_paths("default")) == [(queue, tasks.nothing.module_path) for queue in "abcd"]
