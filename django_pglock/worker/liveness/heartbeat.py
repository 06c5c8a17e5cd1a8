"""The heartbeat: shows that the worker lives, by the date in its row and by the session that holds its lock.

The session is the worker's own, or that of a supervisor, which beats for all of its processes. If the supervisor does
not, the worker does so itself from the next beat on (``supervisor_heartbeat.py``).

A worker that has nothing in flight may rest, if enough older workers beat often (``store/liveness.py``): it beats about
each third interval. It beats once more before it claims anything, so no task has a worker whose last heartbeat is older
than others tolerate.

While a task keeps this thread from running, the heartbeat process beats in its place: see ``heartbeat_process.py``.

Between two beats this thread receives notifications. It does nothing else, and while the supervisor beats it opens no
session: to open one may take longer than others wait for a heartbeat. Before each try to open one, and soon after its
beginning, this thread looks whether the supervisor can beat again. What is about running tasks is in
``running_tasks.py``.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import Error as DatabaseFailure

from django_pglock.conf import get_settings
from django_pglock.postgres.connections import connection_for
from django_pglock.store.liveness import (
    LATE,
    LEAST_LIMIT,
    REST_INTERVALS,
    Beat,
    HeartbeatReply,
    beat_all,
    deregister,
    silent_after,
)
from django_pglock.tasks import registry
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess, instructions_for
from django_pglock.worker.liveness.listener import Listener, NotificationSession, SelfPipe
from django_pglock.worker.liveness.pending_migrations import pending_migrations
from django_pglock.worker.liveness.supervisor_heartbeat import Answer, SupervisorHeartbeat
from django_pglock.worker.liveness.worker_lock import WorkerLock
from django_pglock.worker.service import LONGEST_PAUSE, ConnectedService, logger
from django_pglock.worker.shared_sessions import SharedSessions

#: Seconds between two checks for pending migrations.
CHECK_INTERVAL = 1.0
#: Seconds for the supervisor to answer, as a share of the heartbeat interval: if it does not, there is still time to
#: beat before others suspect this worker.
ANSWERED_WITHIN = 0.5
#: The least number of seconds for a connect; a smaller one means the same to libpq.
LEAST_TO_CONNECT = 2
#: After its first interval without a beat, a worker multiplies each interval of its rest by a factor between these.
REST_JITTER = (0.6, 1.4)
#: The share of beats after which a worker begins to rest, if it has not just had a full rest. A new task makes all that
#: rest beat at once, and so does a restart of the server. If the older ones die just then, some of the others have to
#: notice it sooner than after a full rest.
REST_PROBABILITY = 1 / 3


class Heartbeat(ConnectedService):
    """Beats, and receives notifications.

    It starts before the first claim and stops after the last settle, because a draining worker must not look dead. It
    does not beat before all migrations of the tables are applied. ``on_beat`` is called after each beat, and
    ``on_sleep_flag_unset`` if ``is_sleeping`` is false in the worker's row. ``on_older_workers`` is called with the
    number of older workers that do the upkeep. ``on_sleeping_workers`` is called with two numbers of workers that serve
    the same queues and sleep: the older ones, and all. ``is_pooled``: the database is reached through a pooler in
    transaction mode. A pooler that gives its clients other process numbers than the server's is recognised without
    that. ``last_sessions``: if it has no session at its end, it takes one of these to remove the worker's row.
    """

    name = "heartbeat"

    def __init__(
        self,
        in_flight: InFlight,
        using: str,
        identity: Identity,
        queues: list[str],
        *,
        is_pooled: bool = False,
        last_sessions: SharedSessions | None = None,
    ) -> None:
        super().__init__(using)
        #: The heartbeat of the supervisor that beats for this worker; None: there is none.
        self.supervisor: SupervisorHeartbeat | None = None
        self.in_flight = in_flight
        self.identity = identity
        self.queues = queues
        self._last_sessions = last_sessions
        #: What notifications are passed to; None: none are received.
        self.listener: Listener | None = None
        self.process = HeartbeatProcess(partial(instructions_for, using, identity.id))
        self.on_beat: Callable[[], None] = lambda: None
        self.on_sleep_flag_unset: Callable[[], None] = lambda: None
        self.on_older_workers: Callable[[int], None] = lambda _: None
        self.on_sleeping_workers: Callable[[int, int], None] = lambda _older_workers, _all: None
        self._self_pipe = SelfPipe()
        self.is_draining = False
        self.first_beat = threading.Event()
        #: When the last beat that was written was begun, by time.monotonic().
        self.beat_at: float | None = None
        #: Names of the migrations for which the worker waits.
        self.pending: list[str] = []
        # How many functions our row has. Functions are only added, so a new number means new functions.
        self._registered_functions = -1
        self.lock = WorkerLock(using, is_pooled=is_pooled)  # held by our session while it beats
        self._beats_here = False  # whether our session is the one that beats and listens
        self._notifications = NotificationSession(self._on_notification)
        self._answer: Answer | None = None  # of the supervisor, if it has written the last beat
        #: Whether this worker may rest at all: it relies on others that serve the same queues.
        self.can_rest = False
        #: Called after a beat that was asked for.
        self.on_requested_beat: Callable[[], None] = lambda: None
        # Whether the last answer allows a rest, whether the worker rests, and whether somebody has asked for a beat.
        self._may_rest = self._rests = self._is_beat_requested = False
        # Whether nothing has ended the last rest before its time.
        self._has_rested = False
        in_flight.when_busy.append(self._end_rest)

    def use_supervisor(self, supervisor: SupervisorHeartbeat) -> None:
        """Have the supervisor beat and listen, as long as it does. Call it before ``start()``."""
        self.supervisor = supervisor
        supervisor.on_notification, supervisor.on_missed_notifications = self._on_notification, self._note_missed

    def _on_notification(self, channel: str, payload: str) -> None:
        if self.listener is not None:
            self.listener.hear(channel, payload)

    def _note_missed(self) -> None:
        if self.listener is not None:
            self.listener.missed()

    def start(self) -> None:
        self._self_pipe.open()
        super().start()

    @property
    def patience(self) -> float:
        """A third of HEARTBEAT_LIMIT: a beat that is given up must be tried again before the worker looks dead."""
        return get_settings().HEARTBEAT_LIMIT / 3

    @property
    def longest_pause(self) -> float:
        """Half an interval: when the server is back, the other services wait for this one."""
        return min(LONGEST_PAUSE, get_settings().HEARTBEAT_INTERVAL / 2)

    def is_heartbeat_stale(self) -> bool:
        """Say whether others may count this worker as dead: after a stop of the process, or without a session to beat.

        Also true while this worker rests; calling it ends the rest.
        """
        # Before the first heartbeat the worker claims nothing.
        if self.beat_at is None:
            return False
        if self._rests:
            # However young the last beat is: the heartbeat process believes that another one has come since.
            self._is_beat_requested = True
            self.wake()
            # The beat may have come at this moment. Then nobody calls ``on_requested_beat`` for us.
            if self._rests:
                return True
        age = time.monotonic() - self.beat_at
        return age > silent_after() or (not self.is_connected and age > 2 * get_settings().HEARTBEAT_INTERVAL)

    def is_resting(self) -> bool:
        """Say whether this worker beats rarely while it is idle, because enough others do it often."""
        return self._may_rest

    def _end_rest(self) -> None:
        if self._rests:
            self.wake()

    @property
    def is_connected(self) -> bool:
        """Whether there is a session that beats, as far as the service knows."""
        return self._is_relieved or super().is_connected

    @property
    def _is_relieved(self) -> bool:
        """Whether the supervisor has written the last beat, and can go on."""
        return self._answer is not None and self.supervisor is not None and self.supervisor.is_up

    def is_listening(self) -> bool:
        """Say whether notifications reach this worker: the session that listens has just written a heartbeat."""
        if self.listener is None or not self.is_connected or self.beat_at is None:
            return False
        is_listening = self.lock.is_held if self._answer is None else self._answer.is_listening
        late = LATE * (REST_INTERVALS if self._rests else 1)
        return is_listening and time.monotonic() - self.beat_at < late * get_settings().HEARTBEAT_INTERVAL

    def open(self) -> None:
        # While the supervisor beats, this service needs no session. It may be able to beat again since the last try.
        if self.supervisor is not None:
            self.supervisor.receive()
        if self.supervisor is None or not self.supervisor.is_up:
            super().open()

    def _prepare(self, connection: Any) -> None:
        if self.first_beat.is_set() and self.supervisor is not None and not self.supervisor.is_over:
            # The supervisor may be able to beat again before the session is open. The next try may take longer. In the
            # setting, 0 means no limit.
            seconds = max(LEAST_TO_CONNECT, round(get_settings().HEARTBEAT_INTERVAL)) * 2 ** min(self._failures, 10)
            options = connection.settings_dict["OPTIONS"]
            options["connect_timeout"] = min(seconds, max(0, int(options["connect_timeout"])) or seconds)
        super()._prepare(connection)

    def connected(self) -> None:
        self._note_session()

    def _note_session(self) -> None:
        """Note that our session is another one, or that there is none."""
        self.lock.note_session()
        self._beats_here = False

    def turn(self) -> None:
        if not self.first_beat.is_set() and not self._is_prepared():
            self.stopping.wait(CHECK_INTERVAL)
            return
        began = time.monotonic()
        next_in = self.beat()
        self.beat_at = began
        # In this order: a thread that sees that we do not rest must not see the age of the beat before. One that has
        # asked while we rested must be called.
        self._rests = False
        is_requested, self._is_beat_requested = self._is_beat_requested, False
        self.process.note_beat()
        self.first_beat.set()
        self.on_beat()
        if is_requested:
            self.on_requested_beat()
        self._rest(next_in)

    def _is_prepared(self) -> bool:
        """Prepare the first beat; say whether all is there. The worker has claimed nothing yet, so it may take long."""
        super().open()
        if not self._has_tables():
            return False
        if self.process.needs_instructions:
            self.process.renew_instructions()
        return True

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
        """End the present wait."""
        self._self_pipe.wake()

    def _rest(self, seconds: float) -> None:
        """Wait until the next beat is due: for one interval, and for more if the worker rests."""
        was_relieved = self._is_relieved
        rests = self._may_rest and (self._has_rested or random.random() < REST_PROBABILITY)  # noqa: S311
        self._has_rested = False
        for number in range(REST_INTERVALS if rests else 1):
            if number:
                # Workers that have started together should not beat together. If the older ones die, one notices soon.
                seconds = random.uniform(*REST_JITTER) * get_settings().HEARTBEAT_INTERVAL  # noqa: S311
            self.note_life(seconds)
            until = time.monotonic() + seconds
            while not self.stopping.is_set() and (now := time.monotonic()) < until:
                self._receive()
                if (was_relieved and not self._is_relieved) or self._must_beat_now():
                    return
                self._wait(until - now)
            if self.stopping.is_set() or self._is_beat_requested or not (rests and self._is_idle()):
                return
            self._rests = True
            # Our threads run, and no beat is late.
            self.process.note_beat()
        self._has_rested = True

    def _is_idle(self) -> bool:
        return not (self.in_flight.claims or self.in_flight.is_claiming or self.is_draining)

    def _must_beat_now(self) -> bool:
        """Whether this worker rests and has to beat at once."""
        return self._rests and (self._is_beat_requested or not self._is_idle())

    def _receive(self) -> None:
        """Receive the messages of the supervisor, and the notifications."""
        if self.supervisor is not None:
            self.supervisor.receive()
        if self.listener is not None:
            if self._beats_here:
                self._notifications.receive(connection_for(self.using))
            self.listener.pass_on_postponed()

    def _wait(self, seconds: float) -> None:
        """Wait, until there is something to receive."""
        channels: list[Any] = []
        if self.supervisor is not None and not self.supervisor.is_over:
            channels.append(self.supervisor)
        if self.listener is not None:
            if self._beats_here:
                channels.append(connection_for(self.using).connection)
            seconds = min(seconds, self.listener.due_in())
        self._self_pipe.wait(seconds, *channels)

    def beat(self) -> float:
        """Have it written that this worker lives; return the seconds until the next beat."""
        known = registry.known_paths()
        reply, next_in = self._beat(None if len(known) == self._registered_functions else known)
        if reply is None:
            # Our row was removed. Only a beat that names the functions makes it anew.
            self._registered_functions = -1
            reply, next_in = self._beat(known)
        if reply is not None:
            self._note_answer(reply)
        return next_in

    def _beat(self, task_paths: list[str] | None) -> tuple[HeartbeatReply | None, float]:
        """Beat once. Return the answer, None if we have no row, and the seconds until the next beat."""
        interval = get_settings().HEARTBEAT_INTERVAL
        beat = self._next_beat(task_paths)
        answer = None
        if self.supervisor is not None and self.supervisor.is_up:
            within = interval * ANSWERED_WITHIN
            answer = self.supervisor.ask(beat._replace(is_interrupted=self._beats_here), within=within)
        self._answer = answer
        if answer is None:
            return self._beat_here(beat), interval
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
            is_stopping=self.is_draining,
            task_paths=task_paths,
        )

    def _beat_here(self, beat: Beat) -> HeartbeatReply | None:
        """Beat in a session of our own, which holds our lock and listens."""
        super().open()
        is_new, self._beats_here = not self._beats_here, True
        if is_new and self.listener is not None:
            self._notifications.listen(connection_for(self.using))
            self._note_missed()
        self.lock.hold()
        own = beat._replace(lock_key=self.lock.held_number, is_interrupted=is_new)
        return beat_all(self.using, [own]).get(beat.id)

    def _note_answer(self, reply: HeartbeatReply) -> None:
        self._registered_functions = reply.known
        has_time = get_settings().HEARTBEAT_LIMIT >= LEAST_LIMIT * get_settings().HEARTBEAT_INTERVAL
        # A supervisor beats for all of its processes in one statement, so a rest would save nothing.
        self._may_rest = self.can_rest and self.supervisor is None and has_time and reply.may_rest
        self.on_older_workers(reply.older_workers)
        self.on_sleeping_workers(reply.older_sleeping_workers, reply.sleeping_workers)
        if not reply.is_sleeping:
            self.on_sleep_flag_unset()

    def _close_own_session(self) -> None:
        """Close our session: the supervisor beats."""
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
        """Delete the worker's row: the worker ends in order and owns no task any more."""
        # While a new session hangs, the process must end nevertheless: others will run the tasks that it has given up.
        self.sessions = self._last_sessions
        try:
            super().open()
            deregister(self.using, self.identity.id)
        except DatabaseFailure as error:
            logger.warning("The row of this worker could not be deleted. Other workers will delete it: %s", error)
