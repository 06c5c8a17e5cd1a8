"""Two persistent sessions, each in a thread of its own, that stop at a chosen statement with its transaction open.

A verb runs unchanged. An execute wrapper of its connection counts the statements. At the chosen one the wrapper opens
the transaction that the statement would have had for itself, so that the statement is executed and not committed when
the verb stops. The test then lets others continue until they end or wait for a lock, as the server reports, and
decides whether the statement is committed or rolled back. No step waits for a fixed time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from random import Random
from typing import Any

from django.db import OperationalError, connection, connections
from psycopg.errors import LockNotAvailable
from psycopg.pq import TransactionStatus

from tests.conftest import NEVER

#: What a stopped session may do with its statement.
COMMIT, ROLL_BACK = "commit", "roll back"
#: For ``stop_at``, and how many of its statements are then the last one.
EACH, DEATHS = -1, 0.02
READ_COMMITTED, REPEATABLE_READ = "read committed", "repeatable read"
#: Whether the session's transaction has changed or locked anything so far.
HAS_WRITTEN = """
SELECT pg_current_xact_id_if_assigned() IS NOT NULL
    OR EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory')
"""
#: How many times a verb has to repeat a statement until it counts as polling.
POLLS = 20


class Died(BaseException):
    """The process of the verb has ended here: what was not committed is undone, and nothing follows."""


@dataclass
class VerbRun:
    """One run of a verb: where it stops, and what came of it."""

    verb: Callable[[], Any]
    level: str = READ_COMMITTED
    #: The number of the statement at which it stops; 0: nowhere; ``EACH``: at each of them.
    stop_at: int = 0
    #: Only for a run of the verb alone: record for each statement whether its transaction has written.
    is_recording: bool = False
    statements: list[str] = field(default_factory=list)
    writes: list[bool] = field(default_factory=list)
    error: BaseException | None = None
    #: A verb has left something to upkeep, because a row was locked for longer than its statement waits.
    gave_up: bool = False


class SessionThread:
    """A session with a thread. ``start`` starts a verb; ``wait_until_stopped`` waits until it can do no more alone."""

    def __init__(self, name: str) -> None:
        self.run = VerbRun(lambda: None)
        self.has_ended = self.has_stopped = False
        self.pid = 0
        self._is_idle = threading.Event()
        self._runs: SimpleQueue[VerbRun | None] = SimpleQueue()
        self._decisions: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.start(VerbRun(self._open))
        self.wait_until_ended()

    def start(self, run: VerbRun) -> None:
        """Start a verb."""
        self.run = run
        self.has_ended = self.has_stopped = False
        self._is_idle.clear()
        self._runs.put(run)

    def resume(self, decision: str = COMMIT) -> None:
        """Let the stopped verb continue: to the moment after the commit of its statement, and then to its end."""
        self.has_stopped = False
        self._is_idle.clear()
        self._decisions.put(decision)

    def close(self) -> None:
        """End the thread and its session."""
        if not self.has_ended:
            # A case has failed, and this verb would keep its locks forever.
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s)", [self.pid])
            for _ in range(2):
                self._decisions.put(ROLL_BACK)
        self._runs.put(None)
        self._thread.join(NEVER)

    def wait_until_stopped(self) -> None:
        """Return when the verb has ended, has stopped, or waits for another session, as the server says."""
        deadline = time.monotonic() + NEVER
        before = len(self.run.statements)
        # The usual case needs no question to the server, also on a busy machine, which is not asked again at once.
        pause = 0.01
        while not (self._is_idle.wait(pause) or self._is_blocked() or self._polls_for_lock(before)):
            pause = min(2 * pause, 0.05)
            assert time.monotonic() < deadline, f"neither ended nor blocked: {self.run.statements[-1:]}"

    def wait_until_ended(self) -> None:
        """Wait for the end of the verb, and for no other session's help."""
        assert self._is_idle.wait(NEVER), f"waits forever: {self.run.statements[-1:]}"
        assert self.has_ended

    def _is_blocked(self) -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [self.pid])
            return bool(cursor.fetchone()[0])

    def _polls_for_lock(self, before: int) -> bool:
        """Return whether the verb asks again and again whether a row is still locked, as the settler does.

        Before, it has waited for the lock for 0.1 s. On a busy machine nobody has seen that.
        """
        last = self.run.statements[before:][-POLLS:]
        return len(last) == POLLS and len(set(last)) == 1

    def _open(self) -> None:
        wrapper = connections["default"]
        wrapper.ensure_connection()
        wrapper.execute_wrappers.append(self._execute)
        self.pid = wrapper.connection.info.backend_pid

    def _run(self) -> None:
        level = READ_COMMITTED
        while (run := self._runs.get()) is not None:
            try:
                if run.level != level:
                    level = run.level
                    raw = connections["default"].connection
                    raw.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}")
                run.verb()
            except BaseException as error:
                run.error = error
            self.has_ended = True
            self._is_idle.set()
        connections.close_all()

    def _execute(self, execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        run, raw = self.run, connections["default"].connection
        run.statements.append(sql)
        if not run.is_recording and run.stop_at not in (EACH, len(run.statements)):
            return self._try(execute, sql, *rest)
        # Settling in the task's own transaction ends with the COMMIT in the same message.
        sql, ends, _ = sql.partition(";COMMIT") if sql.endswith(";COMMIT") else (sql, "", "")
        opens = raw.autocommit and raw.pgconn.transaction_status == TransactionStatus.IDLE
        if opens:
            raw.execute("BEGIN")
        try:
            answer = self._try(execute, sql, *rest)
            if run.is_recording:
                run.writes.append(raw.execute(HAS_WRITTEN).fetchone()[0])
            elif self._stop() == ROLL_BACK:
                raise Died
        except BaseException:
            if opens:
                raw.execute("ROLLBACK")
            raise
        if opens or ends:
            raw.execute("COMMIT")
        if not run.is_recording:
            self._stop()
        return answer

    def _try(self, execute: Callable[..., Any], *statement: Any) -> Any:
        try:
            return execute(*statement)
        except OperationalError as error:
            self.run.gave_up |= isinstance(error.__cause__, LockNotAvailable)
            raise

    def _stop(self) -> str:
        self.has_stopped = True
        self._is_idle.set()
        return self._decisions.get()


class SwallowedErrors(logging.Handler):
    """Collects the exceptions that Django logs and does not raise: those of functions that run after a commit."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.errors.append(record.exc_info[1])


@contextmanager
def swallowed_errors() -> Iterator[SwallowedErrors]:
    """Collect what Django logs of functions that fail after a commit."""
    handler, logger = SwallowedErrors(), logging.getLogger("django.db.backends.base")
    was_propagating, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = was_propagating


def interleave(sessions: Sequence[SessionThread], runs: Sequence[VerbRun], ending: str) -> bool:
    """Run verbs: the first stops at its statement, the others start one by one; return whether one of them had to wait.

    Then the first commits or dies. The others continue as far as they can before the first takes its next step.
    """
    for session, run in zip(sessions, runs, strict=False):
        session.start(run)
        session.wait_until_stopped()
    first, *others = sessions[: len(runs)]
    was_blocked = not all(session.has_ended for session in others)
    if first.has_stopped:
        first.resume(ending)
        for session in (first, *others):
            session.wait_until_stopped()
        if first.has_stopped:
            first.resume()
    for session in (first, *others):
        session.wait_until_ended()
    return was_blocked


def walk(sessions: Sequence[SessionThread], runs: Sequence[VerbRun], random: Random) -> bool:
    """Run verbs that stop at each statement, and let one at a time continue or die; return whether one had to wait."""
    was_blocked = False
    for session, run in zip(sessions, runs, strict=True):
        session.start(run)
        session.wait_until_stopped()
    while not all(session.has_ended for session in sessions):
        if stopped := [session for session in sessions if session.has_stopped]:
            random.choice(stopped).resume(ROLL_BACK if random.random() < DEATHS else COMMIT)
        for session in sessions:
            session.wait_until_stopped()
        was_blocked |= not all(session.has_ended or session.has_stopped for session in sessions)
    return was_blocked
