"""The fixtures ``hold_lock`` and ``enqueued`` for the tests of projects. pytest loads this module by itself."""

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
def enqueued() -> Iterator[Callable[..., Any]]:
    """Return a function that lists the calls of a task function, or of all, from then on to the end of the test.

    As ``django_pglock.testing.enqueued``: ``calls = enqueued(send)``.
    """
    from django_pglock.testing import enqueued

    with ExitStack() as recorded:
        yield lambda function=None: recorded.enter_context(enqueued(function))
