"""One worker process, for its supervisor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from django_pglock.worker.supervising.channel import HEARTBEAT_FD, NUMBER, STOP_NOW
from django_pglock.worker.supervising.shared_heartbeat import SharedHeartbeat


class ChildProcess:
    """One process, and the supervisor's end of its channel. Raises ``OSError`` if the process cannot be started.

    ``shared`` is the heartbeat that beats for the process; None: the process beats by itself.
    """

    def __init__(self, number: int, command: Sequence[str], shared: SharedHeartbeat | None = None) -> None:
        self.number = number
        self.channel, theirs = socket.socketpair()
        heartbeat_socket, their_heartbeat_socket = socket.socketpair()
        with theirs, their_heartbeat_socket:
            environment = {**os.environ, NUMBER: str(number)}
            if shared is not None:
                environment[HEARTBEAT_FD] = str(their_heartbeat_socket.fileno())
            try:
                self.process = subprocess.Popen(  # noqa: S603
                    command,
                    stdin=theirs.fileno(),
                    # Without HEARTBEAT_FD, the process would pass the socket on to the programs that its tasks start.
                    pass_fds=[] if shared is None else [their_heartbeat_socket.fileno()],
                    start_new_session=True,
                    env=environment,
                )
            except OSError:
                self.channel.close()
                heartbeat_socket.close()
                raise
        if shared is None:
            heartbeat_socket.close()
        else:
            shared.add(heartbeat_socket)
        self.channel.setblocking(False)
        self.started_at = time.monotonic()
        #: When its last message came. None: no message yet, because a start may take any time; or its channel is
        #: closed.
        self.last_message_at: float | None = None
        #: When the supervisor last found that the process runs although it sends no messages.
        self.seen_at = 0.0
        #: Another process has replaced it.
        self.is_replaced = False
        #: When it will be killed if it has not ended.
        self.kill_at: float | None = None
        self.is_killed = False

    def __repr__(self) -> str:
        return f"worker-{self.number}[{self.process.pid}]"

    def receive(self) -> bytes | None:
        """Return the messages that have arrived. Empty: the channel is closed. None: there is no message."""
        try:
            messages = self.channel.recv(1024)
        except BlockingIOError:
            return None
        except OSError:
            messages = b""
        self.last_message_at = time.monotonic() if messages else None
        return messages

    def end(self, *, within: float) -> None:
        """Request that the process finishes its tasks and ends ``within`` this number of seconds."""
        self.process.send_signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + within

    def stop_now(self, *, within: float) -> None:
        """Request that the process gives back all tasks and ends ``within`` this number of seconds."""
        with suppress(OSError):
            self.channel.send(STOP_NOW)
        self.kill_at = time.monotonic() + within

    def kill(self) -> None:
        """Kill the process."""
        self.is_killed = True
        self.process.kill()
