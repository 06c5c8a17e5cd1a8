"""The heartbeat: shows that the workers of one parent live, and receives the notifications for them.

One session in the parent's loop does both. It holds the parent's advisory lock, whose number is in the rows of the
workers (``store/liveness.py``). No statement here waits for a row or a table that somebody has locked, or only for a
moment, and each has a deadline.
"""

from __future__ import annotations

import math
import pkgutil
import random
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.apps import apps
from django.db import ProgrammingError, connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from psycopg.errors import InsufficientPrivilege

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.keys.reserved import draw_number
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import is_forbidden, is_pooled
from django_pglock.postgres.forking import ensure_own_session
from django_pglock.postgres.sessions import dedicated_connection, set_limits
from django_pglock.store.liveness import BEAT, LATE, LOCK_PARENT, UPKEEP_PARENTS, Beat, HeartbeatReply, beat_values
from django_pglock.store.ready import READY_QUEUES
from django_pglock.store.requests_to_worker import ANSWER_STACK, REQUESTS
from django_pglock.store.statements import BY_INDEX
from django_pglock.store.wake import SCHEDULED_CHANNEL, WAKE, channel_of
from django_pglock.worker.loop import Loop, Timer
from django_pglock.worker.parent.session import Rows, Session

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger(WORKER)

#: Seconds between two checks for pending migrations.
CHECK_INTERVAL = 1.0
#: Seconds before the first attempt to open another session. Doubled each time, up to half an interval, because after an
#: outage the children wait for the first heartbeat.
FIRST_PAUSE = 0.1
#: The pause before a beat is tried again because another session has locked a row, as a share of the interval.
LOCKED_PAUSE = 0.1
#: Server settings of the session. An administrator may have set others for the role; here an idle session is normal.
NO_LIMITS = dict.fromkeys(
    ("lock_timeout", "idle_session_timeout", "transaction_timeout", "idle_in_transaction_session_timeout"), "0"
)
#: The statements that read the table of tasks wait no longer than this for its lock, so that no beat is late.
LIMIT = f"SELECT set_config('lock_timeout', '50ms', true), {BY_INDEX}"


class Heartbeat:
    """Beats for the workers of one parent in one database.

    ``beats`` returns what to write: a ``Beat`` for each worker, with the number of functions that its row should have.
    All callbacks are called in the loop's thread:

    - ``on_beat``: with the replies to the workers whose heartbeat was written, and when it was begun;
    - ``on_lost``: there is no session at the moment;
    - ``on_wake``: with the id of a worker, and the queue that has ready tasks after how many hops;
    - ``on_missed``: notifications may have been missed;
    - ``on_scheduled``: a task was scheduled;
    - ``on_request``: with worker, task, attempt, and whether its cancel is requested. Otherwise its stack is;
    - ``on_missing``: heartbeats of other workers are missing, and this parent is one of those that do the upkeep.

    With each beat it asks for requests about running tasks. The oldest parent also wakes workers for tasks that have
    been ready since the last beat: a process may have died after its commit of a task, before its notification.
    """

    def __init__(
        self,
        loop: Loop,
        using: str,
        parent: UUID,
        *,
        beats: Callable[[], Sequence[Beat]],
        busy: Callable[[], Sequence[UUID]],
        on_beat: Callable[[dict[UUID, HeartbeatReply], float], None],
        on_lost: Callable[[BaseException], None],
        on_wake: Callable[[str, str, int], None],
        on_missed: Callable[[], None],
        on_scheduled: Callable[[], None],
        on_request: Callable[[str, int, int, bool], None],
        on_missing: Callable[[], None],
    ) -> None:
        self.loop = loop
        self.using = using
        self.parent = parent
        self.beats = beats
        self.busy = busy
        self.on_beat = on_beat
        self.on_lost = on_lost
        self.on_wake = on_wake
        self.on_missed = on_missed
        self.on_scheduled = on_scheduled
        self.on_request = on_request
        self.on_missing = on_missing
        self.session = Session(
            loop, self._open, on_open=self._on_open, on_lost=self._on_session_lost, on_note=self._on_note
        )
        #: Names of the migrations that have to be applied first.
        self.pending: list[str] = []
        #: The error of the last attempt; None: there was none.
        self.last_error: BaseException | None = None
        #: When the last beat was begun that was written, by time.monotonic(); None: there was none.
        self.beat_at: float | None = None
        #: How many older parents do the upkeep; None: not known yet.
        self.older_parents: int | None = None
        #: Whether notifications come for each scheduled task, because one of the workers sleeps.
        self.is_quiet = False
        # The queues that had ready tasks at the last beat.
        self._ready: set[str] = set()
        #: The number of sessions that were opened.
        self.connects = 0
        #: The number of the parent's lock, if the present session holds it. None behind a pooler.
        self.lock_key: int | None = None
        self._is_pooled = False
        self._has_beaten = False
        self._failures = 0
        # Since when the beats have come without interruption.
        self._unbroken_since = math.inf
        # The number of functions in each worker's row, as the last reply says.
        self._known: dict[UUID, int] = {}
        self._next: Timer | None = None
        self._has_warned = False
        # Since when beats of these workers could not be written.
        self._unwritten: dict[UUID, float] = {}
        self._is_closed = False

    @property
    def is_listening(self) -> bool:
        """Whether notifications reach this parent."""
        return self.session.is_open and self.lock_key is not None

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, as far as is known."""
        return self.session.is_open

    def unbroken_for(self) -> float:
        """Return for how many seconds the beats have come without interruption. For any thread."""
        now, beat_at = time.monotonic(), self.beat_at
        if beat_at is None or now - beat_at > LATE * get_settings().HEARTBEAT_INTERVAL:
            return 0.0
        return max(0.0, now - self._unbroken_since)

    def start(self) -> None:
        """Begin to open the session."""
        self.session.open()

    def close(self) -> None:
        """Beat no more, and close the session."""
        self._is_closed = True
        self._cancel_next()
        self.session.close()

    def beat_soon(self) -> None:
        """Beat now, for example for a worker that has just been started."""
        if self.session.is_open:
            self._beat()

    def answer_stack(self, worker: UUID, task: int, attempt: int, text: str) -> None:
        """Write the stack of a running task. Without a session the request is found again later."""
        values = (text, task, attempt, worker)
        self.session.ask((LIMIT, ()), (ANSWER_STACK, values), within=self._limit, refused=self._warn)

    def look_for_requests(self) -> None:
        """Ask for requests about running tasks, because a notification says that there is one."""
        if workers := list(self.busy()):
            self.session.ask(
                (LIMIT, ()),
                (REQUESTS, (workers,)),
                within=self._limit,
                then=lambda rows: self._note_requests(rows[1]),
                refused=self._warn,
            )

    @property
    def _limit(self) -> float:
        """The deadline of a statement in seconds: after it, a beat can be repeated before the workers count as dead."""
        return get_settings().HEARTBEAT_LIMIT / 3

    # The session

    def _open(self) -> DatabaseWrapper:
        """Open a session. Called in a thread of its own."""
        connection = dedicated_connection(self.using, application_name="lockworker heartbeat")
        try:
            ensure_own_session(connection)
            set_limits(connection, {**NO_LIMITS, "statement_timeout": f"{self._limit * 1000:.0f}ms"})
            self._is_pooled = is_pooled(connection)
            if self.beat_at is None:
                self._wait_for_tables(connection)
        except BaseException:
            connection.close()
            raise
        if self._is_closed:
            connection.close()
            raise RuntimeError("The worker has ended.")
        return connection

    def _wait_for_tables(self, connection: DatabaseWrapper) -> None:
        """Return when no migration is pending. Log pending migrations once."""
        connections[self.using] = connection
        while pending := pending_migrations(self.using):
            if not self.pending:
                logger.warning("Waiting for migrations of django_pglock %s", _how_to_migrate(self.using, pending))
            self.pending = pending
            time.sleep(CHECK_INTERVAL)
            if self._is_closed:
                break
        self.pending = []
        del connections[self.using]

    def why_not_ready(self) -> str:
        """Return why there was no beat yet, for people."""
        if self.pending:
            return f"migrations of django_pglock are pending {_how_to_migrate(self.using, self.pending)}"
        return "it does not answer" if self.last_error is None else one_line(self.last_error)

    def _on_open(self) -> None:
        self.connects += 1
        self._has_beaten = False
        # Not behind a pooler, where other clients would get the lock and the notifications.
        if self._is_pooled:
            self._begin()
        else:
            self._lock()

    def _lock(self) -> None:
        """Take the parent's lock. Another parent may have the same number, or a half-open session of ours."""
        number = draw_number()

        def note(rows: list[Rows]) -> None:
            if rows[-1][0][0] == "t":
                self.lock_key = number
                self._begin()
            else:
                self._lock()

        listen = [(f"LISTEN {channel}", ()) for channel in (channel_of(self.parent), SCHEDULED_CHANNEL)]
        self.session.ask(*listen, (LOCK_PARENT, (number,)), within=self._limit, then=note)

    def _begin(self) -> None:
        self.on_missed()
        self._beat()

    def _on_session_lost(self, error: BaseException) -> None:
        self.lock_key, self.last_error = None, error
        self._cancel_next()
        if self._is_closed:
            return
        self._failures += 1
        if self._failures == 1:
            what = "cannot reach the database" if not self.connects else "has lost its database connection"
            what = "cannot do its work" if is_forbidden(error) else what
            logger.warning("The heartbeat %s and tries again: %s", what, one_line(error))
        self.on_lost(error)
        bound = min(get_settings().HEARTBEAT_INTERVAL / 2, FIRST_PAUSE * 2.0 ** min(self._failures - 1, 10))
        self.loop.call_later(random.uniform(bound / 2, bound), self._open_again)  # noqa: S311

    def _open_again(self) -> None:
        if not self._is_closed:
            self.session.open()

    def _on_note(self, channel: str, payload: str) -> None:
        if channel == SCHEDULED_CHANNEL:
            self.on_scheduled()
            return
        worker, *about = payload.split(" ", 2)
        if len(about) == 2:
            self.on_wake(worker, about[1], int(about[0]))
        else:
            self.look_for_requests()

    # The beat

    def _beat(self) -> None:
        self._cancel_next()
        began = time.monotonic()
        interval = get_settings().HEARTBEAT_INTERVAL
        self._next = self.loop.call_later(interval, self._beat)
        given = [self._complete(beat) for beat in self.beats()]
        if not given:
            return
        beat = (BEAT, beat_values(given))
        look = [(REQUESTS, (list(self.busy()),))] + ([(READY_QUEUES, ())] if self.older_parents == 0 else [])

        def note(rows: list[Rows]) -> None:
            self._note(rows[1], given, began)
            self._note_requests(rows[2])
            self._note_ready({str(queue) for (queue,) in rows[3]} if len(look) > 1 else set())

        def beat_alone(error: BaseException) -> None:
            # The table of tasks is locked. The next beat looks at it again.
            self.session.ask(beat, within=self._limit, then=lambda rows: self._note(rows[0], given, began))

        self.session.ask((LIMIT, ()), beat, *look, within=self._limit, then=note, refused=beat_alone)

    def _complete(self, beat: Beat) -> Beat:
        paths = beat.task_paths
        is_known = paths is not None and self._known.get(beat.id) == len(paths)
        return beat._replace(lock_key=self.lock_key, task_paths=None if is_known else paths)

    def _note(self, rows: Rows, given: Sequence[Beat], began: float) -> None:
        """Note the reply to a beat. A row that is missing in it is locked, or was deleted."""
        replies = {UUID(row[0]): HeartbeatReply.of(row[1:]) for row in rows}
        self._known = {worker: reply.known for worker, reply in replies.items()}
        if replies:
            # By its oldest worker. Otherwise, after each parent has replaced one, none would be the oldest.
            self.older_parents = min(reply.older_parents for reply in replies.values())
            self.is_quiet = any(reply.is_sleeping for reply in replies.values()) and self.is_listening
            self._note_success(began)
            are_missing = any(reply.are_others_missing for reply in replies.values())
            if are_missing and self.older_parents < UPKEEP_PARENTS:
                self.on_missing()
        self.on_beat(replies, began)
        now, pause = time.monotonic(), get_settings().HEARTBEAT_INTERVAL * LOCKED_PAUSE
        unwritten = [beat for beat in given if beat.id not in replies]
        self._unwritten = {beat.id: self._unwritten.get(beat.id, now) for beat in unwritten}
        for beat in unwritten:
            # A beat without functions makes no row. The next one has them, and shows whether there is a row. And the
            # worker itself may have locked it for a moment, to write that it sleeps.
            if beat.task_paths is not None and now - self._unwritten[beat.id] >= pause:
                self._warn_of_locked_row(beat.id)
        if unwritten:
            self._cancel_next()
            self._next = self.loop.call_later(pause, self._beat)

    def _note_success(self, began: float) -> None:
        if self._failures:
            logger.warning("The heartbeat works again. Failed attempts: %d.", self._failures)
        self._failures, self.last_error = 0, None
        late = LATE * get_settings().HEARTBEAT_INTERVAL
        if not self._has_beaten or self.beat_at is None or time.monotonic() - self.beat_at > late:
            self._unbroken_since = time.monotonic()
        self._has_beaten, self.beat_at = True, began

    def _warn_of_locked_row(self, worker: UUID) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "The heartbeat of worker %s cannot be written, because another session has locked its row in the table of "
            "workers, perhaps one that is idle in a transaction. Until that session ends its transaction, the worker "
            "runs what it has claimed, and soon claims nothing more.",
            worker,
        )

    def _note_requests(self, rows: Rows) -> None:
        for worker, task, attempt, is_cancel, is_stack in rows:
            for wanted, cancels in ((is_cancel, True), (is_stack, False)):
                if wanted == "t":
                    self.on_request(str(worker), int(task or 0), int(attempt or 0), cancels)

    def _note_ready(self, ready: set[str]) -> None:
        """Wake workers for queues that have had ready tasks for an interval."""
        if unnoticed := sorted(ready & self._ready):
            values = (0, unnoticed, get_settings().HEARTBEAT_LIMIT)
            self.session.ask((WAKE, values), within=self._limit, refused=self._warn)
        self._ready = ready

    def _warn(self, error: BaseException) -> None:
        logger.warning("A statement of the heartbeat was refused: %s", one_line(error))

    def _cancel_next(self) -> None:
        if self._next is not None:
            self._next.cancel()


APP = "django_pglock"


def _how_to_migrate(using: str, pending: list[str]) -> str:
    return f"({', '.join(pending)}). Run: manage.py migrate {APP} --database {using}"


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
