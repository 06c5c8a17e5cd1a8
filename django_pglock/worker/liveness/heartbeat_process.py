"""Starts the guard (``heartbeat_process_main.py``) and tells it of each beat. Nothing of it disturbs the worker."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django_pglock.postgres.forking import keep_from_children
from django_pglock.worker.liveness.heartbeat_process_main import END

logger = logging.getLogger("django_pglock.worker")

SCRIPT = Path(__file__).with_name("heartbeat_process_main.py")
#: Seconds before a guard that has ended is replaced; doubled each time up to the second number. One that has lived for
#: longer than that begins anew.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
#: Seconds after which the guard is told again how to connect: there are passwords that are good for minutes only.
NEWS_AFTER = 300.0
#: Seconds for a guard to end when its worker does; a forked child of the worker may hide that end from it.
END_WITHIN = 0.5
#: What a terminal or a service manager sends to everybody. The guard ends with its worker, which may take its time.
NOT_FOR_THE_GUARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if os.name == "posix" else ()
#: A reader that is gone must be an error here and not SIGPIPE, whatever a task has done to that signal.
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Guard:
    """The guard process of this worker. ``orders`` returns what it has to know. Used by the heartbeat's thread only."""

    def __init__(self, orders: Callable[[], dict[str, Any]]) -> None:
        self._orders = orders
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pause = FIRST_PAUSE
        self._started_at = self._told_at = 0.0
        self._not_before = 0.0
        self._is_reported = False

    def note_beat(self) -> None:
        """Tell the guard that a beat has been written; start one if there is none."""
        if os.name != "posix":
            return
        try:
            if self._socket is None:
                self._start_when_due()
            elif time.monotonic() - self._told_at > NEWS_AFTER:
                self._tell_orders()
            else:
                self._tell(b"\n")
        except Exception as error:  # noqa: BLE001 - the heartbeat is worth more than its guard
            self._mourn(error)

    def stop(self) -> None:
        """End the guard: by its last line, or else by force."""
        process, self._process = self._process, None
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._tell(END + b"\n")
            self._socket.close()
            self._socket = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_WITHIN)
                return
            process.kill()
            process.wait()

    def _start_when_due(self) -> None:
        if time.monotonic() < self._not_before:
            return
        self._started_at = time.monotonic()
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        keep_from_children(self._socket)
        with its_end:
            self._process = start(its_end)
        self._tell_orders()

    def _tell_orders(self) -> None:
        self._told_at = time.monotonic()
        self._tell(json.dumps({**self._orders(), "worker_pid": os.getpid(), "path": sys.path}).encode() + b"\n")

    def _tell(self, line: bytes) -> None:
        assert self._socket is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BlockingIOError):  # it is stopped, and will have enough to read when it goes on
            if self._socket.send(line, NO_SIGNAL) < len(line):
                raise OSError("it does not read")

    def _mourn(self, error: Exception) -> None:
        self.stop()
        now = time.monotonic()
        if now - self._started_at > LONGEST_PAUSE:
            self._pause = FIRST_PAUSE
        self._not_before = now + self._pause
        self._pause = min(LONGEST_PAUSE, self._pause * 2)
        if not self._is_reported:
            self._is_reported = True
            logger.warning(
                "The worker is without its guard (%s); it will be started again. Until then a task that keeps the GIL "
                "for longer than HEARTBEAT_LIMIT may run twice.",
                error,
            )


def start(its_end: socket.socket) -> subprocess.Popen[bytes]:
    """Start a guard that hears of the worker through this socket."""
    # What is blocked here is blocked there from its first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_GUARD)
    try:
        # -I and -S: neither the environment nor the folder of the project decides what is imported.
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", str(SCRIPT)],
            stdin=its_end.fileno(), stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
