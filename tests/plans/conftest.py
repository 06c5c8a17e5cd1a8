from __future__ import annotations

import re
from importlib import import_module
from pkgutil import iter_modules

import pytest
from django.db import connection

from django_pglock import store


@pytest.fixture
def new_table(db):
    """A table of tasks without what other tests rolled back: that is still there, dead, and the planner counts it."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_pglock_task CASCADE")


#: Every statement of the store by its name.
STATEMENTS = {
    name: text
    for module in iter_modules(store.__path__)
    for name, text in vars(import_module(f"{store.__name__}.{module.name}")).items()
    if name.isupper() and isinstance(text, str) and re.search(r"\b(SELECT|INSERT|UPDATE|DELETE)\b", text)
}
