"""``locktasks archive``: its switches, its refusals and its output."""

from __future__ import annotations

import json
import re

import pytest
from django.core.management import CommandError
from django.db import connection

from django_pglock.management import archiving
from django_pglock.models import ArchivedTask, Task
from django_pglock.store import restore
from django_pglock.store.archive_days import drop_days
from django_pglock.store.archive_state import archive_state, turn_off, turn_on
from tests.conftest import ROOT
from tests.db.management.commands.test_locktasks import locktasks
from tests.db.store.archiving import TWO_HOURS, fail, walk
from tests.db.store.test_prune import make

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]


def test_the_archive_is_turned_on_and_off_and_its_status_is_shown(settings):
    for status in ("SUCCESSFUL", "SUCCESSFUL", "FAILED"):
        make(status, days=TWO_HOURS)
    assert locktasks("archive", "status") == "The archive is off.\nThere is no task in it.\n"
    assert locktasks("archive", "on").splitlines() == [
        "The archive is on. In 30 seconds workers begin to move successful tasks that ended at least an hour ago.",
        "A day is dropped when all its tasks are older than 7 days, as PRUNE_AFTER says.",
    ]
    assert locktasks("archive", "on") == "The archive is on already.\n"
    lines = locktasks("archive", "status").splitlines()
    assert lines[0].startswith("The archive has been on for ")
    assert lines[1:3] == ["There is no task in it.", "2 tasks are still to be moved."]
    assert walk() == 2
    lines = locktasks("archive", "status").splitlines()
    [day] = archive_state("default").days
    assert lines[1].startswith("It has 1 day with about 2 tasks, in ")
    assert lines[1].endswith(f"KB; the oldest is {day}.")
    assert lines[2] == "All tasks that are old enough have been moved."
    assert locktasks("archive", "off").startswith("The archive is off: workers move no more tasks.")
    with pytest.raises(CommandError, match="The archive is not on"):
        locktasks("archive", "off")
    assert "It has 1 day with about 2 tasks" in locktasks("archive", "status")


def test_an_archive_that_was_turned_off_can_be_moved_back(monkeypatch):
    assert locktasks("archive", "restore") == "There is no task in the archive.\n"
    rows = [make(days=TWO_HOURS) for _ in range(3)]
    locktasks("archive", "on")
    assert walk() == 3
    with pytest.raises(CommandError, match="The archive is on: workers would move the tasks to it again"):
        locktasks("archive", "restore")
    locktasks("archive", "off")
    make("READY", days=0, id=rows[0].pk)
    monkeypatch.setattr(restore, "RESTORED_AT_ONCE", 2)
    with pytest.raises(CommandError, match="1 task is still in the archive: its row is locked, or another task has"):
        locktasks("archive", "restore")
    assert Task.objects.filter(pk__in=[row.pk for row in rows], status="SUCCESSFUL").count() == 2
    Task.objects.filter(pk=rows[0].pk).delete()
    [day] = archive_state("default").days
    assert locktasks("archive", "restore") == f"1 task of {day} was moved back.\n"
    assert not ArchivedTask.objects.exists()


def test_an_archive_that_was_turned_off_can_be_emptied_as_the_docs_say():
    docs = (ROOT / "docs" / "operations.md").read_text()
    [statement] = re.findall(r"\*\*To go back\*\*.*?`(TRUNCATE .*?)`", docs, re.DOTALL)
    for days in (9, TWO_HOURS):
        make(days=days)
    locktasks("archive", "on")
    assert walk(days=30) == 2
    locktasks("archive", "off")
    assert ArchivedTask.objects.count() == 2
    with connection.cursor() as cursor:
        cursor.execute(statement)
    assert not ArchivedTask.objects.exists()
    [old, day] = archive_state("default").days
    assert drop_days("default", 7) == [old]
    assert archive_state("default").days == (day,)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "PRUNE_AFTER keeps SUCCESSFUL tasks forever, so no day of the archive is ever dropped."),
        (0.01, "PRUNE_AFTER deletes SUCCESSFUL tasks within an hour, before they would be moved. Nothing is moved."),
    ],
)
def test_archive_on_prints_when_prune_after_drops_days(settings, kept, said):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "PRUNE_AFTER": {"SUCCESSFUL": kept}}
    assert said in locktasks("archive", "on")
    assert said in locktasks("archive", "status")


def test_a_table_that_refers_to_tasks_is_named():
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE keeps_task (task bigint REFERENCES django_pglock_task (id))")
        try:
            with pytest.raises(CommandError, match="cannot be moved, because keeps_task has a foreign key to them"):
                locktasks("archive", "on")
        finally:
            cursor.execute("DROP TABLE keeps_task")
    assert not archive_state("default").is_on


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ("GRANT ALL ON ALL TABLES IN SCHEMA public TO other_role", "other_role does not own the archive; .* does"),
        (
            "ALTER TABLE django_pglock_archivedtask OWNER TO other_role; REVOKE CREATE ON SCHEMA public FROM PUBLIC",
            "other_role may not create tables in the schema public",
        ),
    ],
)
def test_a_role_without_the_rights_is_refused(rights, said):
    with connection.cursor() as cursor:
        cursor.execute("DROP ROLE IF EXISTS other_role; CREATE ROLE other_role")
        cursor.execute("SELECT current_user, has_schema_privilege('public', 'public', 'CREATE')")
        [(owner, everybody_may_create)] = cursor.fetchall()
        cursor.execute(rights)
        cursor.execute("SET ROLE other_role")
        try:
            with pytest.raises(CommandError, match=said):
                locktasks("archive", "on")
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute(f'ALTER TABLE django_pglock_archivedtask OWNER TO "{owner}"')
            cursor.execute("DROP OWNED BY other_role; DROP ROLE other_role")
            if everybody_may_create:
                cursor.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")


def test_archive_without_its_table_says_to_migrate():
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_pglock_archivedtask RENAME TO hidden")
        try:
            with pytest.raises(CommandError, match=r"no table for the archive\. Run: manage.py migrate"):
                locktasks("archive", "on")
        finally:
            cursor.execute("ALTER TABLE hidden RENAME TO django_pglock_archivedtask")


def test_a_moved_task_is_shown_and_deleted_by_its_id_and_by_filters(monkeypatch):
    rows = [make(days=TWO_HOURS, queue=queue, attempts=2) for queue in ("mail", "mail", "other")]
    fail(rows[0], 1)
    kept = make("FAILED", days=0, queue="mail")
    turn_on("default")
    assert walk() == 3
    shown = json.loads(locktasks("show", rows[0].pk, "--json"))
    assert (shown["id"], shown["is_archived"], shown["status"]) == (rows[0].pk, True, "SUCCESSFUL")
    assert [each["traceback"] for each in shown["failures"]] == ["Traceback 1"]
    assert "Traceback 1" in locktasks("show", rows[0].pk)
    assert "would be deleted" in locktasks("delete", "--queue", "mail", "--status", "SUCCESSFUL", "--dry-run")
    assert locktasks("delete", rows[2].pk) == "1 task was deleted.\n"
    assert locktasks("delete", "--queue", "mail", "--status", "SUCCESSFUL", "--yes") == "2 tasks were deleted.\n"
    assert not ArchivedTask.objects.exists()
    assert list(Task.objects.all()) == [kept]
    with pytest.raises(CommandError, match="No task with these ids"):
        locktasks("retry", rows[0].pk)


def test_prune_drops_days(settings):
    for days in (9, 3, TWO_HOURS):
        make(days=days)
    walk(days=30)
    days = archive_state("default").days
    assert "1 day of the archive would be dropped." in locktasks("prune", "--dry-run")
    assert locktasks("prune") == "0 tasks were deleted.\n1 day of the archive was dropped.\n"
    assert "dropped" not in locktasks("prune", "--older-than", 1, "--status", "FAILED")
    assert "1 day of the archive was dropped." in locktasks("prune", "--older-than", 1.5, "--status", "SUCCESSFUL")
    assert archive_state("default").days == days[2:]
    assert locktasks("prune") == "0 tasks were deleted.\n"


def test_wait_prints_how_far_the_move_is(monkeypatch):
    rows = [make(days=TWO_HOURS) for _ in range(3)]
    make("FAILED", days=TWO_HOURS)
    young = make(days=0)
    turns = iter([lambda: None, lambda: walk(batch=2), lambda: None])
    monkeypatch.setattr(archiving.time, "sleep", lambda _: next(turns)())
    lines = locktasks("archive", "on", "--wait").splitlines()[2:]
    assert lines == [
        f"Moved up to id {rows[0].pk - 1} of {young.pk - 1} …",
        "No worker is alive. Start one: manage.py runlockworker",
        "No worker is alive. Start one: manage.py runlockworker",
        "All tasks that were old enough have been moved.",
    ]


def test_an_interrupt_ends_only_the_wait(monkeypatch):
    make(days=TWO_HOURS)

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(archiving.time, "sleep", interrupt)
    assert "Workers continue to move tasks." in locktasks("archive", "on", "--wait")
    assert archive_state("default").is_on
    assert Task.objects.count() == 1


def test_wait_ends_when_the_archive_is_turned_off(monkeypatch):
    make(days=TWO_HOURS)
    turn_on("default")
    monkeypatch.setattr(archiving.time, "sleep", lambda _: turn_off("default"))
    with pytest.raises(CommandError, match="The archive was turned off meanwhile"):
        locktasks("archive", "on", "--wait")


def test_an_archived_task_is_not_running_and_not_unknown():
    row = make(days=TWO_HOURS)
    locktasks("archive", "on")
    assert walk() == 1
    with pytest.raises(CommandError, match=f"Task {row.pk} is not running"):
        locktasks("stack", str(row.pk))
    with pytest.raises(CommandError, match="There is no task 999999"):
        locktasks("stack", "999999")
