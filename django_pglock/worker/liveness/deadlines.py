"""Deadlines for the statements of the worker's own services: closes a connection if an answer does not come in time.

A connection may be half open forever: for example, a load balancer acknowledges data that no server receives. Neither
the server's timeouts nor TCP notice that. So this service checks every second. It counts checks instead of seconds,
because time also passes while the process is stopped or a task keeps the GIL, and then the connection is not the
problem. Each check proves that threads could run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import shut_down_socket
from django_pglock.worker.service import Service

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger(WORKER)

#: Seconds between two checks.
CHECK_INTERVAL = 1.0
#: Seconds beyond the limit of a service in which the server, if it can, ends the statement itself.
LEFT_TO_SERVER = 2.0


class SendsStatements(Protocol):
    """A service that sends statements. None of them may take longer than ``statement_timeout`` seconds."""

    name: str

    @property
    def statement_timeout(self) -> float:
        """Seconds for one statement."""

    def statement_in_progress(self) -> tuple[DatabaseWrapper, int] | None:
        """Return the session and the number of the statement that waits for its answer now; None: none waits."""


class Deadlines(Service):
    """Checks every second which statement each service waits for. Closes the connection if the wait is too long."""

    name = "deadlines"

    def __init__(self, services: Sequence[SendsStatements]) -> None:
        super().__init__()
        self._awaited = [_Awaited(service) for service in services]

    def run_once(self) -> None:
        for each in self._awaited:
            each.check()
        self.stopping.wait(CHECK_INTERVAL)


class _Awaited:
    """The statement that one service waited for at the last check, and the number of earlier checks at which it did."""

    def __init__(self, service: SendsStatements) -> None:
        self.service = service
        self.statement: object = None
        self.checks = 0

    def check(self) -> None:
        statement = self.service.statement_in_progress()
        self.checks = self.checks + 1 if statement is not None and statement == self.statement else 0
        self.statement = statement
        waited = self.checks * CHECK_INTERVAL
        if statement is not None and waited > self.service.statement_timeout + LEFT_TO_SERVER:
            logger.warning(
                "The %s has had no answer from the database for %.0f s. It closes its connection.",
                self.service.name,
                waited,
            )
            shut_down_socket(statement[0])
            self.statement = None
