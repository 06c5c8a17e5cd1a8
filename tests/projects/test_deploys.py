"""Old and new code of the page about deploys side by side, as real workers on one database."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.acceptance

PAGE = (ROOT / "docs" / "howto" / "deploys.md").read_text()
FILES = {
    (name, when): code
    for name, when, code in re.findall(
        r"^```\{code-block\} python\n:caption: shop/(\w+)\.py, (\w+)\n\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
}
#: No worker counts as dead, however slow the machine is: each task is claimed once.
SETTINGS = """
INSTALLED_APPS = ["django_pglock", "shop"]
DATABASES = {"default": {**POSTGRES, "NAME": "%s"}}
DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 12.0}
"""
OLD_NAME, NEW_NAME, EXPORT = "shop.tasks.send_receipt", "shop.mail.send_receipt", "shop.tasks.export"
INSERT = """
INSERT INTO django_pglock_task (queue, backend, task_path, args, kwargs) VALUES ('default', 'default', %s, '[5]', %s)
RETURNING id
"""


@pytest.fixture
def shops(project):
    """The project before and after the deploy, in two folders on one database."""
    old = project(shop__tasks=FILES["tasks", "before"])
    new = project(
        settings=SETTINGS % old.database, shop__tasks=FILES["tasks", "after"], shop__mail=FILES["mail", "new"]
    )
    old.write(settings=(old.folder / "settings.py").read_text() + SETTINGS % old.database)
    old.manage("migrate", "-v0")
    return old, new


@pytest.fixture
def start(worker_process):
    def start(shop):
        return worker_process("--threads", "2", DJANGO_SETTINGS_MODULE="settings", PYTHONPATH=str(shop.folder))

    return start


@pytest.fixture
def tasks(shops, eventually):
    """The tasks by their ids: to enqueue one by its path, as either code does, and to wait for the end of some."""
    with shops[0].session() as session:

        class Tasks:
            def enqueue(self, path, kwargs="{}"):
                return session.execute(INSERT, [path, kwargs]).fetchone()[0]

            def rows(self, *ids):
                query = "SELECT status, attempts, result FROM django_pglock_task WHERE id = ANY(%s) ORDER BY id"
                return session.execute(query, [list(ids)]).fetchall()

            def ended(self, *ids):
                eventually(lambda: {row[0] for row in self.rows(*ids)} <= {"SUCCESSFUL", "FAILED"})
                return self.rows(*ids)

        yield Tasks()


def test_a_function_moves_and_gets_an_argument_while_tasks_come(shops, start, tasks):
    old, new = shops
    old_worker = start(old)
    moved = tasks.enqueue(NEW_NAME)
    too_early = tasks.enqueue(EXPORT, '{"language": "French"}')
    behind = tasks.enqueue(OLD_NAME)
    assert tasks.ended(too_early, behind) == [
        ("FAILED", 1, None),  # callers were deployed before the workers: the page warns of that
        ("SUCCESSFUL", 1, "receipt of order 5"),
    ]
    assert tasks.rows(moved) == [("READY", 0, None)], "the old worker has passed it by and spent nothing"

    start(new)
    assert tasks.ended(moved) == [("SUCCESSFUL", 1, "receipt of order 5 by the new code")]
    both = [tasks.enqueue(path) for path in (OLD_NAME, NEW_NAME, EXPORT) for _ in range(5)]
    assert {row[:2] for row in tasks.ended(*both)} == {("SUCCESSFUL", 1)}, "whichever worker took them"

    old_worker.end()
    last = [tasks.enqueue(OLD_NAME), tasks.enqueue(EXPORT), tasks.enqueue(EXPORT, '{"language": "French"}')]
    assert tasks.ended(*last) == [
        ("SUCCESSFUL", 1, "receipt of order 5 by the new code"),
        ("SUCCESSFUL", 1, "order 5 in English"),
        ("SUCCESSFUL", 1, "order 5 in French"),
    ]


CAPTURED = """
from django.db import models
from django_pglock import task
from django_pglock.contrib.capture import Capture

@task
def reindex(ids): ...

class {name}(models.Model):
    name = models.CharField(max_length=40)
    capture = Capture(reindex, fields=["name"])
"""


def test_the_migration_that_renames_a_captured_model_moves_its_triggers(project):
    """As makemigrations writes it. It can be undone if its first lines are moved, as the page says."""
    shop = project(
        settings='INSTALLED_APPS = ["django.contrib.contenttypes", "pgtrigger", "django_pglock", "shop"]',
        shop__models=CAPTURED.format(name="Product"),
    )
    shop.manage_each("makemigrations shop -v0", "migrate -v0")
    shop.write(shop__models=CAPTURED.format(name="Item"))
    shop.python("""
        import builtins
        from django.core.management import call_command
        builtins.input = lambda prompt="": "y"
        call_command("makemigrations", "shop", "-v0", interactive=True)
    """)
    with shop.session() as session:

        def captured(table):
            """Return the kwargs of the tasks that an INSERT and an UPDATE make, and the number of our functions."""
            session.execute(f"INSERT INTO {table} (name) VALUES ('a'), ('b')")
            session.execute(f"UPDATE {table} SET name = md5(name)")
            made = session.execute("DELETE FROM django_pglock_task RETURNING kwargs->'ids'").fetchall()
            [functions] = session.execute("SELECT count(*) FROM pg_proc WHERE proname LIKE 'pgtrigger_%'").fetchone()
            return [ids for (ids,) in made], functions

        assert captured("shop_product") == ([[1, 2], [1, 2]], 3)
        shop.manage("migrate", "-v0")
        assert captured("shop_item") == ([[3, 4], [1, 2, 3, 4]], 3)
        assert 'relation "shop_product" does not exist' in shop.manage("migrate", "shop", "0001", fails=True)
        assert captured("shop_item") == ([[5, 6], [1, 2, 3, 4, 5, 6]], 3)
        _move_removals(shop)
        shop.manage("migrate", "-v0", "shop", "0001")
        assert captured("shop_product") == ([[7, 8], [*range(1, 9)]], 3)
        shop.manage("migrate", "-v0")
        assert captured("shop_item") == ([[9, 10], [*range(1, 11)]], 3)


def _move_removals(shop):
    """Put the lines that remove triggers before the one that renames the model, with the old name."""
    [path] = (shop.folder / "shop" / "migrations").glob("0002*.py")
    text = path.read_text()
    removals = re.findall(r"^        pgtrigger.migrations.RemoveTrigger\(.*?^        \),\n", text, re.M | re.S)
    for each in removals:
        text = text.replace(each, "")
    start = "    operations = [\n"
    path.write_text(text.replace(start, start + "".join(removals).replace("'item'", "'product'")))
