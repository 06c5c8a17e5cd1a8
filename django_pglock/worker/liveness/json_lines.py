"""Messages between a supervisor and one of its processes: lines of JSON over a pair of sockets.

The connection is closed if one side dies or sends an invalid message, or if the supervisor reads nothing for a second
while the buffer is full. Each side can work without it.

If a process reads nothing, it is not dead: it is stopped, or a task keeps its threads from running. Messages for which
the buffer has no space are dropped.
"""

from __future__ import annotations

import json
import socket
from typing import Any

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
