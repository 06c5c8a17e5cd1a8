"""The heartbeat that a supervisor shares among its processes: one session beats, listens and holds locks for all.

Each process requests each of its heartbeats. So a process that is stopped, or whose threads a task keeps from running,
gets none. The supervisor writes the heartbeats of all processes together, in one statement. When a process dies, the
supervisor releases its lock. If the supervisor dies or is stopped, or its session is lost, each process beats by itself
(``liveness/supervisor_heartbeat.py``).
"""

from __future__ import annotations

import socket
import time
from queue import SimpleQueue
from typing import Any
from uuid import UUID

from django_pglock.postgres.connections import connection_for, is_pooled
from django_pglock.store.liveness import Beat, beat_all
from django_pglock.worker.liveness.heartbeat import WorkerLock
from django_pglock.worker.liveness.listener import NotificationSession, SelfPipe
from django_pglock.worker.liveness.supervisor_heartbeat import JsonLines
from django_pglock.worker.liveness.timing import heartbeat_timing
from django_pglock.worker.service import ConnectedService, logger


class SharedHeartbeat(ConnectedService):
    """Beats for the processes of one database."""

    name = "shared heartbeat"

    def __init__(self, using: str) -> None:
        super().__init__(using)
        self._added: SimpleQueue[socket.socket] = SimpleQueue()
        self._clients: list[HeartbeatClient] = []
        # Clients that have ended and whose locks the session still holds.
        self._ended: list[HeartbeatClient] = []
        self._session = NotificationSession(self._pass_on)
        self._self_pipe = SelfPipe()
        # All processes beat at the same time: at multiples of the interval after this moment.
        self._began_at = time.monotonic()

    def start(self) -> None:
        self._self_pipe.open()
        super().start()

    @property
    def statement_timeout(self) -> float:
        return heartbeat_timing().statement_timeout

    @property
    def longest_pause(self) -> float:
        return heartbeat_timing().longest_pause

    def add(self, end: socket.socket) -> None:
        """Add a process for which this service beats. The process has the other end of the socket. Thread-safe."""
        self._added.put(end)
        self.wake()

    def wake(self) -> None:
        self._self_pipe.wake()

    def connected(self) -> None:
        for client in self._clients:
            client.note_session()
        self._ended = []
        # Behind a pooler, other clients would get the notifications.
        if not is_pooled(connection_for(self.using)):
            self._session.listen(connection_for(self.using))
        for client in self._clients:
            client.tell({"can_beat": True})

    def run_once(self) -> None:
        self._session.receive(connection_for(self.using))
        self._receive()
        self._release_locks()
        for client in self._clients:
            client.tell_missed()
            client.drop_old_request()
            client.release_lock_if_silent()
        requesting = [client for client in self._clients if client.has_request]
        timing = heartbeat_timing()
        first_request = min((client.requested_at for client in requesting), default=0.0)
        due_in = timing.gathered_at(first_request) - time.monotonic()
        if requesting and (due_in <= 0 or len(requesting) == len(self._clients)):
            self._beat(requesting)
        else:
            self._wait(due_in if requesting else timing.interval)

    def _wait(self, seconds: float) -> None:
        self.report_alive(seconds)
        self._self_pipe.wait(seconds, connection_for(self.using).connection, *self._clients)

    def _receive(self) -> None:
        """Receive the requests of the processes."""
        while not self._added.empty():
            client = HeartbeatClient(self.using, self._added.get())
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

    def _beat(self, requesting: list[HeartbeatClient]) -> None:
        """Beat for the processes that have requested it, and answer them."""
        for client in requesting:
            client.lock.hold()
        answers = beat_all(self.using, [client.beat() for client in requesting])
        next_in = heartbeat_timing().next_in(time.monotonic() - self._began_at)
        for client in requesting:
            client.answer(answers.get(client.worker), is_listening=client.lock.is_held, next_in=next_in)

    def _pass_on(self, channel: str, payload: str) -> None:
        for client in self._clients:
            client.tell({"heard": [channel, payload]})

    def close(self) -> None:
        # Processes with a request must not wait for an answer.
        self._receive()
        for client in self._clients:
            client.refuse()
        super().close()

    def finish(self) -> None:
        for client in self._clients:
            client.close()
        self._self_pipe.close()


class HeartbeatClient:
    """One process that requests heartbeats, and the lock that the session holds for it.

    ``end`` is the supervisor's end of the heartbeat socket.
    """

    def __init__(self, using: str, end: socket.socket) -> None:
        self._lines = JsonLines(end)
        self.lock = WorkerLock(using)
        self.lock.note_session()
        #: When the process made its last request, by time.monotonic().
        self.requested_at = 0.0
        self._request: Beat | None = None
        # Whether the present session has not beaten for the process yet.
        self._is_new = True
        # Whether messages were dropped because the process did not read.
        self._has_missed = False

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or the connection to it is closed."""
        return self._lines.is_over

    @property
    def has_request(self) -> bool:
        """Whether the process waits for a heartbeat."""
        return self._request is not None

    @property
    def worker(self) -> UUID:
        """The id of the worker that has made the request."""
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
        """Receive the newest request. A process with another version of the package may send an invalid one."""
        try:
            for message in self._lines.receive():
                self.requested_at = float(message.pop("asked_at"))
                self._request = Beat(**{**message, "id": UUID(message["id"])})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("The supervisor does not understand a process, which now beats by itself: %r", error)
            self._request = None
            self._lines.close()

    def drop_old_request(self) -> None:
        """Drop a request from before this process was stopped, because its sender may have died since."""
        if self.has_request and heartbeat_timing().is_outdated(time.monotonic() - self.requested_at):
            self._request = None
            self.tell({"can_beat": True})

    def release_lock_if_silent(self) -> None:
        """Release the lock of a process that asks for no heartbeats: others must not count this session's work as its.

        A stopped process loses its tasks a moment later. One that beats in its own session has its own lock.
        """
        timing = heartbeat_timing()
        if time.monotonic() - self.requested_at > timing.silent_after - timing.interval:
            self.lock.release()

    def beat(self) -> Beat:
        """Return the requested heartbeat."""
        assert self._request is not None  # noqa: S101 - for the type checker
        is_interrupted = self._is_new or self._request.is_interrupted
        return self._request._replace(lock_key=self.lock.held_number, is_interrupted=is_interrupted)

    def answer(self, reply: Any, *, is_listening: bool, next_in: float) -> None:
        """Answer the request. ``reply`` None: the heartbeat was not written."""
        self._is_new = self._is_new and reply is None
        self._request = None
        self.tell({"beaten": reply, "asked_at": self.requested_at, "is_listening": is_listening, "next_in": next_in})

    def refuse(self) -> None:
        """Answer a request, if there is one, that the supervisor cannot beat."""
        if self.has_request:
            self._request = None
            self.tell({"can_beat": False})

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to the process. Drop the message if the process does not read."""
        if not self._lines.offer(message):
            self._has_missed = True

    def tell_missed(self) -> None:
        """If messages were dropped, tell the process so as soon as it reads again.

        ``can_beat: True`` also tells the process that it may have missed notifications.
        """
        if self._has_missed and self._lines.offer({"can_beat": True}):
            self._has_missed = False

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
