"""What the tests of the store may use."""

from __future__ import annotations

import pytest

from django_pglock.models import Waiter
from django_pglock.store import result_listener
from tests.db.store.waiting import listener_threads, sessions


@pytest.fixture
def nothing_is_left(eventually):
    yield
    eventually(lambda: sessions() == 0, why="a session is left")
    eventually(lambda: not Waiter.objects.exists(), why="rows are left")
    eventually(lambda: not listener_threads(), why="a thread is left")
    assert not result_listener._listeners
