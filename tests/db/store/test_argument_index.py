"""The index on arguments and metadata: created while tasks are written, and used to find tasks by a value."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store import argument_index
from django_pglock.store.argument_index import (
    create_argument_index,
    drop_argument_index,
    has_argument_index,
    ids_by_arguments,
)
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def nothing_is_known():
    argument_index._known.clear()
    yield
    drop_argument_index("default")
    argument_index._known.clear()


def test_an_index_that_was_interrupted_is_created_again_and_dropped():
    assert create_argument_index("default")
    assert create_argument_index("default") is False, "there already"
    with connection.cursor() as cursor:
        cursor.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'pglock_task_arguments'::regclass")
    argument_index._known.clear()
    assert not has_argument_index("default")
    assert create_argument_index("default")
    assert has_argument_index("default")
    assert drop_argument_index("default")
    assert not has_argument_index("default")
    assert not drop_argument_index("default")


def test_tasks_are_found_by_the_index_if_there_is_one_and_if_they_are_not_too_many(monkeypatch):
    first, second = (int(tasks.record.enqueue("{a}", number=1).id) for _ in range(2))
    tasks.record.enqueue("{b}", number=1)
    found = Task.objects.filter(args__contains=["{a}"])
    assert ids_by_arguments(found) is None
    create_argument_index("default")
    assert ids_by_arguments(found) == [second, first]
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('enable_seqscan'), current_setting('enable_indexscan')")
        assert cursor.fetchone() == ("on", "on"), "other statements of the session read as before"
    monkeypatch.setattr(argument_index, "MOST_FOUND", 2)
    with CaptureQueriesContext(connection) as queries:
        assert ids_by_arguments(found) == [second, first]
    assert "LIMIT 3" in queries[-1]["sql"]
    assert ids_by_arguments(Task.objects.filter(kwargs__contains={"number": 1})) is None


def test_a_process_asks_for_the_index_only_after_some_seconds(monkeypatch, django_assert_num_queries):
    with django_assert_num_queries(1):
        assert not has_argument_index("default")
        assert not has_argument_index("default")
    monkeypatch.setattr(argument_index, "CACHED_FOR", 0.0)
    with django_assert_num_queries(1):
        assert not has_argument_index("default")
