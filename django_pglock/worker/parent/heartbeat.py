"""The heartbeat: shows that the workers of one parent live, and receives the notifications for them.

One session in a thread of its own does both. It holds the parent's advisory lock, whose number is in the rows of the
workers (``store/liveness.py``). No statement here waits for a row or a table that somebody has locked, or only for a
moment, and each has a deadline.
"""

from __future__ import annotations

import math
import pkgutil
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Protocol
from uuid import UUID

from django.db import DatabaseError, ProgrammingError, connections
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from psycopg import Notify

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.keys.reserved import draw_number
from django_pglock.loggers import WORKER, RateOfRecords, get_logger
from django_pglock.postgres.connections import connection_for, has_session_ended, is_forbidden, is_pooled
from django_pglock.postgres.notifications import Waker
from django_pglock.store.liveness import BEAT, LATE, LOCK_PARENT, UPKEEP_PARENTS, Beat, HeartbeatReply, beat_values
from django_pglock.store.ready import READY_QUEUES
from django_pglock.store.requests_to_worker import ANSWER_STACK, REQUESTS
from django_pglock.store.statements import BY_INDEX, bound, run
from django_pglock.store.wake import BLOCKED, SCHEDULED_CHANNEL, WAKE, channel_of
from django_pglock.worker.service import Service

logger = get_logger(WORKER)

Rows = list[tuple[Any, ...]]

#: Seconds between two warnings about a locked row.
BETWEEN_WARNINGS = 3600.0
#: The pause before a beat is tried again because another session has locked a row, as a share of the interval.
LOCKED_PAUSE = 0.1
#: The statements that read the table of tasks wait no longer than this for its lock, so that no beat is late.
LIMIT = f"SELECT set_config('lock_timeout', '50ms', true), {BY_INDEX}"


class MigrationsPending(DatabaseError):
    """Migrations of this package have to be applied first."""


class Workers(Protocol):
    """The workers of a parent. All methods are called in the thread of the heartbeat."""

    def beats(self) -> Sequence[Beat]:
        """Return what to write for each worker that lives, with the functions that it knows."""

    def note_beat(self, replies: dict[UUID, HeartbeatReply], began: float) -> None:
        """Note the replies to the workers whose heartbeat was written, and when it was begun."""

    def tell(self, worker: UUID | None = None, **message: Any) -> None:
        """Send a message to one of them, or to each.

        ``cut``: there is no session at the moment. ``poll``: tasks may be ready. ``cancel`` and ``stack``: requests
        about a task that it runs.
        """

    def wake(self, worker: str, queue: str, hops: int) -> None:
        """Wake a worker for a queue that has ready tasks."""

    def wake_upkeep(self, *, rescues: bool = False) -> None:
        """Have the upkeep look now: ``rescues``, also for tasks of dead workers and for blocked tasks."""


class Heartbeat(Service):
    """Beats for the workers of one parent in one database.

    With each beat it asks for requests about running tasks. The oldest parent also wakes workers for tasks that have
    been ready since the last beat: a process may have died after its commit of a task, before its notification.
    """

    name = "heartbeat"

    def __init__(self, using: str, parent: UUID, workers: Workers) -> None:
        super().__init__(using)
        self.parent = parent
        self.workers = workers
        #: When the last beat was begun that was written, by time.monotonic(); None: there was none.
        self.beat_at: float | None = None
        #: How many older parents do the upkeep; None: not known yet.
        self.older_parents: int | None = None
        #: Whether notifications come for each scheduled task, because one of the workers sleeps.
        self.is_quiet = False
        #: The number of the parent's lock, if the present session holds it. None behind a pooler.
        self.lock_key: int | None = None
        # When the next beat is due.
        self._next_at = 0.0
        # Since when the beats have come without interruption.
        self._unbroken_since = math.inf
        # The number of functions in each worker's row, as the last reply says.
        self._known: dict[UUID, int] = {}
        #: The queues that had ready tasks at the last beat. Only the oldest parent knows.
        self.ready_queues: set[str] = set()
        # Whether the last beat could not be written, because its row is locked. And for the warning about it.
        self._is_locked = False
        self._warnings = RateOfRecords(BETWEEN_WARNINGS)
        # Stacks to write: text, task, attempt, worker. Notifications that have come. A pair of sockets to end the wait.
        self._stacks: SimpleQueue[tuple[str, int, int, UUID]] = SimpleQueue()
        self._notes: deque[Notify] = deque()
        self._waker = Waker()

    @property
    def statement_timeout(self) -> float:
        """The deadline of a statement in seconds: after it, a beat can be repeated before the workers count as dead."""
        return get_settings().HEARTBEAT_LIMIT / 3

    # For other threads

    @property
    def is_listening(self) -> bool:
        """Whether notifications reach this parent."""
        return self.is_connected and self.lock_key is not None

    def unbroken_for(self) -> float:
        """Return for how many seconds the beats have come without interruption."""
        now, beat_at = time.monotonic(), self.beat_at
        if beat_at is None or now - beat_at > LATE * get_settings().HEARTBEAT_INTERVAL:
            return 0.0
        return max(0.0, now - self._unbroken_since)

    def beat_soon(self) -> None:
        """Beat now, for example for a worker that has just been started."""
        self._next_at = 0.0
        self.wake()

    def note_promoted(self) -> None:
        """Have the workers poll, because tasks have become ready. If notifications come, one wakes those that sleep."""
        if not self.is_listening:
            self.workers.tell(poll=True)

    def answer_stack(self, worker: UUID, task: int, attempt: int, text: str) -> None:
        """Write the stack of a running task."""
        self._stacks.put((text, task, attempt, worker))
        self.wake()

    def wake(self) -> None:
        self._waker.wake()

    def why_not_ready(self) -> str:
        """Return why nothing can be written, for people; empty: perhaps there is no worker yet to beat for."""
        if self.last_error is not None:
            return one_line(self.last_error)
        return "" if self.is_connected else "it does not answer"

    # The session

    def connected(self) -> None:
        connection: Any = self._connection
        connection.connection.add_notify_handler(self._notes.append)
        self._unbroken_since = math.inf
        # Not behind a pooler, where other clients would get the lock and the notifications.
        if not is_pooled(connection):
            for channel in (channel_of(self.parent), SCHEDULED_CHANNEL):
                run(self.using, f"LISTEN {channel}")
            number = draw_number()
            # Another parent may have the same number, or a half-open session of ours.
            while not run(self.using, LOCK_PARENT, number)[0][0]:
                number = draw_number()
            self.lock_key = number
        self.workers.tell(poll=True)
        self._next_at = 0.0

    def close(self) -> None:
        self.lock_key = None
        self.workers.tell(cut=True)
        super().close()

    def finish(self) -> None:
        self._waker.close()

    def run_once(self) -> None:
        if self.beat_at is None and (pending := pending_migrations(self.using)):
            raise MigrationsPending(
                f"migrations of django_pglock are pending ({', '.join(pending)}). "
                f"Run: manage.py migrate {APP} --database {self.using}"
            )
        if time.monotonic() >= self._next_at:
            self._beat()
        while not self._stacks.empty():
            self._try((ANSWER_STACK, self._stacks.get()))
        if not self._notes:
            self._waker.wait(max(0.0, self._next_at - time.monotonic()), self._connection)
        while self._notes:
            self._hear(self._notes.popleft())

    def _hear(self, note: Notify) -> None:
        if note.channel == SCHEDULED_CHANNEL:
            self.workers.wake_upkeep(rescues=note.payload == BLOCKED)
            return
        worker, *about = note.payload.split(" ", 2)
        if len(about) < 2:
            self._look_for_requests()
            return
        # Every role of the database may notify.
        with suppress(ValueError):
            self.workers.wake(worker, about[1], int(about[0]))

    def _ask(self, *parts: tuple[str, Sequence[Any]]) -> list[Rows]:
        """Send statements with their values as one message, which is one transaction. Return the rows of each."""
        with connections[self.using].cursor() as cursor:
            cursor.execute(";".join(bound(self.using, *part) for part in parts))
            answers = [cursor.fetchall()]
            while cursor.nextset():
                answers.append(cursor.fetchall())
        return answers

    def _try(self, statement: tuple[str, Sequence[Any]]) -> Rows:
        """Ask for the rows of a statement. If the server refuses it, say so, and return none."""
        try:
            return self._ask((LIMIT, ()), statement)[1]
        except DatabaseError as error:
            if self._is_lost:
                raise
            logger.warning("A statement of the heartbeat was refused: %s", one_line(error))
            return []

    @property
    def _is_lost(self) -> bool:
        return not self.is_connected or has_session_ended(connection_for(self.using))

    def _look_for_requests(self) -> None:
        """Ask for requests about running tasks, because a notification says that there is one."""
        if workers := [each.id for each in self.workers.beats()]:
            self._note_requests(self._try((REQUESTS, (workers,))))

    # The beat

    def _beat(self) -> None:
        began = time.monotonic()
        # First, because another thread may ask for a beat from now on.
        self._next_at = began + get_settings().HEARTBEAT_INTERVAL
        given = [self._complete(beat) for beat in self.workers.beats()]
        if not given:
            return
        beat = (BEAT, beat_values(given))
        look = [(REQUESTS, ([each.id for each in given],))] + ([(READY_QUEUES, ())] if self.older_parents == 0 else [])
        try:
            _, rows, requests, *ready = self._ask((LIMIT, ()), beat, *look)
        except DatabaseError:
            if self._is_lost:
                raise
            # The table of tasks is locked. The next beat looks at it again.
            [rows], requests, ready = self._ask(beat), [], []
        self._note(rows, given, began)
        self._note_requests(requests)
        self._note_ready({queue for found in ready for queue, _ in found})

    def _complete(self, beat: Beat) -> Beat:
        paths = beat.task_paths
        is_known = paths is not None and self._known.get(beat.id) == len(paths)
        return beat._replace(lock_key=self.lock_key, task_paths=None if is_known else paths)

    def _note(self, rows: Rows, given: Sequence[Beat], began: float) -> None:
        """Note the reply to a beat. A row that is missing in it is locked, or was deleted."""
        replies = {worker: HeartbeatReply(*reply) for worker, *reply in rows}
        self._known = {worker: reply.known for worker, reply in replies.items()}
        if replies:
            self._note_success(replies, began)
        self.workers.note_beat(replies, began)
        unwritten = [beat for beat in given if beat.id not in replies]
        # A beat without functions makes no row. The next one has them, and shows whether there is a row. And the worker
        # itself may have locked it for a moment, to write that it sleeps.
        locked = [beat for beat in unwritten if beat.task_paths is not None]
        was_locked, self._is_locked = self._is_locked, bool(locked)
        if unwritten:
            self._next_at = min(self._next_at, time.monotonic() + get_settings().HEARTBEAT_INTERVAL * LOCKED_PAUSE)
        if was_locked and locked and self._warnings.allows():
            logger.warning(
                "The heartbeat of worker %s cannot be written, because another session has locked its row in the table "
                "of workers, perhaps one that is idle in a transaction. Until that session ends its transaction, the "
                "worker runs what it has claimed, and soon claims nothing more.",
                locked[0].id,
            )

    def _note_success(self, replies: dict[UUID, HeartbeatReply], began: float) -> None:
        now, late = time.monotonic(), LATE * get_settings().HEARTBEAT_INTERVAL
        if self._unbroken_since == math.inf or self.beat_at is None or now - self.beat_at > late:
            self._unbroken_since = now
        self.beat_at = began
        # By its oldest worker. Otherwise, after each parent has replaced one, none would be the oldest.
        before, self.older_parents = self.older_parents, min(reply.older_parents for reply in replies.values())
        self.is_quiet = any(reply.is_sleeping for reply in replies.values()) and self.is_listening
        if self.older_parents < UPKEEP_PARENTS and any(reply.are_others_missing for reply in replies.values()):
            self.workers.wake_upkeep(rescues=True)
        elif before is None or self.older_parents < UPKEEP_PARENTS <= before:
            self.workers.wake_upkeep()

    def _note_requests(self, rows: Rows) -> None:
        for worker, task, attempt, is_cancel, is_stack in rows:
            if is_cancel:
                self.workers.tell(worker, cancel=[[task, attempt]])
            if is_stack:
                self.workers.tell(worker, stack=[task, attempt])

    def _note_ready(self, ready: set[str]) -> None:
        """Wake workers for queues that have had ready tasks for an interval."""
        if unnoticed := sorted(ready & self.ready_queues):
            self._try((WAKE, (0, unnoticed, get_settings().HEARTBEAT_LIMIT)))
        self.ready_queues = ready


APP = "django_pglock"


def pending_migrations(using: str) -> list[str]:
    """Return the names of the migrations of this package that are not applied to the database, in order.

    The list is empty if ``MIGRATION_MODULES`` disables them, and if the role may not read which are applied.
    """
    module, _ = MigrationLoader.migrations_module(APP)
    if module is None:
        return []
    names = {each.name for each in pkgutil.iter_modules(import_module(module).__path__) if each.name[0] not in "_~"}
    try:
        applied = MigrationRecorder(connections[using]).applied_migrations()
    except ProgrammingError as error:
        if is_forbidden(error):
            return []
        raise
    return sorted(name for name in names if (APP, name) not in applied)
