"""Many calls at once: what is refused before a backend is asked."""

from __future__ import annotations

import pytest

from django_pglock import enqueue_many
from django_pglock.tasks.compat import InvalidTask


def test_a_function_that_is_not_a_task_is_named():
    with pytest.raises(InvalidTask, match=r"enqueue_many was given <built-in function print>, which is not a task"):
        enqueue_many(print, [(1,)])
