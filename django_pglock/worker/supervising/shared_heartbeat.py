"""The heartbeat that a supervisor shares among its processes: one session beats, listens and holds locks for all.

Each process asks for each of its heartbeats, so a process that is stopped or that a task keeps from running gets none.
The supervisor writes the heartbeats of all processes together, in one statement. When a process dies, the supervisor
releases its lock. When the supervisor dies or is stopped, or its session is lost, the processes beat by themselves
(``liveness/supervisor_heartbeat.py``).
"""

from __future__ import annotations

import socket
import time
from queue import SimpleQueue
from typing import Any
from uuid import UUID

from django_pglock.conf import get_settings
from django_pglock.postgres.connections import connection_for
from django_pglock.store.liveness import Beat, beat_all
from django_pglock.worker.liveness.json_lines import JsonLines
from django_pglock.worker.liveness.listener import NotificationSession, SelfPipe
from django_pglock.worker.liveness.worker_lock import WorkerLock
from django_pglock.worker.service import LONGEST_PAUSE, ConnectedService, logger

#: Seconds from the first request to the statement, in which others may come, as a share of the heartbeat interval.
GATHER = 0.02


class SharedHeartbeat(ConnectedService):
    """Beats for the processes of one database. ``is_pooled``: it is reached through a pooler in transaction mode."""

    name = "shared heartbeat"

    def __init__(self, using: str, *, is_pooled: bool = False) -> None:
        super().__init__(using)
        self.is_pooled = is_pooled
        self._added: SimpleQueue[socket.socket] = SimpleQueue()
        self._clients: list[HeartbeatClient] = []
        # Clients that have ended, whose locks the session still holds.
        self._ended: list[HeartbeatClient] = []
        self._session = NotificationSession(self._pass_on)
        self._self_pipe = SelfPipe()
        # All processes are asked to beat at the same time: whole intervals after this moment.
        self._began_at = time.monotonic()

    def start(self) -> None:
        self._self_pipe.open()
        super().start()

    @property
    def patience(self) -> float:
        """A third of HEARTBEAT_LIMIT, as for a heartbeat of one process."""
        return get_settings().HEARTBEAT_LIMIT / 3

    @property
    def longest_pause(self) -> float:
        """Half an interval, as for a heartbeat of one process."""
        return min(LONGEST_PAUSE, get_settings().HEARTBEAT_INTERVAL / 2)

    def add(self, end: socket.socket) -> None:
        """Add a process whose heartbeats this service writes; it has the other end of the socket. Thread-safe."""
        self._added.put(end)
        self.wake()

    def wake(self) -> None:
        self._self_pipe.wake()

    def connected(self) -> None:
        for client in self._clients:
            client.note_session()
        self._ended = []
        if not self.is_pooled:
            self._session.listen(connection_for(self.using))
        for client in self._clients:
            client.tell({"can_beat": True})

    def turn(self) -> None:
        if not self.is_pooled:
            self._session.receive(connection_for(self.using))
        self._receive()
        self._release_locks()
        for client in self._clients:
            client.tell_missed()
            client.drop_old_request()
        asking = [client for client in self._clients if client.asks]
        interval = get_settings().HEARTBEAT_INTERVAL
        due_in = min((client.asked_at + GATHER * interval for client in asking), default=0.0) - time.monotonic()
        if asking and (due_in <= 0 or len(asking) == len(self._clients)):
            self._beat(asking)
        else:
            self._wait(due_in if asking else interval)

    def _wait(self, seconds: float) -> None:
        self.note_life(seconds)
        session = [] if self.is_pooled else [connection_for(self.using).connection]
        self._self_pipe.wait(seconds, *session, *self._clients)

    def _receive(self) -> None:
        """Take what the processes have sent."""
        while not self._added.empty():
            client = HeartbeatClient(self.using, self._added.get(), is_pooled=self.is_pooled)
            self._clients.append(client)
        for client in list(self._clients):
            client.receive()
            if client.is_over:
                self._clients.remove(client)
                self._ended.append(client)
                client.close()

    def _release_locks(self) -> None:
        while self._ended:
            self._ended[-1].lock.release()
            self._ended.pop()

    def _beat(self, asking: list[HeartbeatClient]) -> None:
        """Beat for all processes that ask, and answer them."""
        for client in asking:
            client.lock.hold()
        answers = beat_all(self.using, [client.beat() for client in asking])
        interval = get_settings().HEARTBEAT_INTERVAL
        next_in = interval - (time.monotonic() - self._began_at) % interval
        for client in asking:
            client.answer(answers.get(client.worker), is_listening=client.lock.is_held, next_in=next_in)

    def _pass_on(self, channel: str, payload: str) -> None:
        for client in self._clients:
            client.tell({"heard": [channel, payload]})

    def close(self) -> None:
        # Those who ask must not wait for us.
        self._receive()
        for client in self._clients:
            client.refuse()
        super().close()

    def finish(self) -> None:
        for client in self._clients:
            client.close()
        self._self_pipe.close()


class HeartbeatClient:
    """One process that asks for heartbeats, and the lock that the session has for it.

    ``end`` is the supervisor's end of the heartbeat socket.
    """

    def __init__(self, using: str, end: socket.socket, *, is_pooled: bool) -> None:
        self._lines = JsonLines(end)
        self.lock = WorkerLock(using, is_pooled=is_pooled)
        self.lock.note_session()
        #: When it has asked, by time.monotonic().
        self.asked_at = 0.0
        self._request: Beat | None = None
        # Whether the present session has not beaten for it yet.
        self._is_new = True
        # Whether messages were left out, because the process did not read.
        self._has_missed = False

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or the exchange with it."""
        return self._lines.is_over

    @property
    def asks(self) -> bool:
        """Whether it waits for a heartbeat."""
        return self._request is not None

    @property
    def worker(self) -> UUID:
        """The id of the worker that asks."""
        assert self._request is not None  # noqa: S101 - for the type checker
        return self._request.id

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._lines.fileno()

    def note_session(self) -> None:
        """Note that there is another session."""
        self.lock.note_session()
        self._is_new = True

    def receive(self) -> None:
        """Take the newest request. A process of another version of the package may send one that is not understood."""
        try:
            for message in self._lines.receive():
                self.asked_at = float(message.pop("asked_at"))
                self._request = Beat(**{**message, "id": UUID(message["id"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("The supervisor does not understand a process, which now beats by itself: %r", error)
            self._request = None
            self._lines.close()

    def drop_old_request(self) -> None:
        """Drop a request from before this process was stopped: the one that has sent it may not live any more."""
        if self.asks and time.monotonic() - self.asked_at > get_settings().HEARTBEAT_INTERVAL:
            self._request = None
            self.tell({"can_beat": True})

    def beat(self) -> Beat:
        """Return the heartbeat that it asks for."""
        assert self._request is not None  # noqa: S101 - for the type checker
        is_interrupted = self._is_new or self._request.is_interrupted
        return self._request._replace(lock_key=self.lock.held_number, is_interrupted=is_interrupted)

    def answer(self, reply: Any, *, is_listening: bool, next_in: float) -> None:
        """Answer its request."""
        self._is_new = False
        self._request = None
        self.tell({"beaten": reply, "asked_at": self.asked_at, "is_listening": is_listening, "next_in": next_in})

    def refuse(self) -> None:
        """Answer its request, if there is one, by saying that the supervisor cannot beat."""
        if self.asks:
            self._request = None
            self.tell({"can_beat": False})

    def tell(self, message: dict[str, Any]) -> None:
        """Send it a message, or leave the message out if it does not read."""
        if not self._lines.offer(message):
            self._has_missed = True

    def tell_missed(self) -> None:
        """If messages were left out, say so as soon as it reads again."""
        if self._has_missed and self._lines.offer({"can_beat": True}):
            self._has_missed = False

    def close(self) -> None:
        """End the exchange."""
        self._lines.close()
