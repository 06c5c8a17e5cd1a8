"""Fixtures for tests with their own servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections

from tests.conftest import EMPTY


@pytest.fixture
def transactional_db(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The tests' database, without Django's test case: that allows no database but those which were there before it.

    By its name pytest-django knows that the database has to be made. It is emptied after the test, when its workers
    have written what they counted.
    """
    with django_db_blocker.unblock():
        yield
        with connections["default"].cursor() as cursor:
            cursor.execute(EMPTY)


@pytest.fixture
def task_alias(alias: Callable[..., str], settings: Any) -> Callable[..., str]:
    """Like ``alias``, with a backend in TASKS that stores its tasks there: a worker needs one."""

    def add(name: str, **options: Any) -> str:
        backend = {**settings.TASKS["default"], "OPTIONS": {"database": name}}
        settings.TASKS = {**settings.TASKS, name: backend}
        return alias(name, **options)

    return add


@pytest.fixture
def alias(transactional_db: None) -> Iterator[Callable[..., str]]:
    """Give Django one more database for the length of a test: the tests' own, but for the settings that are given."""
    added: list[str] = []

    def add(name: str, **settings: Any) -> str:
        connections.settings[name] = {**connections.settings["default"], "OPTIONS": {}, **settings}
        added.append(name)
        return name

    yield add
    for name in added:
        connections[name].close()
        del connections[name]
        del connections.settings[name]
