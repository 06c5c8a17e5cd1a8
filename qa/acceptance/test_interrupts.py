"""An exception that comes from outside, at any instruction of taking or freeing a lock, leaves nothing held.

A signal's handler that raises (SIGALRM, Ctrl-C, a worker's soft limit) does so between two bytecodes. Each of these
tests runs the same block again and again, and raises at the first boundary, at the second, and so on to the last one.

The short form raises at every seventh boundary of the plainest block, and at fewer of the others.
``PGLOCK_INTERRUPTS=all`` raises at every one.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
import time
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest
from django.db import connection, transaction

import django_pglock
from django_pglock import Lease, LockError, lock, lock_all, semaphore, try_lock
from django_pglock.models import Lease as LeaseRow
from django_pglock.postgres.connections import in_transaction
from tests.concurrency.locks.test_handle import locks_held
from tests.concurrency.locks.test_pools import pooled as pooled  # a fixture
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)
#: Only boundaries in our own code count. The boundary around a call covers what Django and psycopg do in it.
OURS = str(Path(django_pglock.__file__).parent)
RETURN_VALUE = dis.opmap["RETURN_VALUE"]
IS_SHORT = os.environ.get("PGLOCK_INTERRUPTS") != "all"


class Interrupt(BaseException):
    """What the handler raises."""


class At:
    """Raise at the boundary of this number, once; count them all."""

    def __init__(self, number, *, spares_ends=False):
        self.number = number
        self.spares_ends = spares_ends
        self.count = 0
        self.place = "nowhere"

    def __enter__(self):
        # Otherwise Python might collect a handle of an earlier round here, and ignore the interrupt in its callback.
        gc.disable()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        gc.enable()

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        return self.trace_ours

    def trace_ours(self, frame, event, arg):
        is_spared = self.spares_ends and (
            frame.f_code.co_code[frame.f_lasti] == RETURN_VALUE or frame.f_code.co_name in ("__exit__", "caller")
        )
        if event == "opcode" and not is_spared:
            self.count += 1
            if self.count == self.number:
                self.place = f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                raise Interrupt
        return self.trace_ours


def _note_interrupts(swallowed):
    """Return a hook that notes where Python swallows an interrupt."""

    def hook(unraisable):
        if unraisable.exc_type is Interrupt:
            swallowed.append(unraisable.object)

    return hook


def interrupt_everywhere(use, check, *, step=1, spares_ends=False):
    """Interrupt ``use`` at every boundary, in the short form at each ``step``-th one, and check after each."""
    # Objects from before are not collected each time.
    gc.collect()
    gc.freeze()
    try:
        return _interrupt_everywhere(use, check, step if IS_SHORT else 1, spares_ends)
    finally:
        gc.unfreeze()


def _in_a_generator(use):
    """Call a function in a generator, which has a state of its own for the exception that is handled.

    At the instruction that ends an ``except``, only tracing can raise. Then this exception counts as handled until the
    end of the thread, and tests that follow would find it as a context and in ``sys.exc_info()``.
    """
    yield use()


def _interrupt_everywhere(use, check, step, spares_ends):
    number = untraced = 0
    while True:
        number += step
        at = At(number, spares_ends=spares_ends)
        swallowed = []
        try:
            with mock.patch.object(sys, "unraisablehook", _note_interrupts(swallowed)), at:
                next(_in_a_generator(use))
        except Interrupt:
            pass
        except LockError:
            # The release was interrupted, so the session was ended, and the outer lock with it.
            pass
        assert sys.exc_info() == (None, None, None)
        assert not swallowed, f"{swallowed} runs as a destructor, and Python swallows what it raises"
        check(f"{number}, {at.place}")
        if at.count == 0:
            # Python 3.12 now and then traces no instruction of a call at all.
            untraced += 1
            assert untraced < 50, "no instruction of ours was traced"
            number -= step
        elif at.count < number:
            return number


def nothing_is_left(somebody, *names):
    def check(number):
        gc.collect()
        where = f"interrupted at boundary {number}"
        assert not connection.in_atomic_block, where
        assert connection.connection is None or not in_transaction(connection), where
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
            )
            assert cursor.fetchone() == (0,), where
        for name in names:
            assert _free_soon(somebody, name), f"{where}: {name} is held"

    return check


def _free_soon(somebody, name):
    """Wait until a lock is free: a session ends, and an alarm frees what was left in a broken transaction, after us."""
    limit = time.monotonic() + 60
    while not somebody.can_have(name):
        if time.monotonic() > limit:
            return False
    return True


KINDS = {
    "session": lambda: lock("a"),
    "try": lambda: try_lock("a"),
    "timeout": lambda: lock("a", timeout=5),
    "own transaction": lambda: lock("a", scope="transaction", timeout=5),
    "several": lambda: lock_all("a", "b", timeout=0),
    "semaphore": lambda: semaphore("s", limit=2, timeout=5),
    "max_hold": lambda: lock("a", max_hold=60, timeout=0),
}


NAMES = dict.fromkeys(KINDS, ("a",)) | {"several": ("a", "b"), "semaphore": ("s#1", "s#2", "s#queue")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_is_interrupted_anywhere_leaves_nothing_held(kind, somebody):
    def use():
        with KINDS[kind]():
            pass

    use()
    # The first two contain nearly all of the code; the others differ from one of these in their statements alone.
    step = {"session": 7, "timeout": 16, "semaphore": 24}.get(kind, 60)
    boundaries = interrupt_everywhere(use, nothing_is_left(somebody, *NAMES[kind]), step=step)
    assert boundaries > 500


#: Where Python's own collections of weak references run code at the end of an object.
WEAK = weakref.__file__


# The coroutine that an interrupted call has made and not yet passed on.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("kind", [*KINDS, "lease", "inside atomic"])
def test_no_code_runs_in_a_destructor(kind):
    """An exception of a time limit or of Ctrl-C that arrives there would vanish, so it is raised in each function."""
    calls, swallowed = 0, []

    def use():
        with (
            transaction.atomic() if kind == "inside atomic" else nullcontext(),
            Lease("a") if kind == "lease" else KINDS.get(kind, KINDS["timeout"])(),
        ):
            pass

    def trace(frame, event, arg):
        nonlocal calls
        if frame.f_code.co_filename.startswith((OURS, WEAK)):
            calls += 1
            if calls == number:
                sys.settrace(None)
                raise Interrupt

    use()
    gc.disable()
    number = 0
    try:
        with mock.patch.object(sys, "unraisablehook", _note_interrupts(swallowed)):
            while calls >= number:
                calls, number = 0, number + 1
                with suppress(Interrupt, LockError):
                    sys.settrace(trace)
                    use()
                sys.settrace(None)
                assert not swallowed, f"{swallowed} runs as a destructor, and Python swallows what it raises"
    finally:
        sys.settrace(None)
        gc.enable()
    assert number > 20


# The coroutine that an interrupted call has made and not yet passed on.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("by", ["with", "handle"])
def test_a_lease_that_is_interrupted_anywhere_is_released(by, eventually):
    """Without a ttl, nothing else would end the lease."""

    def use():
        if by == "with":
            with Lease("a", timeout=5):
                pass
        else:
            handle = Lease("a", timeout=5).acquire()
            handle.release()

    def check(where):
        gc.collect()
        eventually(lambda: not LeaseRow.objects.held().exists(), why=f"the lease is held: {where}")

    use()
    interrupt_everywhere(use, check, step=41)


def test_an_interrupt_leaves_an_outer_lock_held_or_reported_as_lost(somebody):
    """If the session had to be ended, the outer lock is lost, and its handle reports it."""
    lost = []

    def use():
        try:
            with lock("outer") as outer:
                try:
                    with lock("inner"):
                        pass
                finally:
                    try:
                        outer.assert_held()
                    except LockError:
                        lost.append(1)
                    else:
                        sys.settrace(None)
                        assert not somebody.can_have("outer")
        finally:
            pass

    interrupt_everywhere(use, nothing_is_left(somebody, "outer", "inner"), step=29)


def test_a_session_of_a_pool_goes_back_without_a_lock(pooled, somebody):
    def use():
        with lock("a", timeout=5):
            pass
        connection.close()

    def check(number):
        gc.collect()
        connection.close()
        for name in ("a",):
            assert _free_soon(somebody, name), f"interrupted at boundary {number}: {name} is held in the pool"

    interrupt_everywhere(use, check, step=29)


def test_the_check_for_interrupts_finds_a_lock_that_stays_held(somebody):
    """A lock that is taken by hand, and whose release is interrupted, is found."""

    def use():
        execute_sql("SELECT pg_advisory_lock(1)")
        with lock("a"):
            pass
        execute_sql("SELECT pg_advisory_unlock(1)")

    with pytest.raises(AssertionError, match="interrupted at boundary"):
        interrupt_everywhere(use, nothing_is_left(somebody))
    execute_sql("SELECT pg_advisory_unlock_all()")
    assert locks_held() == 0
