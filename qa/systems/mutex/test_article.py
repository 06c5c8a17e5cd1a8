"""The article's capture gives rows to two clients at once; the one of this system does not, at the same moment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction

from example_project.systems.mutex.models import TaskState
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)

ARTICLE = """
UPDATE task_state SET status = 'in_progress', owner = %s
WHERE id IN (SELECT id FROM task_state WHERE status = ANY (ARRAY['new', 'failed']) ORDER BY id LIMIT 3) RETURNING id
"""


def by_the_article(owner):
    with connection.cursor() as cursor:
        cursor.execute(ARTICLE, [owner])
        return {id_ for (id_,) in cursor.fetchall()}


def by_the_system(owner):
    return {row.pk for row in TaskState.objects.capture(owner, 3)}


def captured_by_two(capture, eventually):
    """One client captures three of six rows. Before it commits, another one asks for three."""

    def second():
        try:
            return capture("bert")
        finally:
            connections.close_all()

    TaskState.objects.bulk_create(TaskState(name=str(n)) for n in range(6))
    with ThreadPoolExecutor(1) as thread:
        with transaction.atomic():
            anna = capture("anna")
            bert = thread.submit(second)
            eventually(lambda: bert.done() or is_waited_for())
        return anna, bert.result(NEVER)


def is_waited_for():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))")
        return cursor.fetchone()[0]


def test_two_clients_of_the_article_get_the_same_rows(eventually):
    anna, bert = captured_by_two(by_the_article, eventually)
    assert len(anna) == 3
    assert anna == bert


def test_two_clients_of_the_system_get_different_rows(eventually):
    anna, bert = captured_by_two(by_the_system, eventually)
    assert len(anna) == len(bert) == 3
    assert anna.isdisjoint(bert)
