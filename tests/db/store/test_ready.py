"""The queues that have ready tasks."""

from __future__ import annotations

import pytest

from django_pglock.store import ready
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


@pytest.mark.usefixtures("without_indexes")
def test_the_functions_of_the_first_ready_tasks_of_each_queue_are_found(monkeypatch):
    found = []
    for queue, fair in (("fair", "tenant"), ("plain", None)):
        for task, args, priority in ((tasks.echo, (1,), 0), (tasks.nothing, (), 1)):
            task.using(queue_name=queue, fair=fair, priority=priority).enqueue(*args)
            found.append((queue, task.module_path))
    for _ in range(2):
        tasks.fail.using(queue_name="third").enqueue()
    found.append(("third", tasks.fail.module_path))
    assert sorted(ready_paths("default")) == found
    monkeypatch.setattr(ready, "MOST_READ", 1)
    assert sorted(ready_paths("default")) == [found[1], found[3], found[4]]
