"""The heartbeat process of a worker, parent side: starts the process and reports each beat to it.

A failure of the process does not affect the worker. ``heartbeat_process_main.py`` is the child side.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from django.apps import apps
from django.db import connections

from django_pglock.conf import get_settings
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.forking import keep_from_children
from django_pglock.postgres.sessions import dedicated_connection, parameters_of
from django_pglock.worker.liveness.heartbeat_process_main import END

logger = get_logger(WORKER)

SCRIPT = Path(__file__).with_name("heartbeat_process_main.py")
#: Seconds before a heartbeat process that has ended is replaced. Doubled each time, up to the second number. After a
#: process that has lived for longer than that, the pause is the first number again.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
#: Seconds after which the instructions, with the connection's parameters, are renewed. Some passwords are valid only
#: for minutes.
INSTRUCT_AGAIN_AFTER = 300.0
SESSION_SETTINGS = "SELECT current_setting('search_path'), current_setting('role')"
#: Seconds for the heartbeat process to end with its worker. If a forked child of the worker keeps the socket open, the
#: heartbeat process does not notice the worker's end.
END_WITHIN = 0.5
#: Signals that a terminal or a service manager sends to all processes. The heartbeat process must end only with its
#: worker.
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if os.name == "posix" else ()
#: If the reader is gone, a send must raise an error and not cause SIGPIPE, whatever handler a task has set.
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class HeartbeatProcess:
    """The heartbeat process of this worker. Only the heartbeat's thread uses it, except for the instructions.

    ``instructions`` returns how the process has to connect, and what it has to write. This may take long.
    """

    def __init__(self, instructions: Callable[[], dict[str, Any]]) -> None:
        self._instructions = instructions
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pause = FIRST_PAUSE
        self._started_at = 0.0
        # The newest instructions, when they were requested, and those that the process has.
        self._newest: dict[str, Any] | None = None
        self._asked_at = -math.inf
        self._sent: dict[str, Any] | None = None
        self._not_before = 0.0
        self._is_reported = False

    @property
    def needs_instructions(self) -> bool:
        """Whether it is time to renew the instructions."""
        return os.name == "posix" and time.monotonic() - self._asked_at > INSTRUCT_AGAIN_AFTER

    def renew_instructions(self) -> None:
        """Get new instructions. The next beat sends them. For any thread that may open a session.

        If this fails, the process keeps the instructions that it has.
        """
        self._asked_at = time.monotonic()
        self._newest = self._instructions()

    def report_beat(self) -> None:
        """Report that a beat has been written. Start the process if there is none."""
        if os.name != "posix":
            return
        try:
            if self._socket is None:
                self._start_when_due()
            elif self._newest is not self._sent:
                self._send_instructions()
            else:
                self._send(b"\n")
        except Exception as error:  # noqa: BLE001 - the heartbeat is worth more than this process
            self._on_failure(error)

    def stop(self) -> None:
        """End the process by its last line, or kill it if it does not end."""
        process, self._process = self._process, None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._send(END + b"\n")
            self._socket.close()
            self._socket = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_WITHIN)
                return
            process.kill()
            process.wait()

    def _start_when_due(self) -> None:
        if self._newest is None or time.monotonic() < self._not_before:
            return
        self._started_at = time.monotonic()
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        keep_from_children(self._socket)
        with its_end:
            self._process = start(its_end)
        self._send_instructions()

    def _send_instructions(self) -> None:
        # Another thread may replace them at any time.
        newest = self._newest
        assert newest is not None  # noqa: S101 - for the type checker
        self._send(line_of(newest))
        self._sent = newest

    def _send(self, line: bytes) -> None:
        assert self._socket is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BlockingIOError):  # the process is stopped, and has enough to read when it continues
            if self._socket.send(line, NO_SIGNAL) < len(line):
                raise OSError("the heartbeat process does not read its socket")

    def _on_failure(self, error: Exception) -> None:
        self.stop()
        now = time.monotonic()
        if now - self._started_at > LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self._not_before = now + self._pause
        self._pause = min(LONGEST_PAUSE, self._pause * 2)
        if not self._is_reported:
            self._is_reported = True
            logger.warning(
                "The worker has lost its heartbeat process (%s) and will start it again. Until then a task that "
                "keeps the GIL for longer than HEARTBEAT_LIMIT may run twice.",
                error,
            )


def instructions_for(using: str, worker: UUID) -> dict[str, Any]:
    """Return the instructions for the heartbeat process of a worker."""
    connection = dedicated_connection(using, application_name="lockworker heartbeat process")
    with connections[using].cursor() as cursor:
        # The settings that the role, OPTIONS or receivers of ``connection_created`` have set.
        cursor.execute(SESSION_SETTINGS)
        search_path, role = cursor.fetchone()
    return {
        "connection": parameters_of(connection),
        "session": {"search_path": search_path, "role": role, "statement_timeout": "5s"},
        "table": connection.ops.quote_name(apps.get_model("django_pglock", "Worker")._meta.db_table),
        "worker": str(worker),
        "interval": get_settings().HEARTBEAT_INTERVAL,
        "limit": get_settings().HEARTBEAT_LIMIT,
    }


def line_of(instructions: dict[str, Any]) -> bytes:
    """Return instructions as the heartbeat process of this process reads them."""
    text = json.dumps({**instructions, "path": sys.path})
    return f"{instructions['interval']} {os.getpid()} {text}\n".encode()


def start(its_end: socket.socket) -> subprocess.Popen[bytes]:
    """Start a heartbeat process that reads from this socket."""
    # A signal that is blocked here is also blocked in the child, from its first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        # -I and -S: neither the environment nor the project's folder influences the imports.
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", str(SCRIPT)],
            stdin=its_end.fileno(), stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
