"""Fixtures for the tests of projects that use locks. pytest loads this module if the package is installed.

- ``hold_lock``: ``hold_lock("order", 5)`` holds a lock in another session until the end of the test.
- ``no_locks_left``: fails the test if an advisory lock is held or awaited when it ends. The test uses the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

# No import of Django at module level: pytest loads this module before there are settings.


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
