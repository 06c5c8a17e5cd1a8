"""The heartbeat: shows that the worker lives, by the date in its row and by the session that holds its lock.

Behind a pooler no session is the worker's own. There it holds no lock, and its row says so.

While a task keeps this thread from running, the heartbeat process beats in its place: see ``heartbeat_process.py``.

Between two beats this thread receives notifications in the same session, passes on requests to cancel running tasks,
answers requests for their stacks, and writes their progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from django.apps import apps
from django.db import Error as DatabaseFailure
from django.db import connections

from django_pglock.conf import get_settings
from django_pglock.keys.reserved import WORKER, draw_number
from django_pglock.postgres.connections import backend_pid, connection_for
from django_pglock.postgres.sessions import dedicated_connection, parameters_of
from django_pglock.store.give_back import give_back, server_time
from django_pglock.store.liveness import LATE, beat, depart
from django_pglock.store.requests import requests_to
from django_pglock.store.stacks import answer_stack
from django_pglock.tasks import registry
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess
from django_pglock.worker.liveness.listener import Listener, SelfPipe
from django_pglock.worker.liveness.pending_migrations import pending_migrations
from django_pglock.worker.service import LONGEST_PAUSE, ConnectedService, logger

#: Takes the worker's lock. NULL behind a pooler, where the lock would stay in a session that other clients use. CASE,
#: because the server must compare the process numbers before it tries to take the lock.
HOLD_LOCK = "SELECT CASE WHEN pg_backend_pid() = %s THEN pg_try_advisory_lock(%s, %s) END"
#: Seconds between two writes of the progress of running tasks.
BETWEEN_PROGRESS = 1.0
#: Seconds between two checks for pending migrations.
BETWEEN_LOOKS = 1.0


class Progress(Protocol):
    """Writes the progress that running tasks report."""

    def note(self) -> None:
        """Write what is new."""


class Heartbeat(ConnectedService):
    """Beats, and from time to time compares the tasks that are ours in the table with those in flight.

    It starts before the first claim and stops after the last settle, because a draining worker must not look dead. It
    does not beat before all migrations of the tables are applied. ``beaten`` is called after each beat, and
    ``taken_to_be_awake`` if the worker's row does not say that it sleeps. ``told_elders`` is called with the number of
    elder workers that do the upkeep. ``told_sleepers`` is called with two numbers of workers that serve the same queues
    and sleep: the elder ones, and all. ``cancel`` is called with the ids and attempts of running tasks that somebody
    has cancelled, at each beat until they have ended. ``stack_of`` returns the stack of a running task as text, by id
    and attempt. ``is_pooled``: the database is reached through a pooler in transaction mode. A pooler that gives its
    clients other process numbers than the server's is recognised without that.
    """

    name = "heartbeat"

    def __init__(
        self,
        in_flight: InFlight,
        using: str,
        identity: Identity,
        queues: list[str],
        *,
        progress: Progress,
        cancel: Callable[[list[tuple[int, int]]], None],
        stack_of: Callable[[tuple[int, int]], str],
        is_pooled: bool = False,
    ) -> None:
        super().__init__(using)
        self.is_pooled = is_pooled
        self.in_flight = in_flight
        self.identity = identity
        self.queues = queues
        self.progress = progress
        self.cancel = cancel
        self.stack_of = stack_of
        #: What receives notifications in this session; None: nothing does.
        self.listener: Listener | None = None
        self.process = HeartbeatProcess(self._instructions)
        self.beaten: Callable[[], None] = lambda: None
        self.taken_to_be_awake: Callable[[], None] = lambda: None
        self.told_elders: Callable[[int], None] = lambda _: None
        self.told_sleepers: Callable[[int, int], None] = lambda _elders, _all: None
        self._self_pipe = SelfPipe()
        self.is_draining = False
        self.first_beat = threading.Event()
        #: When the last beat was written, by time.monotonic().
        self.beat_at: float | None = None
        #: Names of the migrations for which the worker waits.
        self.pending: list[str] = []
        self._compared_at = time.monotonic()
        # How many functions our row says that we know. Functions are only added, so a new number means new functions.
        self._told = -1
        #: The number of the advisory lock that the session holds, or would hold without a pooler.
        self.lock_key = draw_number()
        # Whether the present session holds the lock; None: that has not been tried yet.
        self._has_lock: bool | None = None
        # Whether the present session has not beaten yet.
        self._is_interrupted = True

    def start(self) -> None:
        self._self_pipe.open()
        super().start()

    @property
    def patience(self) -> float:  # type: ignore[override]
        """A third of HEARTBEAT_LIMIT: a beat that is given up must be tried again before the worker looks dead."""
        return get_settings().HEARTBEAT_LIMIT / 3

    @property
    def longest_pause(self) -> float:  # type: ignore[override]
        """Half an interval: when the server is back, the other services wait for this one."""
        return min(LONGEST_PAUSE, get_settings().HEARTBEAT_INTERVAL / 2)

    def is_unheard(self) -> bool:
        """Say whether others may count us as dead: after a stop of the process, or without a session for heartbeats."""
        # Before the first heartbeat the worker claims nothing.
        if self.beat_at is None:
            return False
        age, settings = time.monotonic() - self.beat_at, get_settings()
        return age > settings.HEARTBEAT_LIMIT or (not self.is_connected and age > 2 * settings.HEARTBEAT_INTERVAL)

    def is_listening(self) -> bool:
        """Say whether notifications reach this worker: its own session, which listens, has just written a heartbeat."""
        if self.listener is None or not self._has_lock or not self.is_connected or self.beat_at is None:
            return False
        return time.monotonic() - self.beat_at < LATE * get_settings().HEARTBEAT_INTERVAL

    def connected(self) -> None:
        self._has_lock = False if self.is_pooled else None
        self._is_interrupted = True
        if self.listener is not None:
            self.listener.listen(connection_for(self.using))

    def turn(self) -> None:
        if not self.first_beat.is_set() and not self._has_tables():
            self.stopping.wait(BETWEEN_LOOKS)
            return
        self._hold_lock()
        self.beat()
        self.process.note_beat()
        self.beat_at = time.monotonic()
        self.first_beat.set()
        self.beaten()
        self._compare()
        self._pass_on_requests()
        self._rest()

    def _hold_lock(self) -> None:
        """Take the worker's lock, unless this session has it or is shared through a pooler.

        Another worker may have drawn the same number, or an earlier session of ours, half open, may still hold the
        lock. Then we draw another number, and the next beat writes it into our row.
        """
        with connections[self.using].cursor() as cursor:
            while self._has_lock is None:
                cursor.execute(HOLD_LOCK, (backend_pid(cursor.db), WORKER, self.lock_key))
                [has_lock] = cursor.fetchone()
                if has_lock is False:
                    self.lock_key = draw_number()
                else:
                    self._has_lock = bool(has_lock)

    def _has_tables(self) -> bool:
        """Say whether no migration is pending. The first time that one is, log it."""
        was_told = bool(self.pending)
        self.pending = pending_migrations(self.using)
        if self.pending and not was_told:
            logger.warning(
                "Waiting for migrations of django_pglock (%s). Run: manage.py migrate django_pglock --database %s",
                ", ".join(self.pending),
                self.using,
            )
        return not self.pending

    def wake(self) -> None:
        """Look now for requests about running tasks."""
        self._self_pipe.wake()

    def _rest(self) -> None:
        interval, now = get_settings().HEARTBEAT_INTERVAL, time.monotonic()
        self.note_life(interval)
        beat_at, progress_at = now + interval, now + BETWEEN_PROGRESS
        while not self.stopping.is_set() and (now := time.monotonic()) < beat_at:
            if now >= progress_at:
                self.progress.note()
                progress_at = time.monotonic() + BETWEEN_PROGRESS
            if self._wait(min(beat_at, progress_at) - now):
                self._pass_on_requests()
        self.progress.note()

    def _wait(self, seconds: float) -> bool:
        """Wait, and receive what is notified meanwhile. Say whether somebody has called ``wake()``."""
        if self.listener is None:
            return self._self_pipe.wait(seconds)
        session = connection_for(self.using)
        self.listener.receive(session)
        return self._self_pipe.wait(min(seconds, self.listener.due_in()), session.connection)

    def _pass_on_requests(self) -> None:
        if not self.in_flight.claims:
            return
        requests = requests_to(self.using, self.identity.id)
        if requests.cancels:
            self.cancel(requests.cancels)
        for task, attempt in requests.stacks:
            answer_stack(self.using, task, attempt, self.identity.id, self.stack_of((task, attempt)))

    def beat(self) -> None:
        """Write that this worker lives and, if that is new, which functions it knows."""
        me, known = self.identity, registry.known_paths()
        answer = beat(
            self.using,
            me.id,
            name=me.name,
            hostname=me.hostname,
            pid=me.pid,
            queues=self.queues,
            threads=len(self.in_flight.threads.slots),
            is_stopping=self.is_draining,
            lock_key=self.lock_key if self._has_lock else None,
            is_interrupted=self._is_interrupted,
            task_paths=None if len(known) == self._told else known,
        )
        self._is_interrupted = False
        self._told = answer.known
        self.told_elders(answer.elders)
        self.told_sleepers(answer.elder_sleepers, answer.sleepers)
        if not answer.is_sleeping:
            self.taken_to_be_awake()

    def close(self) -> None:
        if self.stopping.is_set() and self._connection is not None and self.first_beat.is_set():
            self._depart()
        super().close()

    def finish(self) -> None:
        self.process.stop()
        self._self_pipe.close()

    def _depart(self) -> None:
        """Delete the worker's row: the worker ends in order and owns no task any more."""
        try:
            depart(self.using, self.identity.id)
        except DatabaseFailure as error:
            logger.warning("The row of this worker could not be deleted. Other workers will delete it: %s", error)

    def _compare(self) -> None:
        # A claim whose answer got lost may be committed after connected() has looked for it. By now it is committed.
        limit = get_settings().HEARTBEAT_LIMIT
        if time.monotonic() - self._compared_at < limit:
            return
        # This process may freeze between the list and the statement, and what it claims meanwhile is not in the list. A
        # claim that is being made may have waited for a lock for longer than the limit, and its date is that of its
        # message. The order matters: a claim that begins after the first line is excluded by its date.
        before, under_way = server_time(self.using), self.in_flight.group_keys_being_claimed()
        if self.in_flight.is_claiming:
            return
        self._compared_at = time.monotonic()
        known = self.in_flight.task_ids()
        lost = give_back(self.using, self.identity.id, known, older_than=limit, before=before, except_keys=under_way)
        if lost:
            logger.warning("Gave back %d tasks that were claimed for this worker and never reached it.", lost)

    def _instructions(self) -> dict[str, Any]:
        connection = dedicated_connection(self.using, application_name="lockworker heartbeat process")
        return {
            "connection": parameters_of(connection),
            "session": {**self._session_settings(), "statement_timeout": "5s"},
            "table": connection.ops.quote_name(apps.get_model("django_pglock", "Worker")._meta.db_table),
            "worker": str(self.identity.id),
            "interval": get_settings().HEARTBEAT_INTERVAL,
            "limit": get_settings().HEARTBEAT_LIMIT,
        }

    def _session_settings(self) -> dict[str, str]:
        """Return what the role, OPTIONS or receivers of ``connection_created`` have set in this service's session."""
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT current_setting('search_path'), current_setting('role')")
            search_path, role = cursor.fetchone()
        return {"search_path": search_path, "role": role}
