"""The fixture ``hold_lock`` for the tests of projects. pytest loads this module if the package is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

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
