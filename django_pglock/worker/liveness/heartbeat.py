"""The heartbeat: shows that the worker lives, by the date in its row and by the session that holds its lock.

The session is the worker's own, or that of a supervisor, which beats for all of its processes. If the supervisor does
not, the worker does so itself from the next beat on (``heartbeat_line.py``).

While a task keeps this thread from running, the heartbeat process beats in its place: see ``heartbeat_process.py``.

Between two beats this thread receives notifications, passes on requests to cancel running tasks, answers requests for
their stacks, and writes their progress.
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
from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.sessions import dedicated_connection, parameters_of
from django_pglock.store.liveness import LATE, Beat, Beaten, beat_all, depart
from django_pglock.store.requests import requests_to
from django_pglock.store.stacks import answer_stack
from django_pglock.tasks import registry
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.claim_comparison import ClaimComparison
from django_pglock.worker.liveness.heartbeat_line import Answer, HeartbeatLine
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess
from django_pglock.worker.liveness.listener import Listener, NotificationSession, SelfPipe
from django_pglock.worker.liveness.pending_migrations import pending_migrations
from django_pglock.worker.liveness.worker_lock import WorkerLock
from django_pglock.worker.service import LONGEST_PAUSE, ConnectedService, logger

#: Seconds between two writes of the progress of running tasks.
BETWEEN_PROGRESS = 1.0
#: Seconds between two checks for pending migrations.
BETWEEN_LOOKS = 1.0
#: Seconds for the supervisor to answer, as a share of the heartbeat interval: if it does not, there is still time to
#: beat before others suspect this worker.
ANSWERED_WITHIN = 0.5
#: Seconds without a statement after which the session is closed, if the supervisor beats.
IDLE = 10.0


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
        #: The line to the supervisor that beats for this worker; None: there is none.
        self.line: HeartbeatLine | None = None
        self.in_flight = in_flight
        self.identity = identity
        self.queues = queues
        self.progress = progress
        self.cancel = cancel
        self.stack_of = stack_of
        #: What notifications are passed to; None: none are received.
        self.listener: Listener | None = None
        self.process = HeartbeatProcess(self._instructions)
        self.beaten: Callable[[], None] = lambda: None
        self.taken_to_be_awake: Callable[[], None] = lambda: None
        self.told_elders: Callable[[int], None] = lambda _: None
        self.told_sleepers: Callable[[int, int], None] = lambda _elders, _all: None
        self._self_pipe = SelfPipe()
        self.is_draining = False
        self.first_beat = threading.Event()
        #: When the last beat that was written was begun, by time.monotonic().
        self.beat_at: float | None = None
        #: Names of the migrations for which the worker waits.
        self.pending: list[str] = []
        self.comparison = ClaimComparison(in_flight, using, identity.id)
        # How many functions our row says that we know. Functions are only added, so a new number means new functions.
        self._told = -1
        #: The lock that our session holds while it beats.
        self.lock = WorkerLock(using, is_pooled=is_pooled)
        # Whether our session is the one that beats and listens, and when a statement last needed it.
        self._beats_here = False
        self._used_at = 0.0
        self._notifications = NotificationSession(self._hear)
        # What the supervisor has answered, if it has written the last beat.
        self._answer: Answer | None = None

    def join(self, line: HeartbeatLine) -> None:
        """Have the supervisor beat and listen, as long as it does. Call it before ``start()``."""
        self.line = line
        line.heard, line.missed = self._hear, self._note_missed

    def _hear(self, channel: str, payload: str) -> None:
        if self.listener is not None:
            self.listener.hear(channel, payload)

    def _note_missed(self) -> None:
        if self.listener is not None:
            self.listener.missed()

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

    @property
    def is_connected(self) -> bool:
        """Whether there is a session that beats, as far as the service knows."""
        return self._is_relieved or super().is_connected

    @property
    def _is_relieved(self) -> bool:
        """Whether the supervisor has written the last beat, and can go on."""
        return self._answer is not None and self.line is not None and self.line.is_up

    def is_listening(self) -> bool:
        """Say whether notifications reach this worker: the session that listens has just written a heartbeat."""
        if self.listener is None or not self.is_connected or self.beat_at is None:
            return False
        is_listening = self.lock.is_held if self._answer is None else self._answer.is_listening
        return is_listening and time.monotonic() - self.beat_at < LATE * get_settings().HEARTBEAT_INTERVAL

    def open(self) -> None:
        # While the supervisor beats, there is a session only if there is something to do with it.
        if self.line is None or not self.line.is_up:
            self._open_session()

    def _open_session(self) -> None:
        super().open()
        self._used_at = time.monotonic()

    def connected(self) -> None:
        self._note_session()

    def _note_session(self) -> None:
        """Note that our session is another one, or that there is none."""
        self.lock.note_session()
        self._beats_here = False

    def turn(self) -> None:
        if not self.first_beat.is_set() and not self._has_tables():
            self.stopping.wait(BETWEEN_LOOKS)
            return
        began = time.monotonic()
        next_in = self.beat()
        self.beat_at = began
        self.process.note_beat()
        self.first_beat.set()
        self.beaten()
        if self.comparison.is_due:
            self._open_session()
            self.comparison.compare()
        self._pass_on_requests()
        self._rest(next_in)

    def _has_tables(self) -> bool:
        """Say whether no migration is pending. The first time that one is, log it."""
        was_told = bool(self.pending)
        self._open_session()
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

    def _rest(self, seconds: float) -> None:
        now = time.monotonic()
        self.note_life(seconds)
        was_relieved = self._is_relieved
        beat_at, progress_at = now + seconds, now + BETWEEN_PROGRESS
        while not self.stopping.is_set() and (now := time.monotonic()) < beat_at:
            if was_relieved and not self._is_relieved:
                return
            if now >= progress_at:
                self._note_progress()
                progress_at = time.monotonic() + BETWEEN_PROGRESS
            if self._wait(min(beat_at, progress_at) - now):
                self._pass_on_requests()
        self._note_progress()

    def _note_progress(self) -> None:
        if self.in_flight.claims:
            self._open_session()
            self.progress.note()
        elif self._is_relieved and time.monotonic() - self._used_at > IDLE:
            self._hang_up()

    def _wait(self, seconds: float) -> bool:
        """Wait, and receive what is notified meanwhile. Say whether somebody has called ``wake()``."""
        channels: list[Any] = []
        if self.line is not None:
            self.line.receive()
            channels += [] if self.line.is_over else [self.line]
        if self.listener is not None:
            if self._beats_here:
                session = connection_for(self.using)
                self._notifications.receive(session)
                channels.append(session.connection)
            self.listener.pass_on_postponed()
            seconds = min(seconds, self.listener.due_in())
        return self._self_pipe.wait(seconds, *channels)

    def _pass_on_requests(self) -> None:
        if not self.in_flight.claims:
            return
        self._open_session()
        requests = requests_to(self.using, self.identity.id)
        if requests.cancels:
            self.cancel(requests.cancels)
        for task, attempt in requests.stacks:
            answer_stack(self.using, task, attempt, self.identity.id, self.stack_of((task, attempt)))

    def beat(self) -> float:
        """Have it written that this worker lives; return the seconds until the next beat."""
        interval = get_settings().HEARTBEAT_INTERVAL
        known = registry.known_paths()
        beat = self._next_beat(None if len(known) == self._told else known)
        answer = None
        if self.line is not None and self.line.is_up:
            answer = self.line.ask(beat._replace(is_interrupted=self._beats_here), within=interval * ANSWERED_WITHIN)
        self._answer = answer
        if answer is None:
            self._note_answer(self._beat_here(beat))
            return interval
        if self._beats_here:
            self._hang_up()
        self._note_answer(answer.beaten)
        return answer.next_in

    def _next_beat(self, task_paths: list[str] | None) -> Beat:
        me = self.identity
        return Beat(
            me.id,
            name=me.name,
            hostname=me.hostname,
            pid=me.pid,
            queues=self.queues,
            threads=len(self.in_flight.threads.slots),
            is_stopping=self.is_draining,
            task_paths=task_paths,
        )

    def _beat_here(self, beat: Beat) -> Beaten:
        """Beat in a session of our own, which holds our lock and listens."""
        self._open_session()
        is_new, self._beats_here = not self._beats_here, True
        if is_new and self.listener is not None:
            self._notifications.listen(connection_for(self.using))
            self._note_missed()
        self.lock.hold()
        own = beat._replace(lock_key=self.lock.held_number, is_interrupted=is_new)
        return beat_all(self.using, [own])[beat.id]

    def _note_answer(self, beaten: Beaten) -> None:
        self._told = beaten.known
        self.told_elders(beaten.elders)
        self.told_sleepers(beaten.elder_sleepers, beaten.sleepers)
        if not beaten.is_sleeping:
            self.taken_to_be_awake()

    def _hang_up(self) -> None:
        """Close our session: the supervisor beats, and nothing else needs it."""
        self.hang_up()
        self._note_session()

    def close(self) -> None:
        if self.stopping.is_set() and self.is_connected and self.first_beat.is_set():
            self._depart()
        super().close()

    def finish(self) -> None:
        self.process.stop()
        self._self_pipe.close()
        if self.line is not None:
            self.line.close()

    def _depart(self) -> None:
        """Delete the worker's row: the worker ends in order and owns no task any more."""
        try:
            self._open_session()
            depart(self.using, self.identity.id)
        except DatabaseFailure as error:
            logger.warning("The row of this worker could not be deleted. Other workers will delete it: %s", error)

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
        self._open_session()
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT current_setting('search_path'), current_setting('role')")
            search_path, role = cursor.fetchone()
        return {"search_path": search_path, "role": role}
