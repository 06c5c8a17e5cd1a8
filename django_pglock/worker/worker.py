"""The worker: what ``runlockworker`` is. One loop, which starts children, and replaces them.

This process is the parent. It runs no task. So nothing that a task does to its process delays the heartbeat, a probe,
or the rescue of the tasks of a child that has died. The loop sends no statement: the heartbeat and the upkeep have
threads and sessions of their own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.utils.autoreload import StatReloader

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError, model_of
from django_pglock.loggers import WORKER, get_logger, written_by_thread
from django_pglock.postgres.connections import is_forbidden
from django_pglock.tasks.backends import database_of_tasks
from django_pglock.worker.channel import new_loop
from django_pglock.worker.child.child import run_child
from django_pglock.worker.options import check_options
from django_pglock.worker.parent.crew import CHECK_INTERVAL, Crew
from django_pglock.worker.parent.health import Health, SystemdNotifier
from django_pglock.worker.parent.starter import Starter, make_starter, refuse_platform
from django_pglock.worker.queues import Queues

if TYPE_CHECKING:
    from django_pglock.worker.parent.probes import ProbeServer

logger = get_logger(WORKER)

#: SIGHUP comes when a terminal or an ssh session is closed.
HANG_UP = signal.SIGHUP


def no_command() -> Sequence[str]:
    """Raise ``ConfigurationError``: a worker in Python knows no command line that starts its children."""
    raise ConfigurationError("Here a process cannot be forked. Run manage.py runlockworker.")


class Worker:
    """Runs tasks of some queues in child processes until it is stopped, as ``manage.py runlockworker`` does.

    ``using`` are database aliases (empty: the one that the backends in TASKS use). ``backend`` is the alias in TASKS of
    the backend to serve, if several backends share the database (None: all of them). ``queues`` and ``exclude`` are the
    queues to serve (none: all queues). ``processes`` is the number of child processes for each database, ``threads``
    the number of sync tasks that run at once in each. ``grace`` is the number of seconds that running tasks get to
    finish after a stop. With ``drain`` the worker ends when no task that it could claim is left in its queues, nothing
    is in flight, and no task of these queues runs on a worker that may be dead. Tasks that are scheduled for later do
    not count. Then ``left_behind`` has the tasks that it could not run.

    A process is replaced when it has run ``max_tasks`` tasks, or uses more than ``max_memory`` MiB. ``probe_port`` is
    the port, or ``"ADDRESS:PORT"``, at which the worker answers probes over HTTP. ``reloads``: the worker ends when
    code changes, and ``code_has_changed`` says so. ``command`` returns the command line with which children are started
    where a process cannot be forked.

    Raises ``ConfigurationError`` for an unknown alias, for a database without tasks, if ``using`` is empty and the
    backends in TASKS use several databases, for invalid queues, and for a number that is out of bounds.
    """

    #: What starts the children. Tests have another one.
    make_starter = staticmethod(make_starter)
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        *,
        using: str | Sequence[str] = (),
        backend: str | None = None,
        queues: Sequence[str] = (),
        exclude: Sequence[str] = (),
        processes: int = 1,
        threads: int = 4,
        grace: float = 30.0,
        drain: bool = False,
        max_tasks: int | None = None,
        max_memory: float | None = None,
        probe_port: int | str | None = None,
        reloads: bool = False,
        command: Callable[[], Sequence[str]] = no_command,
    ) -> None:
        model_of("Task")  # raises where the app is not installed
        given: list[Any] = list(dict.fromkeys(using)) if isinstance(using, list | tuple) else [using]
        self.databases = given or [database_of_tasks(backend, option="using=")]
        numbers = {"threads": threads, "grace": grace, "max_tasks": max_tasks, "max_memory": max_memory}
        for each in self.databases:
            check_options(using=each, backend=backend, processes=processes, probe_port=probe_port, **numbers)
        self.queues = Queues(queues, exclude=exclude)
        #: The options of the children (``worker/child.py``), without the database.
        shared = {"backend": backend, "queues": list(queues), "exclude": list(exclude), "drain": drain}
        self.options = {**shared, **numbers, "queues_given": self.queues.given}
        self.processes = processes
        self.probe_port = probe_port
        self.reloads = reloads
        self.command = command
        #: The children of each database; empty before the start.
        self.crews: list[Crew] = []
        self.server: ProbeServer | None = None
        #: Whether the worker ends because code has changed, so that the caller starts it again.
        self.code_has_changed = False
        self.health = Health(self.crews)
        self._files: dict[Any, float] = {}
        self._stops = 0
        self._is_begun = self._has_failed = False

    @property
    def left_behind(self) -> list[str]:
        """The tasks, in words, that a worker with ``drain`` should have run but has not; empty before the end."""
        return [each for crew in self.crews for each in crew.left_behind]

    def run(self) -> bool:
        """Run until the end. Return whether each process has ended in order.

        SIGTERM, SIGINT and SIGHUP end the worker, if this is the main thread. Raises ``ConfigurationError`` in a
        ``TestCase``, which commits no task, and if the port of the probes is taken.
        """
        for each in self.databases:
            _refuse_in_test_case(each)
        refuse_platform()
        self.loop, self._began_at = new_loop(), time.monotonic()
        self.crews.clear()
        self.health.is_stopping = False
        with ExitStack() as ends:
            is_main = threading.current_thread() is threading.main_thread()
            signals = stop_signals() if is_main else []
            for number in signals:
                ends.callback(signal.signal, number, signal.getsignal(number))
            # It sets the handlers of signals to the defaults.
            ends.callback(self.loop.close)
            for number in signals:
                self.loop.add_signal_handler(number, self._on_signal, number)
            starter = self.make_starter(self.loop, run_child, self.command, self._on_child_end, self._on_starter_lost)
            ends.callback(starter.close)
            # After the fork of the starter, which has no thread. In tests, the process is not the worker's.
            if is_main:
                ends.enter_context(written_by_thread())
            self._run(starter, ends)
        return self._has_ended_in_order

    def stop(self) -> None:
        """Have running tasks finish, and end; at a second call, give them back. For any thread."""
        self._stops += 1
        if self._is_begun:
            with suppress(RuntimeError):  # it has ended, and the loop is closed
                self.loop.call_soon_threadsafe(self._obey_stop)

    def _run(self, starter: Starter, ends: ExitStack) -> None:
        for place, using in enumerate(self.databases):
            options = {**self.options, "using": using}
            first = 1 + place * self.processes
            self.crews.append(Crew(self.loop, starter, options, first=first, count=self.processes))
        self.systemd = SystemdNotifier(self.loop, self.health)
        if self.probe_port is not None:
            # Not imported at module level: most workers answer no probes, and need no memory for an HTTP server.
            from django_pglock.worker.parent.probes import ProbeServer

            self.server = ProbeServer(self.health, self.probe_port)
            self.server.start()
            ends.callback(self.server.stop)
        # The last line of the log, while a thread of its own still writes it: its handlers may wait without end.
        ends.callback(self._log_end)
        for crew in self.crews:
            ends.callback(crew.close)
            crew.start()
        self._check(starter)
        self.systemd.start()
        if self.reloads:
            self._look_for_changes()
        self._is_begun = True
        if self._stops:
            self._obey_stop()
        self.loop.run_forever()

    def _log_end(self) -> None:
        in_order = "" if self._has_ended_in_order else ", and not all in order"
        logger.info("Worker %d has ended%s.", os.getpid(), in_order)

    @property
    def _has_ended_in_order(self) -> bool:
        return not (self._has_failed or any(crew.have_failed for crew in self.crews))

    def _obey_stop(self) -> None:
        # A person who ends a worker that is about to start again does not want it to start.
        self.code_has_changed = False
        self._end(drain=self._stops == 1)

    def _end(self, *, drain: bool) -> None:
        self.health.is_stopping = True
        self.systemd.tell()
        for crew in self.crews:
            crew.end(drain=drain)
        self._end_if_done()

    def _on_signal(self, number: int) -> None:
        # A shell and the kernel may both send a SIGHUP, so it never counts as the second signal.
        if number != HANG_UP or self._stops == 0:
            self.stop()

    # Children

    def _on_child_end(self, key: str, code: int | str) -> None:
        for crew in self.crews:
            crew.note_end(key, code)
        self._end_if_done()

    def _on_starter_lost(self) -> None:
        logger.error("The process that starts the worker's children has ended, and the children with it.")
        self._has_failed = True
        for crew in self.crews:
            crew.stop_starting()
            for child in list(crew.all):
                crew.note_end(child.id.hex, -signal.SIGKILL)

    def _look_for_changes(self) -> None:
        """Begin to end if a file of the code has changed, as Django's ``runserver`` does."""
        if self.health.is_stopping:
            return
        now = dict(StatReloader().snapshot_files())
        changed = [path for path, date in now.items() if date != self._files.get(path, date)]
        self._files = now
        if changed:
            logger.info("%s has changed. The worker ends, and starts again.", changed[0])
            self.code_has_changed = True
            self._end(drain=True)
        self.loop.call_later(CHECK_INTERVAL, self._look_for_changes)

    def _check(self, starter: Starter) -> None:
        """Check the children, reap what tasks have left, and end a draining worker that cannot begin."""
        if os.getpid() == 1:
            _reap_orphans(starter.pids)
        for crew in self.crews:
            crew.check()
            self._give_up_start(crew)
        self._end_if_done()
        self.loop.call_later(CHECK_INTERVAL, self._check, starter)

    def _give_up_start(self, crew: Crew) -> None:
        """End a worker with ``drain`` that cannot begin. A cron job must not wait until a right is granted."""
        heartbeat, limit = crew.heartbeat, get_settings().HEARTBEAT_LIMIT
        trouble = heartbeat.why_not_ready()
        if not trouble or heartbeat.beat_at is not None or crew.is_stopping or not crew.options["drain"]:
            return
        if heartbeat.last_error is not None and is_forbidden(heartbeat.last_error):
            why = f"its role lacks a right: {trouble}. docs/worker.md#rights-in-the-database lists what it needs."
        elif time.monotonic() - self._began_at > limit:
            why = f"it could not use the database {crew.using!r} within {limit:g} s: {trouble}"
        else:
            return
        logger.error("This worker ends, because %s", why)
        crew.left_behind.append("what it could not read")
        crew.end(drain=False)

    def _end_if_done(self) -> None:
        """End if no child is left, and none will be started."""
        if all(crew.are_gone for crew in self.crews):
            self.loop.stop()


def stop_signals() -> list[int]:
    """Return the signals that stop a worker in this process. ``nohup`` has SIGHUP ignored, and that stays so."""
    is_heard = signal.getsignal(HANG_UP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([HANG_UP] if is_heard else [])]


def _reap_orphans(ours: Collection[int]) -> None:
    """Reap processes that tasks have left, except for ``ours``. Only as process 1, in a container: it gets them."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, 0)


def _refuse_in_test_case(using: str) -> None:
    blocks: list[Any] = connections[using].atomic_blocks
    if any(block._from_testcase for block in blocks):
        raise ConfigurationError(
            "A worker was started in a TestCase. It would see no task of the test, because the test commits none. "
            "Instead, call django_pglock.testing.run_tasks(), which runs the tasks in this thread, or use a "
            "TransactionTestCase (pytest: django_db(transaction=True))."
        )
