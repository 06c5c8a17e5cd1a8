"""Before the first release there is one migration, which makes everything."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from django.db import migrations

from django_pglock import migrations as package
from django_pglock.migrations._operations import CreateView, TableSQL


def test_the_only_migration_creates_and_changes_nothing():
    [name] = [each.name for each in pkgutil.iter_modules(package.__path__) if each.name[0] != "_"]
    only = import_module(f"{package.__name__}.{name}").Migration
    assert name == "0001_initial"
    assert only.initial
    assert {type(each) for each in only.operations} == {migrations.CreateModel, TableSQL, CreateView}
