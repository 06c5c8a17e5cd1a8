"""Old and new code of the page about deploys side by side, as real workers on one database."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.acceptance

PAGE = (ROOT / "docs" / "worker.md").read_text()
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
def reindex(ids, model):
    return [model, ids]

class {name}(models.Model):
    name = models.CharField(max_length=40)

    class Meta:
        constraints = [Capture(reindex, name="product_capture", fields=["name"])]
"""


def test_a_captured_model_that_is_renamed_keeps_its_triggers_and_waiting_changes(project):
    shop = project(
        settings='INSTALLED_APPS = ["django.contrib.contenttypes", "django_pglock", "shop"]',
        shop__models=CAPTURED.format(name="Product"),
    )
    shop.manage_each("makemigrations shop -v0", "migrate -v0")
    with shop.session() as session:

        def captured():
            """Let a worker run all tasks. Return the results of the function."""
            shop.manage("runlockworker", "--drain")
            made = "SELECT result FROM django_pglock_task WHERE task_path = 'shop.models.reindex' ORDER BY id"
            results = [result for (result,) in session.execute(made).fetchall()]
            session.execute("DELETE FROM django_pglock_task")
            return results

        def change(table):
            session.execute(f"INSERT INTO {table} (name) VALUES ('a')")
            session.execute(f"UPDATE {table} SET name = md5(name)")

        change("shop_product")
        shop.write(shop__models=CAPTURED.format(name="Item"))
        shop.python("""
            import builtins
            from django.core.management import call_command
            builtins.input = lambda prompt="": "y"
            call_command("makemigrations", "shop", "-v0", interactive=True)
        """)
        [path] = (shop.folder / "shop" / "migrations").glob("0002*.py")
        assert re.findall(r"migrations\.([A-Z]\w+)\(", path.read_text()) == ["RenameModel"]
        shop.manage("migrate", "-v0")
        assert captured() == [["shop.item", [1]]] * 2, "changes from before the rename"
        change("shop_item")
        shop.manage("migrate", "-v0", "shop", "0001")
        change("shop_product")
        shop.manage("migrate", "-v0")
        ids = [[2], [1, 2], [3], [1, 2, 3]]
        assert captured() == [["shop.item", each] for each in ids]
