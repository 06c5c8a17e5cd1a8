"""The supervisor's heartbeat, as one of its processes uses it: it beats and listens for all of them in one session.

``supervising/shared_heartbeat.py`` is the supervisor's side. It answers within a moment. If there is no answer, or the
answer is that it could not beat, the process beats in a session of its own, until the supervisor says that it can
again. The keys of the messages stay as they are, because the supervisor may run another version of the package.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from django_pglock.postgres.forking import keep_from_children
from django_pglock.store.liveness import Beat, HeartbeatReply
from django_pglock.worker.liveness.json_lines import JsonLines


class Answer(NamedTuple):
    """What the supervisor answers when it has beaten for this process."""

    #: None: the worker has no row, and its heartbeat did not name its functions.
    reply: HeartbeatReply | None
    #: Whether notifications reach the supervisor in a session of its own.
    is_listening: bool
    #: Seconds until it beats for all of its processes together.
    next_in: float


class SupervisorHeartbeat:
    """The process's end of the heartbeat socket, for the heartbeat's thread.

    ``on_notification`` is called with channel and payload of each notification, ``on_missed_notifications`` when some
    may have been missed.
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
        """Whether the supervisor has ended, or the exchange with it."""
        return self._lines.is_over

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._lines.fileno()

    def ask(self, beat: Beat, *, within: float) -> Answer | None:
        """Have the supervisor beat. Return its answer; None if it does not beat, or not within so many seconds."""
        # The same clock in all processes: a request that the supervisor reads late must not look like a living process.
        asked_at = time.monotonic()
        self._answer = None
        self._lines.send({**beat._asdict(), "id": str(beat.id), "asked_at": asked_at})
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while self.is_up and (left := asked_at + within - time.monotonic()) > 0:
                selector.select(left)
                self.receive()
                if (answer := self._answer_to(asked_at)) is not None:
                    return answer
        self._can_beat = False
        return None

    def _answer_to(self, asked_at: float) -> Answer | None:
        answer = self._answer
        if answer is None or answer["asked_at"] != asked_at:
            return None
        try:
            reply = None if answer["beaten"] is None else HeartbeatReply(*answer["beaten"])
            return Answer(reply, answer["is_listening"], answer["next_in"])
        except (KeyError, TypeError):
            # The supervisor runs another version of the package.
            self._lines.close()
            return None

    def receive(self) -> None:
        """Take what has come."""
        for message in self._lines.receive():
            if "heard" in message:
                self.on_notification(*message["heard"])
            elif "beaten" in message:
                # It may be late, and then the supervisor can beat again.
                self._answer, self._can_beat = message, True
            else:
                self._can_beat = message["can_beat"]
                if self._can_beat:
                    self.on_missed_notifications()

    def close(self) -> None:
        """End the exchange."""
        self._lines.close()
