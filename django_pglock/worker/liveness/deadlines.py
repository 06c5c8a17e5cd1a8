"""Gives connections up on which an answer does not come.

A connection may be half open for ever: a load balancer goes on acknowledging what nobody reads any more, and neither
the server's timeouts nor TCP notice. So somebody has to look at the clock; and not at the clock alone, for a process
that was stopped, or a task that kept the GIL, lets time pass without any harm. Looks are counted: each is proof that
the threads could run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from django_pglock.postgres.connections import hang_up
from django_pglock.worker.service import Service

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = logging.getLogger("django_pglock.worker")

#: Seconds between two looks.
BETWEEN_LOOKS = 1.0
#: Seconds beyond a service's patience, for the server to end the statement by itself if it hears of it.
LEFT_TO_SERVER = 2.0


class Asks(Protocol):
    """Something that sends statements, none of which may take longer than ``patience`` seconds."""

    name: str

    @property
    def patience(self) -> float:
        """Seconds for one statement."""

    def under_way(self) -> tuple[DatabaseWrapper, int] | None:
        """Return which statement, by session and number, waits for its answer now, if one does."""


class Deadlines(Service):
    """Looks every second at what services wait for, and hangs up when that is the same for too long."""

    name = "deadlines"

    def __init__(self, services: Sequence[Asks]) -> None:
        super().__init__()
        self._seen = [_Seen(service) for service in services]

    def turn(self) -> None:
        for seen in self._seen:
            seen.look()
        self.stopping.wait(BETWEEN_LOOKS)


class _Seen:
    """What one service was waiting for at the last look, and at how many looks before."""

    def __init__(self, service: Asks) -> None:
        self.service = service
        self.statement: object = None
        self.looks = 0

    def look(self) -> None:
        statement = self.service.under_way()
        self.looks = self.looks + 1 if statement is not None and statement == self.statement else 0
        self.statement = statement
        waited = self.looks * BETWEEN_LOOKS
        if statement is not None and waited > self.service.patience + LEFT_TO_SERVER:
            logger.warning("The %s has had no answer for %.0f s; it hangs up.", self.service.name, waited)
            hang_up(statement[0])
            self.statement = None
