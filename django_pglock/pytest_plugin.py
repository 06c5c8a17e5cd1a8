"""Fixtures for the tests of projects that use locks. pytest loads this module if the package is installed.

- ``hold_lock``: ``hold_lock("order", 5)`` holds a lock in another session until the end of the test.
- ``no_locks_left``: fails the test if an advisory lock is held or awaited when it ends. With
  ``django_pglock_no_locks_left = true`` in pytest's configuration, every test that uses the database has this fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

# No import of Django at module level: pytest loads this module before there are settings.

OPTION = "django_pglock_no_locks_left"
#: The fixtures by which pytest-django gives a test the database.
DATABASE_FIXTURES = {"db", "transactional_db", "django_db_reset_sequences", "django_db_serialized_rollback"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option in pytest's configuration."""
    parser.addini(OPTION, "Fail tests that use the database and leave an advisory lock.", type="bool", default=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give ``no_locks_left`` to each test that uses the database, if the option is set."""
    if config.getini(OPTION):
        for item in items:
            names = getattr(item, "fixturenames", [])
            if item.get_closest_marker("django_db") or not DATABASE_FIXTURES.isdisjoint(names):
                item.add_marker(pytest.mark.usefixtures("no_locks_left"))
                names.insert(0, "no_locks_left")


@pytest.fixture
def hold_lock() -> Iterator[Callable[..., None]]:
    """Return a function that holds a lock in another session until the end of the test.

    Arguments and errors as for ``django_pglock.testing.hold``: ``hold_lock("order", 5, shared=True)``.
    """
    from django_pglock.testing import hold

    with ExitStack() as held:
        yield lambda *parts, **options: held.enter_context(hold(*parts, **options))


@pytest.fixture
def no_locks_left(_django_db_helper: Any) -> Iterator[None]:
    """Fail if an advisory lock is held or awaited when the test ends, except the package's own locks."""
    from django_pglock.testing import assert_no_locks

    yield
    assert_no_locks()
