"""The heartbeat process of a worker, parent side: starts it and reports each beat to it. No failure of it disturbs the
worker. ``heartbeat_process_main.py`` is the child side.
"""

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

from django.db import Error as DatabaseFailure

from django_pglock.postgres.forking import keep_from_children
from django_pglock.worker.liveness.heartbeat_process_main import END

logger = logging.getLogger("django_pglock.worker")

SCRIPT = Path(__file__).with_name("heartbeat_process_main.py")
#: Seconds before a heartbeat process that has ended is replaced; doubled each time, up to the second number. After one
#: that has lived for longer than that, the pause is the first number again.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
#: Seconds after which the instructions, with the connection's parameters, are sent again: some passwords are good for
#: minutes only.
INSTRUCT_AGAIN_AFTER = 300.0
#: Seconds for the heartbeat process to end with its worker. A forked child of the worker may hide the worker's end.
END_WITHIN = 0.5
#: Signals that a terminal or a service manager sends to all processes. The heartbeat process ends with its worker only.
BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if os.name == "posix" else ()
#: A reader that is gone must raise an error here and not SIGPIPE, whatever a task has done to that signal.
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class HeartbeatProcess:
    """The heartbeat process of this worker. Used by the heartbeat's thread only.

    ``instructions`` returns what the process has to know: how to connect, and what to write.
    """

    def __init__(self, instructions: Callable[[], dict[str, Any]]) -> None:
        self._instructions = instructions
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pause = FIRST_PAUSE
        self._started_at = self._instructed_at = 0.0
        self._not_before = 0.0
        self._is_reported = False

    def note_beat(self) -> None:
        """Report that a beat has been written; start the process if there is none."""
        if os.name != "posix":
            return
        try:
            if self._socket is None:
                self._start_when_due()
            elif time.monotonic() - self._instructed_at > INSTRUCT_AGAIN_AFTER:
                self._instruct_again()
            else:
                self._send(b"\n")
        except Exception as error:  # noqa: BLE001 - the heartbeat is worth more than this process
            self._note_failure(error)

    def stop(self) -> None:
        """End the process: by its last line, or else by force."""
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
        if time.monotonic() < self._not_before:
            return
        self._started_at = time.monotonic()
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        keep_from_children(self._socket)
        with its_end:
            self._process = start(its_end)
        self._send_instructions()

    def _instruct_again(self) -> None:
        try:
            self._send_instructions()
        except DatabaseFailure:
            # The server accepts no connection at the moment. The process keeps the instructions that it has.
            self._send(b"\n")

    def _send_instructions(self) -> None:
        self._instructed_at = time.monotonic()
        self._send(json.dumps({**self._instructions(), "worker_pid": os.getpid(), "path": sys.path}).encode() + b"\n")

    def _send(self, line: bytes) -> None:
        assert self._socket is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BlockingIOError):  # the process is stopped, and has enough to read when it continues
            if self._socket.send(line, NO_SIGNAL) < len(line):
                raise OSError("the heartbeat process does not read its socket")

    def _note_failure(self, error: Exception) -> None:
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


def start(its_end: socket.socket) -> subprocess.Popen[bytes]:
    """Start a heartbeat process that reads from this socket."""
    # A signal that is blocked here is blocked in the child from its first moment on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        # -I and -S: neither the environment nor the folder of the project decides what is imported.
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", str(SCRIPT)],
            stdin=its_end.fileno(), stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
