from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection


@pytest.fixture
def new_table(db):
    """A table of tasks without what other tests rolled back, which the planner counts, and without statistics.

    Autovacuum analyzes the table now and then, with the rows of other tests, and TRUNCATE leaves the statistics.
    """
    make_new()


def make_new() -> None:
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_pglock_task CASCADE")
        cursor.execute("DELETE FROM pg_statistic WHERE starelid = 'django_pglock_task'::regclass")


@pytest.fixture(scope="module")
def fill(django_db_setup: None, django_db_blocker: Any) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Fill a new table of tasks once for a module. What its tests change is rolled back, also by ``new_table``."""
    is_filled = False

    def fill(function: Callable[[], Any]) -> Any:
        nonlocal is_filled
        assert not is_filled, "one table has the rows of one function"
        is_filled = True
        with django_db_blocker.unblock():
            make_new()
            return function()

    yield fill
    with django_db_blocker.unblock():
        make_new()
