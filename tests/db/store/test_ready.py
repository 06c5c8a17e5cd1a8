"""The queues that have ready tasks."""

from __future__ import annotations

import pytest

from django_pglock.store.ready import ready_queues
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_ready_queues_are_found_without_reading_every_row():
    for queue in ("b", "a", "b", "c"):
        tasks.nothing.using(queue_name=queue).enqueue()
    assert ready_queues("default") == ["a", "b", "c"]
