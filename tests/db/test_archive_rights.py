"""The rights in the database that docs/security.md names for the archive."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connection

from django_pglock.store.archive import archive_window
from django_pglock.store.archive_days import drop_days
from django_pglock.tasks.compat import TaskResultDoesNotExist
from tests.db.store.test_prune import make
from tests.db.test_security import as_role  # noqa: F401 - a fixture
from tests.sample import tasks as sample

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_rights_named_for_the_archive_are_enough(as_role, own_archive):  # noqa: F811 - the fixture
    old, older = make(days=2 / 24, task_path="tests.sample.tasks.echo"), make(days=9)
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user")
        [owner] = cursor.fetchone()
        cursor.execute(as_role.archiving)
    try:
        as_role("worker")
        call_command("locktasks", "archive", "on", verbosity=0)
        assert archive_window("default", 0, None)[0] == 2
        assert len(drop_days("default", 7)) == 1
        as_role("app")
        assert sample.echo.get_result(str(old.pk)).is_finished
        with pytest.raises(TaskResultDoesNotExist):
            sample.echo.get_result(str(older.pk))
    finally:
        as_role(None)
        with connection.cursor() as cursor:
            cursor.execute(f'ALTER TABLE django_pglock_archivedtask OWNER TO "{owner}"')
