"""Tables of a version before the first release, which no migration of today can complete."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.db import connection

from django_pglock.store.prerelease_tables import has_prerelease_tables
from tests.conftest import ROOT


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, False),
        ("DROP CONSTRAINT pglock_task_run_after", True),
        ("RENAME TO elsewhere", False),
    ],
)
def test_tables_are_of_before_the_release_if_the_last_constraint_is_missing(change, expected):
    if change is not None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE django_pglock_task {change}")
    assert has_prerelease_tables(connection) is expected


def test_a_worker_can_be_imported_before_the_apps_are_loaded():
    """The worker finds pending migrations, and must not import a model for that."""
    code = "from django_pglock.worker import Worker; assert Worker"
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": "tests.settings"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
