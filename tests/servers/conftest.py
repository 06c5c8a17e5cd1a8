"""What the tests with servers of their own may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections


@pytest.fixture
def alias(django_db_setup: None, django_db_blocker: Any) -> Iterator[Callable[..., str]]:
    """Give Django one more database for the length of a test: the tests' own, but for the settings that are given.

    Tests that use it write no rows. Django's test cases would let them use only what was there at their start.
    """
    added: list[str] = []

    def add(name: str, **settings: Any) -> str:
        connections.settings[name] = {**connections.settings["default"], "OPTIONS": {}, **settings}
        added.append(name)
        return name

    with django_db_blocker.unblock():
        yield add
    for name in added:
        connections[name].close()
        del connections[name]
        del connections.settings[name]
