"""Attempts in another thread."""

from __future__ import annotations

import os
import threading

from django_pglock.locks.retries import retry
from tests.conftest import NEVER


def test_an_attempt_is_repeated_until_it_is_done():
    """An attempt that raises does not stop the others. It may run code of others: a handler of the log."""
    is_over, answers = threading.Event(), iter([False, False])
    retry(lambda: 1 / 0)
    retry(attempt := lambda: next(answers, None) is None and not is_over.set())
    retry(attempt)
    assert is_over.wait(NEVER), "the thread has ended"
    assert next(answers, "tried") == "tried"


def test_a_forked_process_has_a_thread_of_its_own():
    retry(lambda: True)
    child = os.fork()
    if not child:
        is_over = threading.Event()
        retry(lambda: not is_over.set())
        os._exit(0 if is_over.wait(NEVER) else 1)
    assert os.waitpid(child, 0)[1] == 0
