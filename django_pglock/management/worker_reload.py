"""A worker that restarts when code changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from django.utils import autoreload

from django_pglock.management.worker_process import (
    leave_running_tasks,
    log_banner,
    own_command_line,
    stop_at_signals,
)
from django_pglock.worker import Worker
from django_pglock.worker.supervising.channel import HANG_UP, stop_signals

#: The exit code by which Django's reloader reports that code has changed.
CHANGED = 3


def run_reloading(build: dict[str, Any]) -> None:
    """Run a worker that restarts when code changes, after its running tasks have finished."""
    if os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) == "true":
        run_watched(build)
    else:
        sys.exit(restart_until_end())


def restart_until_end() -> int:
    """Start the watched worker, and again each time it ends because code has changed. Return its last exit code.

    Django's own loop kills the child a quarter of a second after Ctrl-C. This loop passes signals on and waits. The
    child has a session of its own, so that a Ctrl-C on the terminal reaches the child only once, through this process.
    """
    environment = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: Any) -> None:
        if number == HANG_UP:
            # Django's reloader handles only SIGTERM. A shell and the kernel may both send a SIGHUP: one is enough.
            signal.signal(number, signal.SIG_IGN)
            number = signal.SIGTERM
        if child is not None:
            child.send_signal(number)

    for each in stop_signals():
        signal.signal(each, pass_on)
    while True:
        child = subprocess.Popen(own_command_line(), env=environment, start_new_session=True)  # noqa: S603
        code = child.wait()
        if code != CHANGED:
            return code


def run_watched(build: dict[str, Any]) -> None:
    """Run one worker under Django's reloader.

    The reloader watches files in the main thread. After a change it sends ``file_changed`` and ends the process at
    once, so the receiver waits until running tasks have finished. A SIGTERM or SIGINT ends the reloader, and the worker
    stops after that.
    """
    workers: list[Worker] = []

    def work() -> None:
        worker = Worker(**build)
        workers.append(worker)
        log_banner(worker, build)
        worker.run()
        if worker.has_overrun:
            leave_running_tasks(CHANGED)

    def shut_down(**kwargs: Any) -> None:
        for worker in workers:
            worker.shutdown()

    autoreload.file_changed.connect(shut_down, weak=False)
    try:
        autoreload.run_with_reloader(work)
    finally:
        for worker in workers:
            worker.stop()
            stop_at_signals(worker)
        if not all(worker.shutdown() for worker in workers):
            leave_running_tasks()
