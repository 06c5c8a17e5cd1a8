"""The heartbeat: shows that the worker lives, by the date in its row and by the session that holds its lock.

The session is the worker's own, or that of a supervisor, which beats for all of its processes. If the supervisor does
not beat, the worker itself does, from its next beat on (``supervisor_heartbeat.py``).

A worker that has nothing in flight may rest: it beats about each third interval (``timing.py``).

While a task keeps this thread from running, the heartbeat process beats in its place (``heartbeat_process.py``).

Between two beats this thread only receives notifications (``running_tasks.py`` handles requests). While the supervisor
beats, this thread opens no session, because opening one may take longer than other workers tolerate a missing
heartbeat. Before each attempt to open a session, and soon after it has begun, this thread checks whether the supervisor
can beat again.
"""

from __future__ import annotations

import pkgutil
import socket
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from django.apps import apps
from django.db import Error as DatabaseFailure
from django.db import ProgrammingError, connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from psycopg.errors import InsufficientPrivilege

from django_pglock.error_reading import one_line
from django_pglock.keys.reserved import draw_number
from django_pglock.postgres.connections import connection_for
from django_pglock.store.liveness import Beat, HeartbeatReply, beat_all, deregister, lock_worker, unlock_worker
from django_pglock.tasks import registry
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess
from django_pglock.worker.liveness.listener import Listener, NotificationSession, SelfPipe
from django_pglock.worker.liveness.supervisor_heartbeat import Answer, SupervisorHeartbeat
from django_pglock.worker.liveness.timing import Rest, heartbeat_timing
from django_pglock.worker.options import Identity
from django_pglock.worker.service import ConnectedService, SharedSessions, logger

#: Seconds between two checks for pending migrations.
CHECK_INTERVAL = 1.0
#: The pause before a beat is tried again because another session has locked our row, as a share of the interval.
LOCKED_PAUSE = 0.1


class Heartbeat(ConnectedService):
    """Beats, and receives notifications.

    It starts before the first claim and stops after the last settle, because a stopping worker must not look dead. It
    does not beat before all migrations of the tables are applied.

    ``process``: the heartbeat process of this worker. ``rest``: when this worker leaves out beats. ``on_reply`` is
    called with the reply of the database to each beat, ``on_beat`` after that, and ``on_forbidden`` with the error if
    the role lacks a right. ``listener`` gets the notifications. Behind a pooler there are none. ``supervisor``: the
    socket to the heartbeat of a supervisor, which beats and listens for this worker as long as it can; None: there is
    none. ``last_sessions``: if the heartbeat has no session at its end, it takes one of these to delete the worker's
    row.
    """

    name = "heartbeat"

    def __init__(
        self,
        in_flight: InFlight,
        using: str,
        identity: Identity,
        queues: list[str],
        *,
        process: HeartbeatProcess,
        rest: Rest,
        listener: Listener,
        on_beat: Callable[[], None] = lambda: None,
        on_reply: Callable[[HeartbeatReply], None] = lambda _: None,
        on_forbidden: Callable[[BaseException], None] | None = None,
        supervisor: socket.socket | None = None,
        last_sessions: SharedSessions | None = None,
    ) -> None:
        super().__init__(using)
        self.in_flight = in_flight
        self.identity = identity
        self.queues = queues
        self.on_beat = on_beat
        self.on_reply = on_reply
        self.on_forbidden = on_forbidden
        self.listener = listener
        self._last_sessions = last_sessions
        #: The heartbeat of the supervisor that beats for this worker; None: there is none.
        self.supervisor: SupervisorHeartbeat | None = None
        if supervisor is not None:
            self.supervisor = SupervisorHeartbeat(
                supervisor, on_notification=listener.receive, on_missed_notifications=listener.missed
            )
        self.process = process
        self.rest = rest
        self._self_pipe = SelfPipe()
        self.is_stopping = False
        self.first_beat = threading.Event()
        #: When the last successful beat was begun, by time.monotonic().
        self.beat_at: float | None = None
        #: Names of the migrations for which the worker waits.
        self.pending: list[str] = []
        # The number of functions in our row. Functions are only added, so another number means new functions.
        self._registered_functions = -1
        self.lock = WorkerLock(using)  # held by our session while it beats
        self._beats_here = False  # whether our session is the one that beats and listens
        self._has_beaten_here = False  # whether this session has written a beat
        self._is_row_locked = False  # whether another session has locked our row, so the last beat was not written
        self._has_warned = False  # whether that is logged
        self._notifications = NotificationSession(listener.receive)
        self._answer: Answer | None = None  # of the supervisor, if it has written the last beat
        in_flight.when_busy.append(self._end_rest)

    def forbidden(self, error: BaseException) -> None:
        if self.on_forbidden is not None:
            self.on_forbidden(error)

    def start(self) -> None:
        self._self_pipe.open()
        super().start()

    @property
    def statement_timeout(self) -> float:
        return heartbeat_timing().statement_timeout

    @property
    def longest_pause(self) -> float:
        return heartbeat_timing().longest_pause

    def check_heartbeat(self) -> bool:
        """Return whether this worker counts as alive. If it rests, end the rest, and return False until the next beat.

        It may count as dead if its process was stopped, or if it has no session to beat.
        """
        # Before the first heartbeat the worker claims nothing.
        if self.beat_at is None:
            return True
        if self.rest.is_on:
            # Also if the last beat is young. While the worker rests, the heartbeat process gets reports of beats that
            # were not written, so it would not beat for the worker.
            self.rest.request_beat()
            self.wake()
            # The beat may have been written at this moment. Then it does not wake the fetcher.
            if self.rest.is_on:
                return False
        return not heartbeat_timing().is_stale(time.monotonic() - self.beat_at, is_connected=self.is_connected)

    def is_resting(self) -> bool:
        """Return whether this worker may beat rarely while it is idle, because enough others beat in each interval."""
        return self.rest.is_allowed

    def _end_rest(self) -> None:
        if self.rest.is_on:
            self.wake()

    @property
    def is_connected(self) -> bool:
        """Whether a session beats for this worker, as far as the service knows."""
        return self._supervisor_beats or super().is_connected

    @property
    def _supervisor_beats(self) -> bool:
        """Whether the supervisor has written the last beat, and can write the next one."""
        return self._answer is not None and self.supervisor is not None and self.supervisor.is_up

    def is_listening(self) -> bool:
        """Return whether notifications reach this worker: the session that listens has just written a heartbeat."""
        if not self.is_connected or self.beat_at is None:
            return False
        is_listening = self.lock.is_held if self._answer is None else self._answer.is_listening
        age = time.monotonic() - self.beat_at
        return is_listening and not heartbeat_timing().is_late(age, is_resting=self.rest.is_on)

    def open(self) -> None:
        # While the supervisor beats, this service needs no session. The supervisor may be able to beat again by now.
        if self.supervisor is not None:
            self.supervisor.receive()
        if self.supervisor is None or not self.supervisor.is_up:
            super().open()

    def _prepare(self, connection: Any) -> None:
        if self.first_beat.is_set() and self.supervisor is not None and not self.supervisor.is_over:
            # The time of this attempt to connect is limited, because the supervisor may soon be able to beat again.
            options = connection.settings_dict["OPTIONS"]
            configured = int(options["connect_timeout"])
            options["connect_timeout"] = heartbeat_timing().connect_timeout(self._failures, configured)
        super()._prepare(connection)

    def connected(self) -> None:
        self._note_session()

    def _note_session(self) -> None:
        """Note that we have a new session, or none."""
        self.lock.note_session()
        self._beats_here = self._has_beaten_here = False

    def run_once(self) -> None:
        if not self.first_beat.is_set() and not self._prepare_first_beat():
            self.stopping.wait(CHECK_INTERVAL)
            return
        began = time.monotonic()
        next_in = self.beat()
        if self._is_row_locked:
            self._wait_for_row()
            return
        self._has_warned = False
        self.beat_at = began
        is_requested = self.rest.end()
        self.process.report_beat()
        self.first_beat.set()
        self.on_beat()
        if is_requested:
            self.in_flight.notify_fetcher()
        self._wait_for_next_beat(next_in)

    def why_not_ready(self) -> str:
        """Return why there was no beat yet, for people."""
        if (error := self.last_error) is not None:
            return one_line(error)
        return f"migrations of django_pglock are pending {self._migrate()}" if self.pending else "it does not answer"

    def _migrate(self) -> str:
        """Return the pending migrations, and the command that applies them."""
        names = ", ".join(self.pending)
        return f"({names}). Run: manage.py migrate django_pglock --database {self.using}"

    def _prepare_first_beat(self) -> bool:
        """Prepare the first beat. Return whether it is prepared. This may take long, because nothing is claimed yet."""
        super().open()
        if not self._has_tables():
            return False
        if self.process.needs_instructions:
            self.process.renew_instructions()
        return True

    def _has_tables(self) -> bool:
        """Return whether no migration is pending. Log pending migrations once."""
        was_logged = bool(self.pending)
        self.pending = pending_migrations(self.using)
        if self.pending and not was_logged:
            logger.warning("Waiting for migrations of django_pglock %s", self._migrate())
        return not self.pending

    def wake(self) -> None:
        """End the present wait."""
        self._self_pipe.wake()

    def _wait_for_next_beat(self, first: float) -> None:
        """Wait for ``first`` seconds, and for more if the worker rests."""
        supervisor_did_beat = self._supervisor_beats
        for seconds in self.rest.intervals(first):
            self._keep_process_from_beating()
            self.report_alive(seconds)
            until = time.monotonic() + seconds
            while not self.stopping.is_set() and (now := time.monotonic()) < until:
                self._receive()
                if (supervisor_did_beat and not self._supervisor_beats) or self._must_beat_now():
                    return
                self._wait(until - now)
            if self.stopping.is_set() or self.rest.is_beat_requested or not self._is_idle():
                return
        self._keep_process_from_beating()

    def _keep_process_from_beating(self) -> None:
        """Keep the heartbeat process from beating: our threads run, and no beat is late."""
        if self.rest.is_on:
            self.process.report_beat()

    def _is_idle(self) -> bool:
        return not (self.in_flight.claims or self.in_flight.is_claiming or self.is_stopping)

    def _must_beat_now(self) -> bool:
        """Whether this worker rests and has to beat at once."""
        return self.rest.is_on and (self.rest.is_beat_requested or not self._is_idle())

    def _receive(self) -> None:
        """Receive the messages of the supervisor and the notifications."""
        if self.supervisor is not None:
            self.supervisor.receive()
        if self._beats_here:
            self._notifications.receive(connection_for(self.using))
        self.listener.pass_on_postponed()

    def _wait(self, seconds: float) -> None:
        """Wait until there is a message or a notification, up to ``seconds``."""
        channels: list[Any] = []
        if self.supervisor is not None and not self.supervisor.is_over:
            channels.append(self.supervisor)
        if self._beats_here:
            channels.append(connection_for(self.using).connection)
        seconds = min(seconds, self.listener.due_in())
        self._self_pipe.wait(seconds, *channels)

    def beat(self) -> float:
        """Write a heartbeat of this worker. Return the seconds until the next one."""
        known = registry.known_versions()
        reply, next_in = self._beat(None if len(known) == self._registered_functions else known)
        if reply is None:
            # Our row was deleted. Only a beat with the list of functions inserts it again.
            self._registered_functions = -1
            reply, next_in = self._beat(known)
        if reply is not None:
            self._note_answer(reply)
        self._is_row_locked = reply is None
        return next_in

    def _wait_for_row(self) -> None:
        """Wait a moment before the next attempt to beat. Meanwhile our lock shows that this worker lives."""
        timing = heartbeat_timing()
        self.process.report_beat()
        age = 0.0 if self.beat_at is None else time.monotonic() - self.beat_at
        if not self._has_warned and timing.is_late(age, is_resting=self.rest.is_on):
            self._has_warned = True
            logger.warning(
                "This worker cannot write its heartbeat, because another session has locked its row in the table of "
                "workers, perhaps one that is idle in a transaction. Until that session ends its transaction, this "
                "worker runs what it has claimed, and soon claims nothing more."
            )
        self._receive()
        self._wait(timing.interval * LOCKED_PAUSE)

    def _beat(self, task_paths: list[str] | None) -> tuple[HeartbeatReply | None, float]:
        """Beat once. Return the answer (None: we have no row), and the seconds until the next beat."""
        timing = heartbeat_timing()
        beat = self._next_beat(task_paths)
        answer = None
        if self.supervisor is not None and self.supervisor.is_up:
            request = beat._replace(is_interrupted=self._beats_here)
            answer = self.supervisor.request_beat(request, within=timing.answer_timeout)
        self._answer = answer
        if answer is None:
            return self._beat_here(beat), timing.interval
        self._close_own_session()
        return answer.reply, answer.next_in

    def _next_beat(self, task_paths: list[str] | None) -> Beat:
        me = self.identity
        return Beat(
            me.id,
            name=me.name,
            hostname=me.hostname,
            pid=me.pid,
            queues=self.queues,
            threads=len(self.in_flight.threads.slots),
            is_stopping=self.is_stopping,
            task_paths=task_paths,
        )

    def _beat_here(self, beat: Beat) -> HeartbeatReply | None:
        """Beat in our own session, which holds our lock and listens."""
        super().open()
        is_new, self._beats_here = not self._beats_here, True
        self.lock.hold()
        # Not behind a pooler, where other clients would get the notifications.
        if is_new and self.lock.is_held:
            self._notifications.listen(connection_for(self.using))
            self.listener.missed()
        own = beat._replace(lock_key=self.lock.held_number, is_interrupted=not self._has_beaten_here)
        reply = beat_all(self.using, [own]).get(beat.id)
        self._has_beaten_here = self._has_beaten_here or reply is not None
        return reply

    def _note_answer(self, reply: HeartbeatReply) -> None:
        self._registered_functions = reply.known
        self.rest.note_reply(may_rest=reply.may_rest and self.lock.is_held)
        self.on_reply(reply)

    def _close_own_session(self) -> None:
        """Close our session, because the supervisor beats."""
        self.close_session()
        self._note_session()

    def close(self) -> None:
        if self.stopping.is_set() and self.is_connected and self.first_beat.is_set():
            self._deregister()
        super().close()

    def finish(self) -> None:
        self.process.stop()
        self._self_pipe.close()
        if self.supervisor is not None:
            self.supervisor.close()

    def _deregister(self) -> None:
        """Delete the worker's row: the worker ends in order and has no claims."""
        # Open no new session: opening one may hang, and this process must end, because other workers may already run
        # its tasks.
        self.sessions = self._last_sessions
        try:
            super().open()
            deregister(self.using, self.identity.id)
        except DatabaseFailure as error:
            logger.warning("The row of this worker could not be deleted. Other workers will delete it: %s", error)


# The advisory lock of a worker. While a session holds it, missing heartbeats of the worker are tolerated for longer.
#
# Behind a pooler in transaction mode, a worker has no session of its own. There it holds no lock, and its row says so.
# The pooler is detected: the process number that it gives to the client is not that of the server.


class WorkerLock:
    """The lock of one worker, in the session that the current thread uses for the database alias."""

    def __init__(self, using: str) -> None:
        self.using = using
        #: The number of the lock. Behind a pooler the session does not hold it.
        self.number = draw_number()
        # Whether the present session holds the lock; None: not tried yet.
        self._is_held: bool | None = None

    @property
    def is_held(self) -> bool:
        """Whether the present session holds the lock."""
        return bool(self._is_held)

    @property
    def held_number(self) -> int | None:
        """The number for the worker's row: None if no session holds the lock."""
        return self.number if self._is_held else None

    def note_session(self) -> None:
        """Note that the session has ended. The next one does not hold the lock yet."""
        self._is_held = None

    def hold(self) -> None:
        """Take the lock, unless this session holds it or belongs to a pooler.

        Another worker may have drawn the same number, or an earlier, half-open session of ours may still hold the lock.
        Then another number is drawn, and the next beat writes it into the worker's row.
        """
        while self._is_held is None:
            is_held = lock_worker(self.using, self.number)
            if is_held is False:
                self.number = draw_number()
            else:
                self._is_held = bool(is_held)

    def release(self) -> None:
        """Release the lock, if this session holds it."""
        if self._is_held:
            self._is_held = None
            unlock_worker(self.using, self.number)


APP = "django_pglock"
# Those of the names of tables that exist. Django's introspection would describe all tables and views of the project.
EXISTING_TABLES = "SELECT name FROM unnest(%s::text[]) AS name WHERE to_regclass(quote_ident(name)) IS NOT NULL"


def pending_migrations(using: str) -> list[str]:
    """Return the names of the migrations of this package that are not applied to the database, in order.

    The list is empty if the project does not use these migrations: ``MIGRATION_MODULES`` disables them, or all tables
    of the package exist and no migration is recorded. It is also empty if the role may not read the table of
    migrations.
    """
    module, _ = MigrationLoader.migrations_module(APP)
    if module is None:
        return []
    package = import_module(module)
    names = {each.name for each in pkgutil.iter_modules(package.__path__) if each.name[0] not in "_~"}
    connection = connections[using]
    # All tables are checked, and before the recorded migrations are read, because "migrate" may run at the same time.
    # It may have created only some tables, or may create them between the two queries.
    tables, records = _tables(using), MigrationRecorder.Migration._meta.db_table
    existing = _existing(connection, [*tables, records])
    try:
        applied = _applied(connection) if records in existing else set()
    except ProgrammingError as error:
        if isinstance(error.__cause__, InsufficientPrivilege):
            return []
        raise
    if not applied and tables <= existing:
        return []
    return sorted(names - applied)


def _existing(connection: Any, names: list[str]) -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute(EXISTING_TABLES, [names])
        return {name for (name,) in cursor.fetchall()}


def _applied(connection: Any) -> set[str]:
    """Return the names of the migrations of this package that are recorded in the database."""
    return set(MigrationRecorder(connection).migration_qs.filter(app=APP).values_list("name", flat=True))


def _tables(using: str) -> set[str]:
    """Return the names of the tables that the package has in this database."""
    models = [model for model in apps.get_app_config(APP).get_models() if model._meta.managed]
    return {model._meta.db_table for model in models if router.allow_migrate_model(using, model)}
