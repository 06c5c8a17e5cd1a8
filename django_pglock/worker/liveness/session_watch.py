"""The session watch: ends sessions on which an answer never comes.

It watches the sessions of the worker's task threads, of coroutines, and of threads that tasks start.

A connection may be half open forever: a frozen proxy or pooler still acknowledges data, so neither TCP nor the server
notices. The duration alone does not show this, because a statement may take long. So if there is no answer for ten
seconds, the watch asks the server about the session, on another session of the same database alias:

    what the server reports                   what the watch does
    ----------------------------------------  -----------------------------------------------------------------
    it executes the statement                 nothing; after a minute it logs one line about the wait
    it has no such session                    ends the session
    the session is idle                       ends it: the answer was lost, or the statement never arrived
    it waits for the client (three times)     ends it: client and server wait for each other, so the network is
                                              interrupted
    nothing: it cannot be reached (3 times)   ends it

To end a session, the watch shuts its socket down, so that the waiting thread gets an ``OperationalError``. The watch
counts checks, not seconds, because a stopped process does not wait.

If a server does not answer, a question takes seconds. So each question has its own thread, and the watch continues to
check and end sessions of other aliases. An alias has at most one such thread, and none while all its sessions get
answers.

Behind a pooler, the process number of a session is the pooler's. There, a statement counts as lost if no statement in
the database is as old as this one. Several standbys may share one address, and each knows only its own sessions. So if
a standby does not know a session, this is only logged.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from django.db import Error as DatabaseFailure
from django.db.backends.signals import connection_created

from django_pglock.error_reading import one_line
from django_pglock.postgres.activity import Activity, ServerView, view_of_server
from django_pglock.postgres.connection_registry import register_connection
from django_pglock.postgres.connections import shut, shut_down_socket
from django_pglock.postgres.pending_statements import PendingStatement, pending_statements
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.worker.service import Service, logger

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

    from django_pglock.tasks.claim import Claim

#: Seconds between two checks.
CHECK_INTERVAL = 1.0
#: Checks without an answer before the server is asked for the first time, and from one question to the next.
CHECKS_BEFORE_FIRST_QUESTION, CHECKS_BETWEEN_QUESTIONS = 10, 5
#: Seconds for the server to accept a connection for a question, and to answer each statement of it.
QUESTION_TIMEOUT = 5.0
#: Seconds for which an answer may be in transit between server and client.
LONGEST_TRANSIT = 5.0
#: Questions in a row that find no server, or both sides waiting for each other, before the session is ended.
QUESTIONS_BEFORE_END = 3
#: Checks before a session behind a pooler is ended. Its statement may wait in the pooler for a server session.
CHECKS_BEHIND_POOLER = 45
#: Checks after which the log names a thread that still waits.
CHECKS_BEFORE_REPORT = 60
#: Offset in tcp_info of the milliseconds since data was last received. Linux.
LAST_DATA_RECEIVED = 52
IDLE_STATES = ("idle", "idle in transaction", "idle in transaction (aborted)")


class SessionWatch(Service):
    """Checks every second which sessions wait for an answer. ``claim_of`` returns a thread's claim by its ident."""

    name = "session watch"

    def __init__(self, claim_of: Callable[[int | None], Claim | None]) -> None:
        super().__init__()
        self._claim_of = claim_of
        self._silent: dict[int, SilentSession] = {}
        # The sessions that questions are asked on, by alias: open only while there is something to ask.
        self._sessions: dict[str, DatabaseWrapper] = {}
        # The questions whose answers the watch has not taken, by alias.
        self._questions: dict[str, Question] = {}

    def start(self) -> None:
        connection_created.connect(register_connection, dispatch_uid="django_pglock.session_watch")
        super().start()

    def run_once(self) -> None:
        self._check()
        self._take_answers()
        self._ask()
        for silent in self._silent.values():
            self._report(silent)
        if not any(silent.checks >= CHECKS_BEFORE_FIRST_QUESTION for silent in self._silent.values()):
            self.close()
        self.report_alive(CHECK_INTERVAL)
        self.stopping.wait(CHECK_INTERVAL)

    def close(self) -> None:
        """Close the sessions, except for those that wait for the answer to a question."""
        for alias in [alias for alias in self._sessions if alias not in self._questions]:
            self._sessions.pop(alias).close()

    def close_at_end(self) -> None:
        for question in self._questions.values():
            shut_down_socket(question.session)
        while self._questions:
            # A session that is being opened has a time limit of its own.
            self._questions.popitem()[1].join(QUESTION_TIMEOUT)
        self.close()

    def _check(self) -> None:
        """For each session that waits now, count the checks at which it has waited.

        End questions that wait too long.
        """
        before, self._silent = self._silent, {}
        asking = {question.ident for question in self._questions.values()}
        for wait in pending_statements():
            silent = before.get(id(wait.raw))
            if silent is None or not wait.continues(silent.wait):
                silent = SilentSession(wait)
            self._silent[id(wait.raw)] = silent
            silent.checks += 1
            if wait.ident in asking and silent.checks * CHECK_INTERVAL > QUESTION_TIMEOUT:
                shut(wait.raw)

    def _ask(self) -> None:
        """Ask each server about the sessions for which it is time, unless the last question has no answer yet."""
        suspects: dict[str, list[SilentSession]] = {}
        for silent in self._silent.values():
            if silent.wait.alias is not None and silent.is_to_be_asked_for:
                suspects.setdefault(silent.wait.alias, []).append(silent)
        for alias in suspects.keys() - self._questions.keys():
            question = Question(self._session(alias), suspects[alias])
            question.start()
            self._questions[alias] = question
            for silent in suspects[alias]:
                silent.asked_at = silent.checks

    def _session(self, alias: str) -> DatabaseWrapper:
        session = self._sessions.get(alias)
        if session is None:
            session = self._sessions[alias] = dedicated_connection(alias, application_name=f"lockworker {self.name}")
            session.settings_dict["OPTIONS"]["connect_timeout"] = int(QUESTION_TIMEOUT)
        return session

    def _take_answers(self) -> None:
        for alias, question in list(self._questions.items()):
            if question.is_alive():
                continue
            del self._questions[alias]
            try:
                question.note_answer()
            finally:
                if question.has_failed:
                    self._sessions.pop(alias).close()
            for silent in question.about:
                if silent.verdict:
                    self._end(silent)

    def _end(self, silent: SilentSession) -> None:
        if not any(wait.continues(silent.wait) for wait in pending_statements()):
            return  # the answer has come meanwhile
        self._log(silent, f"{silent.verdict}. The connection is closed.")
        shut(silent.wait.raw)
        self._silent.pop(id(silent.wait.raw), None)

    def _report(self, silent: SilentSession) -> None:
        if silent.checks >= CHECKS_BEFORE_REPORT and not silent.is_reported:
            silent.is_reported = True
            self._log(silent, f"{silent.says}. The thread continues to wait.")

    def _log(self, silent: SilentSession, what: str) -> None:
        wait, claim = silent.wait, self._claim_of(silent.wait.ident)
        who = "A coroutine" if wait.thread is None else f"Thread {wait.thread}"
        logger.warning(
            "%s has had no answer from database %r for %.0f s: %s",
            who if claim is None else f"{who}, which runs task {claim.id} ({claim.task_path}),",
            wait.alias,
            silent.checks * CHECK_INTERVAL,
            what,
            extra={} if claim is None else claim.log_fields(),
        )


class SilentSession:
    """A session that waits for an answer: at how many checks, and what the server says of it."""

    def __init__(self, wait: PendingStatement) -> None:
        self.wait = wait
        self.checks = 0
        #: At which check the server was asked last, None before the first question.
        self.asked_at: int | None = None
        #: What the server has reported last, in words.
        self.says = "the server has not been asked"
        #: Why the session has to be ended; empty: it has not.
        self.verdict = ""
        self.is_reported = False
        self._failures = self._both_waited = 0

    @property
    def pid(self) -> int:
        """The server's process id of the session, as libpq knows it."""
        return int(self.wait.raw.pgconn.backend_pid)

    @property
    def is_to_be_asked_for(self) -> bool:
        """Whether it is time for a question."""
        if self.asked_at is None:
            return self.checks >= CHECKS_BEFORE_FIRST_QUESTION
        return self.checks - self.asked_at >= CHECKS_BETWEEN_QUESTIONS

    def note_failure(self, error: BaseException, *, has_answered: bool) -> None:
        """Note that the server could not be asked. A server that refuses may still work on the statement."""
        self._failures = 0 if has_answered else self._failures + 1
        self.says = f"the server cannot be asked ({one_line(error)})"
        # A session that sends one statement after the other waits at every check, too, but it receives answers.
        if self._failures >= QUESTIONS_BEFORE_END and self._receives_nothing() is not False:
            self.verdict = "the server cannot be reached"

    def note(self, view: ServerView) -> None:
        """Note what the server says."""
        self._failures = 0
        if view.sessions is None:
            self._note_pooled(view)
        elif activity := view.sessions.get(self.pid):
            self._note_activity(activity, view)
        elif self._may_be_elsewhere(view):
            self.says = "the standby that was asked has no such session"
        else:
            self.verdict = "the server has no such session"

    def _note_activity(self, activity: Activity, view: ServerView) -> None:
        self.says = f"the server reports the state {activity.state or 'hidden from this role'} for the session"
        both_wait = activity.state == "active" and activity.waits_for_client and self._receives_nothing() is True
        self._both_waited = self._both_waited + 1 if both_wait else 0
        if self._may_be_elsewhere(view):
            return
        if activity.state in IDLE_STATES and activity.since >= LONGEST_TRANSIT:
            self.verdict = f"the session is {activity.state} at the server"
        elif self._both_waited >= QUESTIONS_BEFORE_END:
            self.verdict = "the server waits for the client"

    def _note_pooled(self, view: ServerView) -> None:
        self.says = "a pooler is between them, and the server runs a statement as old as this one"
        # Use the wait at the time of the question, because the answer may have taken seconds.
        checks = self.checks if self.asked_at is None else self.asked_at
        if view.oldest_statement < checks * CHECK_INTERVAL - LONGEST_TRANSIT:
            self.says = "a pooler is between them, and the server runs no statement as old as this one"
            # A pooler passes on what the first server behind it has reported. So only the answer counts here.
            if checks >= CHECKS_BEHIND_POOLER and not view.is_standby:
                self.verdict = self.says

    def _may_be_elsewhere(self, view: ServerView) -> bool:
        return view.is_standby or self.wait.raw.pgconn.parameter_status(b"in_hot_standby") == b"on"

    def _receives_nothing(self) -> bool | None:
        """Return whether nothing at all has been received for some seconds; None where that is not known."""
        try:
            with socket.socket(fileno=os.dup(self.wait.raw.fileno())) as end:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 2 * LAST_DATA_RECEIVED)
        except (OSError, AttributeError, psycopg.Error):
            return None
        (milliseconds,) = struct.unpack_from("I", info, LAST_DATA_RECEIVED)
        return bool(milliseconds >= 1000 * LONGEST_TRANSIT)


class Question(threading.Thread):
    """A question about sessions to the server of an alias, on a session of the watch, in a thread of its own."""

    def __init__(self, session: DatabaseWrapper, about: list[SilentSession]) -> None:
        super().__init__(name="lockworker-question", daemon=True)
        self.session = session
        self.about = about
        self._pids = [silent.pid for silent in about]
        self._view: ServerView | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._view = view_of_server(self.session, self._pids)
        except BaseException as error:  # noqa: BLE001 - note_answer() raises it in the thread of the watch
            self._error = error

    @property
    def has_failed(self) -> bool:
        """Whether there is no answer, so that the session is of no use any more."""
        return self._view is None

    def note_answer(self) -> None:
        """Note what the server has said. Call it in the thread of the watch, when this one has ended."""
        if isinstance(self._error, (DatabaseFailure, psycopg.Error, OSError)):
            has_answered = _has_answered(self.session, self._error)
            for silent in self.about:
                silent.note_failure(self._error, has_answered=has_answered)
        elif self._error is not None:
            raise self._error
        elif self._view is not None:
            for silent in self.about:
                silent.note(self._view)


def _has_answered(session: DatabaseWrapper, error: BaseException) -> bool:
    """Return whether a question that failed has got any answer: from the server, or from a host that refuses."""
    cause: Any = error.__cause__ or error
    if session.connection is None:
        return not isinstance(cause, psycopg.errors.ConnectionTimeout)
    return getattr(cause, "sqlstate", None) is not None


# Deadlines for the statements of the worker's own services: closes a connection if an answer does not come in time.
#
# A connection may be half open forever: for example, a load balancer acknowledges data that no server receives. Neither
# the server's timeouts nor TCP notice that. So this service checks every second. It counts checks instead of seconds,
# because time also passes while the process is stopped or a task keeps the GIL, and then the connection is not the
# problem. Each check proves that threads could run.


#: Seconds beyond the limit of a service in which the server, if it can, ends the statement itself.
LEFT_TO_SERVER = 2.0


class SendsStatements(Protocol):
    """A service that sends statements. None of them may take longer than ``statement_timeout`` seconds."""

    name: str

    @property
    def statement_timeout(self) -> float:
        """Seconds for one statement."""

    def statement_in_progress(self) -> tuple[DatabaseWrapper, int] | None:
        """Return the session and the number of the statement that waits for its answer now; None: none waits."""


class Deadlines(Service):
    """Checks every second which statement each service waits for. Closes the connection if the wait is too long."""

    name = "deadlines"

    def __init__(self, services: Sequence[SendsStatements]) -> None:
        super().__init__()
        self._awaited = [_Awaited(service) for service in services]

    def run_once(self) -> None:
        for each in self._awaited:
            each.check()
        self.stopping.wait(CHECK_INTERVAL)


class _Awaited:
    """The statement that one service waited for at the last check, and the number of earlier checks at which it did."""

    def __init__(self, service: SendsStatements) -> None:
        self.service = service
        self.statement: object = None
        self.checks = 0

    def check(self) -> None:
        statement = self.service.statement_in_progress()
        self.checks = self.checks + 1 if statement is not None and statement == self.statement else 0
        self.statement = statement
        waited = self.checks * CHECK_INTERVAL
        if statement is not None and waited > self.service.statement_timeout + LEFT_TO_SERVER:
            logger.warning(
                "The %s has had no answer from the database for %.0f s. It closes its connection.",
                self.service.name,
                waited,
            )
            shut_down_socket(statement[0])
            self.statement = None
