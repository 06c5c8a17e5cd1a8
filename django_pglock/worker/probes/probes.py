"""Everything by which programs outside can see whether a worker lives and works: HTTP, a file, systemd, metrics."""

from __future__ import annotations

from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.probes.health import Health
from django_pglock.worker.probes.heartbeat_file import HeartbeatFile
from django_pglock.worker.probes.metrics import Metrics, Outcomes, Readings
from django_pglock.worker.probes.server import ProbeServer
from django_pglock.worker.probes.systemd import SystemdNotifier


class Probes:
    """The probes of one worker: it starts and stops them together.

    ``host`` and ``port`` are those of the HTTP server; no port: there is none. ``path`` is that of the heartbeat file.
    ``number`` is that of the process under its supervisor, None if it has no supervisor. ``outcomes`` is the number of
    ended claims, by the class of the outcome.
    """

    def __init__(
        self,
        health: Health,
        in_flight: InFlight,
        *,
        outcomes: Outcomes,
        readings: Readings,
        host: str | None,
        port: int | None,
        path: str | None,
        number: int | None,
    ) -> None:
        self.metrics = Metrics(in_flight, outcomes=outcomes, readings=readings, health=health)
        self.systemd = SystemdNotifier(health, in_flight, outcomes=outcomes, is_one_of_several=number is not None)
        self.file = HeartbeatFile(path, number=number or 1)
        self.server: ProbeServer | None = None
        if port is not None:
            self.server = ProbeServer(health, self.metrics, host=host, port=port, number=number or 1)

    def start(self) -> None:
        """Start to answer. Raises ``ConfigurationError`` if the port is taken, or the file cannot be written."""
        self.file.check()
        if self.server is not None:
            self.server.start()
        self.systemd.start()

    def leave_to_replacement(self) -> None:
        """Give up the port and the file: they are for the process that replaces this one."""
        self.file.remove()
        if self.server is not None:
            self.server.stop()

    def stop(self) -> None:
        """End in order, after everything else of the worker."""
        self.systemd.stop()
        self.leave_to_replacement()
