"""The identity of a worker: one start of one process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from uuid import UUID, uuid4


@dataclass(frozen=True, slots=True)
class Identity:
    """One start of one worker process.

    The id is random: a pod that restarts under its old host name must not keep the tasks of its dead predecessor alive.
    """

    id: UUID = field(default_factory=uuid4)
    hostname: str = field(default_factory=lambda: socket.gethostname()[:255])
    pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        """The name for people: host, process and the start of the id."""
        return f"{self.hostname[:80]}:{self.pid}:{self.id.hex[:8]}"
