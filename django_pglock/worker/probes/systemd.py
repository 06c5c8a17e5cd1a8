"""systemd's protocol for services of ``Type=notify``: datagrams with lines of ``NAME=value``."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

from django_pglock.conf import get_settings
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.worker.service import Service

if TYPE_CHECKING:
    from django_pglock.worker.probes.health import Health

logger = logging.getLogger("django_pglock.worker")


class Notifier(Service):
    """Tells systemd that the worker is ready, lives, stops, and what it does. Silent without ``NOTIFY_SOCKET``.

    In a thread of its own and not by the heartbeat, which waits for the database: a worker must not be ended because
    that is away. It says that the worker lives while all parts do, the heartbeat among them.
    """

    name = "notifier"

    def __init__(self, health: Health, *, is_one_of_several: bool) -> None:
        super().__init__()
        self.health = health
        self.is_one_of_several = is_one_of_several
        self.address = os.environ.get("NOTIFY_SOCKET", "")
        #: Seconds within which systemd wants to hear of us, None if it does not.
        self.limit = watchdog_limit(is_one_of_several=is_one_of_several)
        self._has_failed = False

    def start(self) -> None:
        """Start to tell, if somebody listens."""
        if self.address:
            super().start()

    def turn(self) -> None:
        """Tell how it is, often enough for one message to be lost."""
        lines = [f"STATUS={self._status()}"]
        if self.limit is not None and self.health.stuck() is None:
            lines.append("WATCHDOG=1")
        self.say(*lines)
        self.stopping.wait(get_settings().HEARTBEAT_INTERVAL if self.limit is None else self.limit / 3)

    def tell_ready(self) -> None:
        """Tell that the worker has started."""
        self.say("READY=1", f"STATUS={self._status()}")

    def tell_stopping(self) -> None:
        """Tell that the worker stops. A process of several does not: the service goes on without it."""
        if not self.is_one_of_several:
            self.say("STOPPING=1", f"STATUS={self._status()}")

    def _status(self) -> str:
        worker = self.health.worker
        done, failed = worker.settler.counts[Succeeded], worker.settler.counts[Failed]
        work = f"{worker.hand.running} tasks running, {done} succeeded, {failed} failed"
        return self.health.stuck() or self.health.unready() or work

    def say(self, *lines: str) -> None:
        """Send one message. Never waits; a failure is logged once and harms nobody."""
        if not self.address:
            return
        # "@" stands for the NUL byte with which names begin that are no files.
        address = f"\0{self.address[1:]}" if self.address[0] == "@" else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("NOTIFY_SOCKET does not take messages: %s", error)


def watchdog_limit(*, is_one_of_several: bool) -> float | None:
    """Return the seconds of ``WatchdogSec=``, None if it is not set or meant for another process.

    It is meant for the main process of the service. A supervised process may answer for that.
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    is_ours = is_one_of_several or os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 1e6 if is_ours and text.isdigit() and int(text) else None
