"""django-debug-toolbar: its SQL panel puts a ``cursor()`` of its own on each connection object, and leaves it there.

A statement that does not come from that cursor is not in the panel. The panel asks psycopg for the text that was sent,
with a second cursor on the same session.
"""

from __future__ import annotations

import pytest
from debug_toolbar.toolbar import DebugToolbar
from django.test import Client

from django_pglock.models import Task
from qa.foreign.sample.models import Letter


@pytest.fixture
def panels():
    """Return a function that requests a path and returns the statements and the tasks that the toolbar shows."""
    made: list[DebugToolbar] = []

    def note(sender, toolbar, **kwargs):
        made.append(toolbar)

    def request(path: str) -> tuple[list[str], list[str]]:
        response = Client().get(path)
        assert response.status_code == 200
        if response.streaming:
            b"".join(response.streaming_content)
            response.close()
        toolbar = made[-1]
        statements = [query["sql"] for query in toolbar.get_panel_by_id("SQLPanel").get_stats()["queries"]]
        tasks = toolbar.get_panel_by_id("TasksPanel").get_stats()["tasks"]
        return statements, [task["task"]["module_path"] for task in tasks]

    DebugToolbar._created.connect(note)
    yield request
    DebugToolbar._created.disconnect(note)


def matching(statements: list[str], text: str) -> int:
    return sum(text in statement for statement in statements)


def test_the_panels_show_the_lock_and_the_call(panels):
    for _ in range(3):
        statements, tasks = panels("/post/?text=100%25")
        assert matching(statements, "pg_try_advisory_lock") + matching(statements, "pg_advisory_lock") == 1
        assert matching(statements, "pg_advisory_unlock") == 1
        assert matching(statements, 'INSERT INTO "sample_letter"') == 1
        assert matching(statements, 'INSERT INTO "django_pglock_task"') == 1
        assert tasks == ["qa.foreign.sample.tasks.nothing"]
    assert Task.objects.count() == 3
    assert Letter.objects.filter(text="100%").count() == 3


def test_the_panel_shows_the_lock_of_a_view(panels):
    for _ in range(3):
        statements, _ = panels("/page/")
        assert matching(statements, "advisory_lock") == 1
        assert matching(statements, "advisory_unlock") == 1
        # With the name, as pg_stat_activity shows it.
        assert matching(statements, "page:/page/") >= 1


def test_a_worker_beside_the_toolbar(panels, drain):
    panels("/post/")
    drain()
    assert Task.objects.get().status == "SUCCESSFUL"
