"""The page about upgrades: tables of a later version under code of this one, while its workers work."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.docs.test_docs import blocks

pytestmark = pytest.mark.acceptance

TASKS = "from django_pglock import task\n\n@task\ndef greet():\n    return 'hello'\n"
#: No worker counts as dead, however slow the machine is: each task is claimed once.
SETTINGS = 'INSTALLED_APPS = ["django_pglock", "shop"]\nDJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 12.0}\n'
#: The new version, with what a migration may do after the first one: here to the table that all workers use.
LATER = 'DATABASES = {"default": {**POSTGRES, "NAME": "%s"}}\nMIGRATION_MODULES = {"django_pglock": "later"}\n'
FIRST = """
from importlib import import_module

Migration = import_module("django_pglock.migrations.0001_initial").Migration
"""
SECOND = """
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0001_initial")]
    operations = [
        migrations.AddField("task", "color", models.CharField(max_length=9, db_default="red")),
        migrations.AddField("task", "weight", models.IntegerField(null=True)),
    ]
"""
THIRD = """
from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("django_pglock", "0002_columns")]
    operations = [AddIndexConcurrently("task", models.Index("color", name="later_color"))]
"""
INSERT = """
INSERT INTO django_pglock_task (queue, backend, task_path) VALUES ('default', 'default', 'shop.tasks.greet')
RETURNING id
"""


def test_old_code_works_during_new_migrations_and_after_their_reversal(project, worker_process, eventually):
    old = project(settings=SETTINGS, shop__tasks=TASKS)
    files = {"shop__tasks": TASKS, "later__0001_initial": FIRST, "later__0002_columns": SECOND}
    new = project(settings=SETTINGS + LATER % old.database, later__0003_index=THIRD, **files)
    here = {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": str(old.folder)}
    old.manage("migrate", "-v0")
    with old.session() as session:

        def is_run():
            """Enqueue a task and wait until it has succeeded."""
            [task] = session.execute(INSERT).fetchone()
            query = "SELECT status, attempts FROM django_pglock_task WHERE id = %s"
            eventually(lambda: session.execute(query, [task]).fetchone() == ("SUCCESSFUL", 1))
            return True

        worker = worker_process("--threads", "1", **here)
        assert is_run()
        [upgrade] = [code for code in blocks(ROOT / "docs" / "worker.md", "console") if "--plan" in code]
        for command in (line.split() for line in upgrade.splitlines() if "manage.py" in line):
            new.run(*command[1:])
        assert session.execute("SELECT color FROM django_pglock_task").fetchall() == [("red",)]
        assert is_run(), "by a worker that has worked all the time"

        worker.end()
        worker_process("--threads", "1", **here)
        assert is_run(), "by one of the old version that is started on the new tables"
        new.manage("migrate", "-v0", "django_pglock", "0001")
        assert is_run()
