"""What runs attempts, and how a running attempt is stopped.

An attempt runs in a thread, or in a coroutine of the event loop. Both are runners. The watchdog knows them all. It
stops an attempt whose task is cancelled or whose time is over, and stops it again each second until it has ended.

To stop an attempt is to cancel the statement that it executes, and its coroutine. No exception is sent into a thread
from outside, because it could be raised between two lines that belong together, such as those that take a lock. Before
and after each statement, the thread itself raises ``TaskStopped`` if its attempt must end: see ``stopping.py``.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import dropwhile, islice
from traceback import StackSummary, walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import connections
from django.db.backends.signals import connection_created

from django_pglock.error_reading import one_line, storable
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import cancel_statement, shut_down_socket
from django_pglock.worker.child.logs import log_claim
from django_pglock.worker.child.task_connections import end_transaction, expect_next_task, is_closed, is_reusable
from django_pglock.worker.service import Stage

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

    from django_pglock.tasks.claim import Claim
    from django_pglock.worker.child.attempt import Attempt

logger = get_logger(WORKER)

#: Seconds between two attempts to stop a function whose time is over and that still runs.
BETWEEN_STOPS = 1.0
#: The modules that debuggers of Python run in: pdb, ipdb and pudb in bdb, and those of editors in pydevd.
DEBUGGERS = ("bdb", "pydevd")
#: Seconds after the timeout after which the connection of a statement that still runs is closed. The connection may be
#: half open.
CANCEL_GRACE_PERIOD = 10.0


class Watchdog:
    """Knows what runs in this process, and stops it. The main thread calls ``check()``.

    ``send`` tells the parent of attempts that have a deadline, because code in C may keep all threads of this process
    from running. ``changed`` is called when the next check may be due earlier, and ``long_overdue`` once for each
    attempt that still runs ``grace_period`` seconds after its deadline. An attempt whose deadline is over while a
    person debugs the process has no deadline any more.
    """

    def __init__(
        self,
        *,
        grace_period: float = math.inf,
        send: Callable[..., None] = lambda **_: None,
        changed: Callable[[], None] = lambda: None,
        long_overdue: Callable[[Attempt], None] = lambda _: None,
    ) -> None:
        self.grace_period = grace_period
        self.send = send
        self.changed = changed
        self.long_overdue = long_overdue
        self.runners: set[Runner] = set()
        #: Whether the process has to end: functions with steps end before their next one.
        self.is_stopping = False
        self._sleeps_until = math.inf

    def watch_this_thread(self) -> TaskThread:
        """Return what runs the functions of the current thread from now on."""
        thread = TaskThread(self)
        self.runners.add(thread)
        return thread

    def threads(self) -> list[TaskThread]:
        """Return the threads that run functions."""
        return [each for each in list(self.runners) if isinstance(each, TaskThread)]

    def running(self) -> list[tuple[Runner, Attempt]]:
        """Return the attempts that run now, with their runners."""
        return [(each, attempt) for each in list(self.runners) if (attempt := each.attempt) is not None]

    def watch(self, attempt: Attempt) -> None:
        """Note that an attempt with a deadline has begun."""
        for claim in attempt.claims:
            self.send(began=[claim.id, claim.attempt, attempt.deadline])
        if attempt.deadline < self._sleeps_until:
            self.changed()

    def forget(self, attempt: Attempt) -> None:
        """Note that an attempt with a deadline has ended."""
        for claim in attempt.claims:
            self.send(ended=[claim.id, claim.attempt])

    def check(self) -> float:
        """Stop what is overdue. Return the seconds until the next check."""
        # From here on, each watch() calls ``changed``, until it is known when the next check is due.
        self._sleeps_until = math.inf
        now = time.monotonic()
        for runner, attempt in self.running():
            if attempt.check_at > now:
                continue
            if is_debugged():
                attempt.deadline = attempt.check_at = math.inf
                self.forget(attempt)
            else:
                attempt.check_at = now + BETWEEN_STOPS
                if now - attempt.deadline > self.grace_period and not attempt.is_long_overdue:
                    attempt.is_long_overdue = True
                    self.long_overdue(attempt)
                stop(runner, attempt)
        self._sleeps_until = min((attempt.check_at for _, attempt in self.running()), default=math.inf)
        return max(0.0, self._sleeps_until - time.monotonic())


def stop(runner: Runner, attempt: Attempt) -> None:
    """Stop an attempt in a thread of its own, because a database that does not answer must not delay other stops."""
    with contextlib.suppress(RuntimeError):  # The process has no thread left. The parent ends it, if it stays so.
        threading.Thread(target=runner.stop, args=[attempt], name="lockworker-stop", daemon=True).start()


class Runner:
    """Runs one attempt after the other. Other threads read ``attempt``."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        #: The attempt whose function runs now.
        self.attempt: Attempt | None = None
        #: This is the copy of a runner in a process that a task has forked.
        self.is_forked = False
        _all.add(self)

    def release(self) -> None:
        """Note that the function of the attempt has ended."""
        self.attempt = None

    def runs(self, claim: Claim) -> bool:
        """Return whether this runs a claim."""
        attempt = self.attempt
        return attempt is not None and claim in attempt.claims

    def stop(self, attempt: Attempt) -> None:
        """Stop an attempt, if it still runs here. For other threads. May wait for the server."""

    def stack(self, innermost: Mapping[int, FrameType]) -> str:
        """Return the stack of what runs here, by the innermost frame of each thread."""
        raise NotImplementedError


class TaskThread(Runner):
    """The current thread, which runs functions, or the SQL of coroutines. The thread itself makes this object."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(watchdog)
        #: The claim that the thread runs, from the first to the last statement for it.
        self.claim: Claim | None = None
        #: The claim while its function does not run.
        self.stage = Stage()
        self.ident = threading.get_ident()
        self._stopping = threading.Lock()
        self._sessions: list[weakref.ReferenceType[DatabaseWrapper]] = []
        _here.thread = self
        connection_created.connect(_add_session, dispatch_uid="django_pglock.watchdog")

    def release(self) -> None:
        # Under the lock: a cancel request that is still in flight would cancel a statement of the next task.
        with self._stopping:
            self.attempt = None

    def runs(self, claim: Claim) -> bool:
        return self.claim is claim or super().runs(claim)

    def stack(self, innermost: Mapping[int, FrameType]) -> str:
        return stack_text(innermost.get(self.ident))

    def stop(self, attempt: Attempt) -> None:
        # If the lock is held, another stop is in progress, or the attempt has just ended.
        if self._stopping.acquire(blocking=False):
            try:
                if self.attempt is attempt:
                    self._cancel_statements(attempt)
            finally:
                self._stopping.release()

    def sessions(self) -> Iterator[DatabaseWrapper]:
        """Yield the sessions of this thread."""
        return filter(None, [each() for each in self._sessions])

    def _cancel_statements(self, attempt: Attempt) -> None:
        for session in self.sessions():
            if session.vendor != "postgresql" or session.connection in attempt.shut_down:
                continue
            try:
                is_busy = cancel_statement(session)
            except psycopg.Error as error:
                # The cancel request may arrive later, and would then cancel the next statement of the session.
                _shut_down(session, attempt, f"could not be cancelled ({one_line(error)})")
            else:
                if is_busy and time.monotonic() - attempt.deadline > CANCEL_GRACE_PERIOD:
                    # The server has cancelled the statement, or executes none, but its answer does not reach us.
                    _shut_down(session, attempt, "does not end although the server was asked to cancel it")

    def clean_up(self, claim: Claim) -> None:
        """Close connections that a task has left in a state that the next task must not get.

        Called after each task, so it only reads attributes. A few of them take as long as one call. libpq knows without
        a query whether a transaction is open, also one that Django has not begun.
        """
        for each in self._sessions:
            session = each()
            if session is None:
                continue
            if not is_reusable(session):
                close(session, claim)
            expect_next_task(session)

    def leave(self) -> None:
        """Note that this thread runs other code than tasks from now on."""
        _here.__dict__.pop("thread", None)

    def add(self, session: DatabaseWrapper) -> None:
        """Add a session that the thread has opened. The list is replaced, because others may be reading it."""
        others = [each for each in self._sessions if each() not in (None, session)]
        self._sessions = [*others, weakref.ref(session)]


def close(session: DatabaseWrapper, claim: Claim) -> None:
    """Close a session of this thread that a task has left in a transaction, or has ended."""
    if connections[session.alias] is not session:
        # If Django has another connection for this thread, this one may be in use elsewhere.
        return
    # Without AUTOCOMMIT, each SELECT leaves a transaction open.
    if session.in_atomic_block or (session.settings_dict["AUTOCOMMIT"] and not is_closed(session)):
        log_claim(
            logging.WARNING,
            claim,
            "has left a transaction open, autocommit off, or its connection in use, in database %r. Its "
            "uncommitted changes are rolled back",
            session.alias,
        )
    end_transaction(session)


def _shut_down(session: DatabaseWrapper, attempt: Attempt, what: str) -> None:
    text = f"executes a statement that {what}. Its connection to database %r is closed"
    log_claim(logging.WARNING, attempt.claim, text, session.alias)
    attempt.shut_down = (*attempt.shut_down, session.connection)
    shut_down_socket(session)


_here = threading.local()
#: The sessions of threads that tasks have started, as far as Django opened them.
_of_others: list[tuple[weakref.ReferenceType[DatabaseWrapper], threading.Thread]] = []


def _add_session(connection: Any, **kwargs: Any) -> None:
    # The signal is sent in the thread that will use the connection.
    thread: TaskThread | None = getattr(_here, "thread", None)
    if thread is not None:
        thread.add(connection)
    elif connection in connections.all(initialized_only=True):
        _of_others.append((weakref.ref(connection), threading.current_thread()))


def close_sessions_of_ended_threads() -> None:
    """Close the sessions of threads of tasks that have ended. Python would do that when it next collects garbage."""
    for each in list(_of_others):
        session, thread = each[0](), each[1]
        if session is None or not thread.is_alive():
            _of_others.remove(each)
            # Not by Django, which lets only the thread itself close its session.
            with contextlib.suppress(Exception):
                session.connection.close()  # type: ignore[union-attr]


_all: weakref.WeakSet[Runner] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for runner in _all:
        runner.is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def is_debugged() -> bool:
    """Return whether a person has stopped a thread of this process in a debugger."""
    with stacks() as innermost:
        frames = (frame for each in innermost.values() for frame, _ in walk_stack(each))
        return any(str(frame.f_globals.get("__name__", "")).startswith(DEBUGGERS) for frame in frames)


# The stack of a running task, as text: files, lines, functions and source lines, but no values of variables.
#
# Another thread reads the frames. It needs the GIL only for a moment, so it can read the stack of a function that
# computes in Python. If C code keeps the GIL, the stack is read when that code returns.


#: From 3.12 on, Python collects garbage only between two bytecodes.
COLLECTS_ANYWHERE = sys.version_info < (3, 12)
#: The number of innermost frames that are read of a stack, and of last characters of the text that are kept.
MOST_FRAMES, MOST_CHARACTERS = 200, 30_000
#: The modules of the outermost frames, which are the same for each task and are left out.
_WAY_TO_TASKS = ("threading", "concurrent.futures.thread", "asyncio.", "asgiref.", "django_pglock.worker.")


@contextlib.contextmanager
def stacks() -> Iterator[dict[int, FrameType]]:
    """Return the innermost frame of each thread, by the ident of the thread. Read the frames only in this block.

    Before Python 3.12, the creation of a frame object may start a garbage collection, and a finalizer may let other
    threads run. Then the frame may end before the new object refers to it, and Python reads freed memory. So garbage
    collection is off in this block.
    """
    is_paused = COLLECTS_ANYWHERE and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        yield sys._current_frames()  # noqa: SLF001 - there is no other name for it
    finally:
        if is_paused:
            gc.enable()


def stack_text(innermost: FrameType | None) -> str:
    """Return the stack of a thread as text, the most recent call last. Empty: the thread has ended."""
    # Without the check, walk_stack() would read the stack of the caller.
    return "" if innermost is None else _text(frame for frame, _ in walk_stack(innermost))


def coroutine_text(coroutine: Any) -> str:
    """Return the stack of a suspended coroutine as text: the coroutine, the one that it awaits, and so on."""
    return _text(reversed(list(islice(_inwards(coroutine), MOST_FRAMES))))


def _text(frames: Iterable[FrameType]) -> str:
    """Return frames as text. The innermost frame comes first."""
    found = list(islice(frames, MOST_FRAMES))[::-1]
    own = list(dropwhile(_leads_to_task, found)) or found
    text = "".join(StackSummary.extract((frame, frame.f_lineno) for frame in own).format())
    return storable(text)[-MOST_CHARACTERS:]


def _inwards(coroutine: Any) -> Iterator[FrameType]:
    # asyncio's own Task.get_stack() ends at the outermost coroutine.
    while coroutine is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(coroutine, f"{kind}_frame")), None)
        frame = kind and getattr(coroutine, f"{kind}_frame")
        if not frame:
            return
        yield frame
        coroutine = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _leads_to_task(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_WAY_TO_TASKS)
