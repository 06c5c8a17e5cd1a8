"""The database of a command is that of the backends in ``TASKS``."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_pglock.tasks.compat import BaseTaskBackend

OURS = "django_pglock.backend.PostgresBackend"


DUMMY = f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"


@override_settings(TASKS={"default": {"BACKEND": OURS, "OPTIONS": {"database": "other"}}})
def test_a_database_without_tasks_is_refused():
    with pytest.raises(CommandError, match="No backend in TASKS stores its tasks in the database 'default'"):
        call_command("runlockworker", "--database", "default")


@pytest.mark.parametrize("command", [["runlockworker"], ["locktasks", "status"]])
@pytest.mark.parametrize(
    ("databases", "text"),
    [
        ([], "No backend in TASKS stores its tasks in PostgreSQL. In one entry of TASKS, set BACKEND to"),
        (["other"], "DATABASES has no alias 'other'. Its aliases: default"),
        (
            ["other", "default", "other"],
            "The backends in TASKS use several databases: default, other. Choose one with --data",
        ),
    ],
)
def test_the_database_is_that_of_the_backend_if_there_is_just_one(command, databases, text):
    """In another database the command would find no task, and an autoscaler would never start a worker."""
    tasks = {"dummy": {"BACKEND": DUMMY}}
    for number, database in enumerate(databases):
        tasks[str(number)] = {"BACKEND": OURS, "OPTIONS": {"database": database}}
    with override_settings(TASKS=tasks), pytest.raises(CommandError, match=text):
        call_command(*command)
