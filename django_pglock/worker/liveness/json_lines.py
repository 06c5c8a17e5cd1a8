"""Messages between a supervisor and one of its processes: lines of JSON over a pair of sockets.

The exchange ends for good when one side dies, reads nothing for a second while the buffer between the two is full, or
sends something that the other one does not understand. Each side can do without it.
"""

from __future__ import annotations

import json
import socket
from typing import Any

#: Seconds for the other side to read when the buffer is full.
READ_WITHIN = 1.0
AT_ONCE = 65536


class JsonLines:
    """One end of the exchange. For one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._begun = b""
        #: Whether the exchange has ended.
        self.is_over = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._end.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Nothing happens if the exchange has ended."""
        if self.is_over:
            # A side that reads nothing would delay this one with each message.
            return
        self._end.settimeout(READ_WITHIN)
        try:
            self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_over = True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come; does not wait."""
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
        """End the exchange."""
        self.is_over = True
        self._end.close()
