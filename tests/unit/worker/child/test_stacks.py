"""Reading the stacks of other threads."""

from __future__ import annotations

import gc
import sys
import threading
import traceback

import pytest

from django_pglock.worker.child.runners import stacks


def test_the_stack_of_another_thread_is_there():
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait)
    thread.start()
    try:
        with stacks() as innermost:
            codes = {frame.f_code for frame, _ in traceback.walk_stack(innermost[thread.ident])}
        assert threading.Thread.run.__code__ in codes
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_meanwhile_and_the_setting_is_as_before(is_enabled):
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with stacks():
            assert gc.isenabled() is (is_enabled and sys.version_info >= (3, 12))
        assert gc.isenabled() is is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
