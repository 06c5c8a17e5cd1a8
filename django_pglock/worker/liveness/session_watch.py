"""Ends sessions on which an answer never comes, whoever waits for it: task threads, coroutines, threads of tasks.

A connection may be half open for ever: a proxy or pooler that is frozen goes on acknowledging, and neither TCP nor the
server notice. The clock alone does not tell that from a long report. So when an answer has not come for ten seconds,
the server is asked, on another session of the same database alias:

    the server works on the statement        it is a long one; the log names it once, after a minute
    the server has no such session           the session is ended
    the session is idle at the server        the answer was sent and lost, or the statement never came: ended
    the server waits for us, as we for it    the way between is interrupted: ended
    the server cannot be reached, thrice     ended

To end it means to shut the socket under whoever waits, who then gets an ``OperationalError``. Looks are counted, not
seconds: a process that was stopped has not waited. Behind a pooler the number of the session is the pooler's; there a
statement counts as lost when no statement in the database is as old as ours. A standby may be one of several at one
address, where another one knows nothing of our session; so one that is not found there is only reported.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import Error as DatabaseFailure
from django.db.backends.signals import connection_created

from django_pglock.postgres.activity import Activity, ServerView, view_of_server
from django_pglock.postgres.connections import shut, statement_under_way
from django_pglock.postgres.known_connections import note_connection
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.postgres.waits import Wait, waits
from django_pglock.worker.service import Service, logger

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

    from django_pglock.tasks.claim import Claim

#: Seconds between two looks at who waits.
BETWEEN_LOOKS = 1.0
#: Looks without an answer before the server is asked for the first time, and from one question to the next.
FIRST_QUESTION, BETWEEN_QUESTIONS = 10, 5
#: Seconds for which the session has to be idle at the server: an answer may be on its way.
ON_ITS_WAY = 5.0
#: Questions that find no server, or both sides waiting for each other, before the session is ended.
PATIENCE = 3
#: Looks before a session behind a pooler is ended. Its statement may wait there for its turn.
BEHIND_POOLER = 45
#: Looks after which the log names who still waits.
REPORT = 60
#: Seconds for the server to answer a question.
ANSWER_WITHIN = 5.0
#: Where tcp_info says for how many milliseconds nothing has been received. Linux.
LAST_DATA_RECEIVED = 52
IDLE = ("idle", "idle in transaction", "idle in transaction (aborted)")


class SessionWatch(Service):
    """Looks every second at who waits. ``claim_of`` returns the claim that a thread, by its number, runs."""

    name = "session watch"
    patience = ANSWER_WITHIN

    def __init__(self, claim_of: Callable[[int | None], Claim | None]) -> None:
        super().__init__()
        self._claim_of = claim_of
        self._silences: dict[int, Silence] = {}
        # Sessions to ask on, by alias: open while something is asked for.
        self._sessions: dict[str, DatabaseWrapper] = {}
        self._asking: tuple[DatabaseWrapper, int] | None = None
        self._questions = 0

    def start(self) -> None:
        connection_created.connect(note_connection, dispatch_uid="django_pglock.session_watch")
        super().start()

    def under_way(self) -> tuple[DatabaseWrapper, int] | None:
        """Return which question waits for its answer now, for ``Deadlines``."""
        asking = self._asking
        return asking if asking is not None and statement_under_way(asking[0]) else None

    def turn(self) -> None:
        self._look()
        suspects = [silence for silence in self._silences.values() if silence.is_to_be_asked_for]
        for alias in {silence.wait.alias for silence in suspects if silence.wait.alias is not None}:
            self._ask(alias, [silence for silence in suspects if silence.wait.alias == alias])
        for silence in self._silences.values():
            self._report(silence)
        if not any(silence.looks >= FIRST_QUESTION for silence in self._silences.values()):
            self.close()
        self.note_life(BETWEEN_LOOKS)
        self.stopping.wait(BETWEEN_LOOKS)

    def close(self) -> None:
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _look(self) -> None:
        """Count for how many looks each one who waits now has waited."""
        before, self._silences = self._silences, {}
        for wait in waits():
            silence = before.get(id(wait.raw))
            if silence is None or silence.wait != wait:
                silence = Silence(wait)
            self._silences[id(wait.raw)] = silence
            silence.looks += 1

    def _ask(self, alias: str, silences: list[Silence]) -> None:
        try:
            view = self._view(alias, [silence.pid for silence in silences])
        except (DatabaseFailure, psycopg.Error, OSError) as error:
            session = self._sessions.pop(alias)
            has_answered = _has_answered(session, error)
            session.close()
            for silence in silences:
                silence.note_failure(error, has_answered=has_answered)
        else:
            for silence in silences:
                silence.note(view)
        for silence in silences:
            if silence.verdict:
                self._end(silence)

    def _view(self, alias: str, pids: list[int]) -> ServerView:
        self.note_life(2 * ANSWER_WITHIN)
        self._questions += 1
        session = self._sessions.get(alias)
        if session is None:
            session = self._sessions[alias] = dedicated_connection(alias, application_name=f"lockworker {self.name}")
            session.settings_dict["OPTIONS"]["connect_timeout"] = int(ANSWER_WITHIN)
        self._asking = session, self._questions
        try:
            return view_of_server(session, pids)
        finally:
            self._asking = None

    def _end(self, silence: Silence) -> None:
        if silence.wait not in waits():
            return  # the answer has come meanwhile
        self._log(silence, f"{silence.verdict}. The connection is closed.")
        shut(silence.wait.raw)
        self._silences.pop(id(silence.wait.raw), None)

    def _report(self, silence: Silence) -> None:
        if silence.looks >= REPORT and not silence.is_reported:
            silence.is_reported = True
            self._log(silence, f"{silence.says}. It goes on waiting.")

    def _log(self, silence: Silence, what: str) -> None:
        wait, claim = silence.wait, self._claim_of(silence.wait.ident)
        who = "A coroutine" if wait.thread is None else f"Thread {wait.thread}"
        logger.warning(
            "%s has had no answer from database %r for %.0f s: %s",
            who if claim is None else f"{who} ({claim!r})",
            wait.alias,
            silence.looks * BETWEEN_LOOKS,
            what,
            extra={} if claim is None else claim.log_fields(),
        )


class Silence:
    """Somebody who waits, for how many looks, and what is known of it."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait
        self.looks = 0
        #: What the server said last.
        self.says = "the server has not been asked"
        #: Why the session is to be ended, if it is.
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
        beyond = self.looks - FIRST_QUESTION
        return beyond >= 0 and beyond % BETWEEN_QUESTIONS == 0

    def note_failure(self, error: BaseException, *, has_answered: bool) -> None:
        """Note that the server could not be asked. One that refuses us may well work on the statement."""
        self._failures = 0 if has_answered else self._failures + 1
        self.says = f"the server cannot be asked ({str(error).strip()})"
        # Whoever sends one statement after the other waits at every look, too, and gets answers.
        if self._failures >= PATIENCE and self._receives_nothing() is not False:
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
        self.says = f"the server says that the session is {activity.state or 'not ours to look into'}"
        is_stuck = activity.state == "active" and activity.waits_for_client and self._receives_nothing() is True
        self._both_waited = self._both_waited + 1 if is_stuck else 0
        if self._may_be_elsewhere(view):
            return
        if activity.state in IDLE and activity.since >= ON_ITS_WAY:
            self.verdict = f"the session is {activity.state} at the server"
        elif self._both_waited >= PATIENCE:
            self.verdict = "the server waits for us"

    def _note_pooled(self, view: ServerView) -> None:
        self.says = "a pooler is in between, and a statement as old as this one runs at the server"
        waited = self.looks * BETWEEN_LOOKS
        if view.oldest_statement < waited - ON_ITS_WAY:
            self.says = "a pooler is in between, and no statement at the server is as old as this one"
            if self.looks >= BEHIND_POOLER and not self._may_be_elsewhere(view):
                self.verdict = self.says

    def _may_be_elsewhere(self, view: ServerView) -> bool:
        return view.is_standby or self.wait.raw.pgconn.parameter_status(b"in_hot_standby") == b"on"

    def _receives_nothing(self) -> bool | None:
        """Say whether nothing at all has come for some seconds; None where that cannot be told."""
        try:
            with socket.socket(fileno=os.dup(self.wait.raw.fileno())) as end:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 2 * LAST_DATA_RECEIVED)
        except (OSError, AttributeError, psycopg.Error):
            return None
        (milliseconds,) = struct.unpack_from("I", info, LAST_DATA_RECEIVED)
        return bool(milliseconds >= 1000 * ON_ITS_WAY)


def _has_answered(session: DatabaseWrapper, error: BaseException) -> bool:
    """Say whether somebody has answered a question that failed: the server, or at least a host that refuses."""
    cause: Any = error.__cause__ or error
    if session.connection is None:
        return not isinstance(cause, psycopg.errors.ConnectionTimeout)
    return getattr(cause, "sqlstate", None) is not None
