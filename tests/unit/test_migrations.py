"""Migrations after the first one can be applied while workers claim: no rewritten table, no long lock."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from types import ModuleType

import pytest
from django.contrib.postgres.operations import (
    AddConstraintNotValid,
    AddIndexConcurrently,
    RemoveIndexConcurrently,
    ValidateConstraint,
)
from django.db import migrations, models
from django.db.models.functions import Now, Random

from django_pglock import migrations as migrations_of_the_package
from django_pglock.migrations._operations import (
    AddCheckOnline,
    AddFieldOnline,
    AddIndexOnline,
    ChangeRows,
    CreateView,
    TableSQL,
)
from tests.sample import online_migrations

#: Operations that take their locks for a moment, whatever the size of the table, or none, as options of models do.
#: TableSQL sets storage parameters, ChangeRows locks a few rows.
ONLINE = (
    *(ValidateConstraint, migrations.CreateModel, CreateView, TableSQL, ChangeRows),
    migrations.AlterModelOptions,
)
CONCURRENT = (AddIndexOnline, RemoveIndexConcurrently)


def names(package):
    return sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.name[0] != "_")


def migration_of(package, name):
    return import_module(f"{package.__name__}.{name}").Migration


def obstacles_after_the_first(package):
    """Return the obstacles of each migration after the first one that has any, by its name."""
    found = {name: obstacles(migration_of(package, name)) for name in names(package)[1:]}
    return {name: obstacles for name, obstacles in found.items() if obstacles}


def obstacles(migration):
    """Return each operation of a migration that may hold up a table that is in use, with the reason."""
    found = []
    for operation in migration.operations:
        if isinstance(operation, CONCURRENT):
            reason = "needs atomic = False" if migration.atomic else ""
        elif isinstance(operation, (AddFieldOnline, AddCheckOnline)):
            is_last = operation is migration.operations[-1]
            reason = _obstacle_of_addition(operation) if is_last else "keeps its lock while the next operation runs"
        else:
            reason = "" if isinstance(operation, ONLINE) else "is not online"
        if reason:
            found.append(f"{operation.describe()}: {reason}")
    if not migration.atomic and len(migration.operations) > 1:
        found.append("without a transaction there may be one operation only: after a failure it could not be repeated")
    return found


def _obstacle_of_addition(operation):
    if isinstance(operation, AddCheckOnline):
        return ""
    field = operation.field
    # PostgreSQL evaluates a default that is not volatile once, and stores it beside the table:
    # https://www.postgresql.org/docs/current/sql-altertable.html, "Notes".
    default = field.db_default
    is_constant = default is not models.NOT_PROVIDED and isinstance(default, (models.Value, Now, bool, int, str))
    if not field.null and not is_constant:
        return "needs null=True or a constant db_default"
    if default is not models.NOT_PROVIDED and not is_constant:
        return "has a default that PostgreSQL would evaluate for each row"
    if field.unique or field.db_index or field.is_relation:
        return "makes an index or a constraint under a lock"
    return ""


def test_the_first_migration_creates_and_changes_nothing():
    assert names(migrations_of_the_package)[0] == "0001_initial"
    first = migration_of(migrations_of_the_package, "0001_initial")
    assert first.initial
    assert {type(each) for each in first.operations} == {migrations.CreateModel, TableSQL, CreateView}


@pytest.mark.parametrize("package", [migrations_of_the_package, online_migrations])
def test_later_migrations_are_online(package):
    assert obstacles_after_the_first(package) == {}


def test_each_operation_that_waits_for_a_table_is_in_the_migrations_of_the_tests():
    """So ``tests/concurrency/test_migrations.py`` and the benchmark run it beside tasks."""
    used = {
        type(each) for name in names(online_migrations) for each in migration_of(online_migrations, name).operations
    }
    assert used >= {AddFieldOnline, AddCheckOnline, AddIndexOnline}


PLANTED = """
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_pglock", "0001_initial")]
    operations = [migrations.AlterField("task", "queue", models.TextField())]
"""


def test_a_later_migration_that_is_not_online_is_found(tmp_path, monkeypatch):
    """In a package that has the migrations of this one, and one more."""
    package = ModuleType("planted")
    package.__path__ = [str(tmp_path), *migrations_of_the_package.__path__]
    monkeypatch.setitem(sys.modules, "planted", package)
    (tmp_path / "9999_planted.py").write_text(PLANTED)
    try:
        assert list(obstacles_after_the_first(package)) == ["9999_planted"]
    finally:
        for name in names(package):
            sys.modules.pop(f"planted.{name}", None)


class Later(migrations.Migration):
    """A migration of a test's own."""

    def __init__(self, *operations, atomic=True):
        super().__init__("later", "django_pglock")
        self.operations, self.atomic = list(operations), atomic


INDEX = models.Index(fields=["queue"], name="later")
CHECK = models.CheckConstraint(condition=models.Q(queue="x"), name="later")


@pytest.mark.parametrize(
    "migration",
    [
        Later(AddFieldOnline("task", "a", models.IntegerField(null=True))),
        Later(AddFieldOnline("task", "a", models.DateTimeField(db_default=Now()))),
        Later(AddFieldOnline("task", "a", models.IntegerField(db_default=0))),
        Later(AddIndexOnline("task", INDEX), atomic=False),
        Later(ChangeRows("task", "UPDATE"), AddCheckOnline("task", CHECK)),
        Later(ChangeRows("task", "UPDATE"), ValidateConstraint("task", "later")),
    ],
)
def test_online_migrations_have_no_obstacles(migration):
    assert not obstacles(migration)


@pytest.mark.parametrize(
    "migration",
    [
        Later(AddFieldOnline("task", "a", models.IntegerField(default=0))),
        Later(AddFieldOnline("task", "a", models.FloatField(db_default=Random()))),
        Later(AddFieldOnline("task", "a", models.FloatField(null=True, db_default=Random()))),
        Later(AddFieldOnline("task", "a", models.IntegerField(null=True, db_index=True))),
        Later(AddFieldOnline("task", "a", models.ForeignKey("django_pglock.worker", models.CASCADE, null=True))),
        Later(migrations.AddField("task", "a", models.IntegerField(null=True))),
        Later(AddIndexConcurrently("task", INDEX), atomic=False),
        Later(AddFieldOnline("task", "a", models.IntegerField(null=True)), AddCheckOnline("task", CHECK)),
        Later(AddCheckOnline("task", CHECK), ValidateConstraint("task", "later")),
        Later(AddConstraintNotValid("task", CHECK)),
        Later(migrations.AlterField("task", "queue", models.TextField())),
        Later(migrations.RemoveField("task", "queue")),
        Later(migrations.RenameField("task", "queue", "line")),
        Later(migrations.AddIndex("task", INDEX)),
        Later(AddIndexOnline("task", INDEX)),
        Later(AddIndexOnline("task", INDEX), ValidateConstraint("task", "later"), atomic=False),
        Later(migrations.AddConstraint("task", CHECK)),
        Later(migrations.RunSQL("VACUUM FULL django_pglock_task")),
        Later(migrations.RunPython(migrations.RunPython.noop)),
    ],
)
def test_migrations_that_are_not_online_have_obstacles(migration):
    assert obstacles(migration)
