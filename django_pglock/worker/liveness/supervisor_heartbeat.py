"""The process's side of a heartbeat that a supervisor shares: one session beats and listens for all its processes.

``supervising/shared_heartbeat.py`` is the supervisor's side. It answers within a moment. If there is no answer, or the
answer is that it could not beat, the process beats in its own session, until the supervisor reports that it can beat
again. The keys of the messages must not change, because the supervisor may run another version of the package.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from django_pglock.postgres.forking import keep_from_children
from django_pglock.store.liveness import Beat, HeartbeatReply


class Answer(NamedTuple):
    """The answer of a supervisor that has written a heartbeat for this process."""

    #: None: the worker has no row, and its heartbeat had no list of functions.
    reply: HeartbeatReply | None
    #: Whether notifications reach the session of the supervisor.
    is_listening: bool
    #: Seconds until the supervisor writes the next heartbeats of all its processes.
    next_in: float


class SupervisorHeartbeat:
    """The process's end of the heartbeat socket, for the heartbeat's thread.

    ``on_notification`` is called with channel and payload of each notification. ``on_missed_notifications`` is called
    if notifications may have been missed.
    """

    def __init__(
        self,
        end: socket.socket,
        *,
        on_notification: Callable[[str, str], None],
        on_missed_notifications: Callable[[], None],
    ) -> None:
        keep_from_children(end)
        self._lines = JsonLines(end)
        self.on_notification = on_notification
        self.on_missed_notifications = on_missed_notifications
        self._can_beat = True
        self._answer: dict[str, Any] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the supervisor can beat, as far as this process knows."""
        return self._can_beat and not self._lines.is_over

    @property
    def is_over(self) -> bool:
        """Whether the supervisor has ended, or the connection to it is closed."""
        return self._lines.is_over

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._lines.fileno()

    def request_beat(self, beat: Beat, *, within: float) -> Answer | None:
        """Let the supervisor beat. Return its answer; None if it does not beat ``within`` this number of seconds."""
        # The clock is the same in all processes. So the supervisor can drop an old request, because the process that
        # has sent it may have died since.
        requested_at = time.monotonic()
        self._answer = None
        self._lines.send({**beat._asdict(), "id": str(beat.id), "asked_at": requested_at})
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while self.is_up and (left := requested_at + within - time.monotonic()) > 0:
                selector.select(left)
                self.receive()
                if (answer := self._answer_to(requested_at)) is not None:
                    return answer
        self._can_beat = False
        return None

    def _answer_to(self, requested_at: float) -> Answer | None:
        answer = self._answer
        if answer is None or answer["asked_at"] != requested_at:
            return None
        try:
            reply = None if answer["beaten"] is None else HeartbeatReply(*answer["beaten"])
            return Answer(reply, answer["is_listening"], answer["next_in"])
        except (KeyError, TypeError):
            # The supervisor runs another version of the package.
            self._lines.close()
            return None

    def receive(self) -> None:
        """Receive the messages that have arrived."""
        for message in self._lines.receive():
            if "heard" in message:
                self.on_notification(*message["heard"])
            elif "beaten" in message:
                # The answer may be a late one. Then the supervisor can beat again.
                self._answer, self._can_beat = message, True
            else:
                self._can_beat = message["can_beat"]
                if self._can_beat:
                    self.on_missed_notifications()

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()


# Messages between a supervisor and one of its processes: lines of JSON over a pair of sockets.
#
# The connection is closed if one side dies or sends an invalid message, or if the supervisor reads nothing for a second
# while the buffer is full. Each side can work without it.
#
# If a process reads nothing, it is not dead: it is stopped, or a task keeps its threads from running. Messages for
# which the buffer has no space are dropped.


#: Seconds for the other side to read when the buffer is full.
READ_WITHIN = 1.0
AT_ONCE = 65536


class JsonLines:
    """One end of the connection. For one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._begun = b""
        # The end of an offered message of which the buffer has taken only the beginning.
        self._unsent = b""
        #: Whether the connection is closed.
        self.is_over = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._end.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Wait for space in the buffer. Does nothing if the connection is closed."""
        if self.is_over:
            # Otherwise a side that reads nothing would delay this one with each message.
            return
        self._end.settimeout(READ_WITHIN)
        try:
            self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_over = True

    def offer(self, message: dict[str, Any]) -> bool:
        """Send one message without waiting. If the buffer is full, drop the message and return False."""
        if self.is_over:
            return True
        self._end.setblocking(False)
        try:
            if self._unsent:
                self._unsent = self._unsent[self._end.send(self._unsent) :]
            if self._unsent:
                return False
            line = json.dumps(message).encode() + b"\n"
            self._unsent = line[self._end.send(line) :]
        except BlockingIOError:
            return False
        except OSError:
            self.is_over = True
        return True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Does not wait."""
        self._end.setblocking(False)
        try:
            while data := self._end.recv(AT_ONCE):
                self._begun += data
            self.is_over = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        *lines, self._begun = self._begun.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            self.is_over = True
            return []

    def close(self) -> None:
        """Close the connection."""
        self.is_over = True
        self._end.close()
