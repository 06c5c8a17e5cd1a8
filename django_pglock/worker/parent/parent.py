"""The parent: what ``runlockworker`` is. One loop, which starts children, beats and listens for them, and replaces
them.

It runs no task. So nothing that a task does to its process delays the heartbeat, a probe, or the rescue of the tasks of
a child that has died. Its statements have deadlines, and none of them blocks the loop: the upkeep, whose statements
take longer, has a thread and a session of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from django.utils.autoreload import StatReloader

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger, written_by_thread
from django_pglock.postgres.connections import is_forbidden
from django_pglock.worker.child.child import run_child
from django_pglock.worker.loop import Loop
from django_pglock.worker.options import check_clock
from django_pglock.worker.parent.children import Child
from django_pglock.worker.parent.crew import Crew
from django_pglock.worker.parent.health import Health
from django_pglock.worker.parent.probes import ProbeServer, SystemdNotifier
from django_pglock.worker.parent.starter import Starter, make_starter, refuse_platform

logger = get_logger(WORKER)

#: SIGHUP comes when a terminal or an ssh session is closed.
HANG_UP = signal.SIGHUP
#: Seconds between two checks of the children, and of the files of the code.
CHECK_INTERVAL, RELOAD_INTERVAL = 1.0, 1.0
#: Seconds for the upkeep to end its present statement at the end.
LAST_UPKEEP = 10.0


class Parent:
    """Runs the children of one or several databases until a signal, or until they have done all their work.

    ``options`` has for each database the options of its children (``worker/child.py``). ``processes`` is the number of
    children for each database. ``command`` returns the command line of this process, to start new interpreters.
    ``ending`` is called once when the end begins.
    """

    def __init__(
        self,
        options: Sequence[dict[str, Any]],
        *,
        processes: int = 1,
        command: Callable[[], Sequence[str]],
        probe_port: int | str | None = None,
        reloads: bool = False,
        ending: Callable[[], None] = lambda: None,
        starter: Callable[..., Starter] = make_starter,
    ) -> None:
        refuse_platform()
        check_clock()
        self.loop = Loop()
        self._command = command
        self._make_starter = starter
        self._starter: Starter | None = None
        self.crews = [
            Crew(self.loop, self._get_starter, each, first=1 + place * processes, count=processes)
            for place, each in enumerate(options)
        ]
        self.health = Health(self.crews)
        self.systemd = SystemdNotifier(self.loop, self.health)
        self.server = None if probe_port is None else ProbeServer(self.health, probe_port)
        self.reloads = reloads
        #: Whether the worker ends because its code has changed, so that the caller starts it again.
        self.code_has_changed = False
        self._files: dict[Any, float] = {}
        self._signals = 0
        self._began_at = time.monotonic()
        self._has_failed = self._is_ending = False
        self.ending = ending

    @property
    def all_children(self) -> list[Child]:
        """The children of all databases."""
        return [child for crew in self.crews for child in crew.children.all]

    @property
    def left_behind(self) -> list[str]:
        """What draining children could not run, in words."""
        return [each for crew in self.crews for each in crew.children.left_behind]

    def run(self) -> int:
        """Run until the end. Return the exit code: 0 if each child has ended in order, otherwise 1."""
        is_main = threading.current_thread() is threading.main_thread()
        handlers = self._handle_signals() if is_main else {}
        self._starter = self._make_starter(
            self.loop, run_child, self._command, on_end=self._on_child_end, on_lost=self._on_starter_lost
        )
        try:
            # After the fork of the starter, which has no thread. In tests, the process is not the worker's.
            with written_by_thread() if is_main else nullcontext():
                self._run()
        finally:
            self._close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return int(self._has_failed or any(crew.children.have_failed for crew in self.crews))

    def _run(self) -> None:
        if self.server is not None:
            self.server.start()
        for crew in self.crews:
            crew.start()
        self._check()
        self.systemd.start()
        if self.reloads:
            self._look_for_changes()
        self.loop.run()

    def stop(self) -> None:
        """Have the children finish their running tasks and end; at a second call, give them back. For any thread."""
        self.loop.call_soon(self._stop)

    def _get_starter(self) -> Starter:
        assert self._starter is not None  # noqa: S101 - for the type checker
        return self._starter

    def _stop(self) -> None:
        self._signals += 1
        # A person who ends a worker that is about to start again does not want it to start.
        self.code_has_changed = False
        if self._signals == 1:
            self._drain()
        else:
            for crew in self.crews:
                crew.children.end()

    def _drain(self) -> None:
        if not self.health.is_stopping:
            self.ending()
            self.health.is_stopping = True
            self.systemd.tell_stopping()
        for crew in self.crews:
            crew.children.drain()
            # Now, because a worker that its row shows as stopping is not woken.
            crew.heartbeat.beat_soon()
        # Perhaps no child runs at this moment.
        self._end_if_done()

    # Signals

    def _handle_signals(self) -> dict[int, Any]:
        signal.set_wakeup_fd(self.loop.wakeup_fd, warn_on_full_buffer=False)
        earlier: dict[int, Any] = {}
        for number in stop_signals():
            earlier[number] = signal.signal(number, self._on_signal)
        # An empty handler: without one, the signal would not wake the loop.
        earlier[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return earlier

    def _on_signal(self, number: int, frame: Any) -> None:
        # A shell and the kernel may both send a SIGHUP, so it never counts as the second signal.
        if number != HANG_UP or self._signals == 0:
            self.loop.call_soon(self._stop)

    # Children

    def _on_child_end(self, pid: int, code: int) -> None:
        for crew in self.crews:
            if crew.children.note_end(pid, code):
                break
        self._end_if_done()

    def _on_starter_lost(self) -> None:
        logger.error("The process that starts the worker's children has ended, and the children with it.")
        self._has_failed = True
        for crew in self.crews:
            crew.children.stop_starting()
            for child in list(crew.children.all):
                crew.children.note_end(child.pid, -signal.SIGKILL)
        self._end_if_done()

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
            self._drain()
        self.loop.call_later(RELOAD_INTERVAL, self._look_for_changes)

    def _check(self) -> None:
        """Reap what tasks have left, and limit how long a draining worker waits for its database."""
        self.health.note_turn()
        if os.getpid() == 1:
            _reap_orphans({child.pid for child in self.all_children})
        for crew in self.crews:
            crew.upkeep.end_late()
            self._give_up_start(crew)
        self.loop.call_later(CHECK_INTERVAL, self._check)

    def _give_up_start(self, crew: Crew) -> None:
        """End a worker with ``drain`` that cannot begin. A cron job must not wait until a right is granted."""
        heartbeat, limit = crew.heartbeat, get_settings().HEARTBEAT_LIMIT
        if heartbeat.beat_at is not None or crew.children.is_stopping or not crew.children.options["drain"]:
            return
        if heartbeat.last_error is not None and is_forbidden(heartbeat.last_error):
            why = f"its role lacks a right: {one_line(heartbeat.last_error)}. docs/security.md lists what it needs."
        elif time.monotonic() - self._began_at > limit:
            why = f"it could not use the database {crew.using!r} within {limit:g} s: {heartbeat.why_not_ready()}"
        else:
            return
        logger.error("This worker ends, because %s", why)
        crew.children.left_behind.append("what it could not read")
        crew.children.end()
        self._end_if_done()

    def _end_if_done(self) -> None:
        """End if no child is left, and none will be started."""
        if self._is_ending or not all(crew.children.are_gone for crew in self.crews):
            return
        self._is_ending = True
        for crew in self.crews:
            crew.upkeep.stop()
        self._wait_for_upkeep(until=time.monotonic() + LAST_UPKEEP)

    def _wait_for_upkeep(self, *, until: float) -> None:
        """The upkeep rescues the tasks of children that did not end in order, before this process ends."""
        if all(crew.upkeep.wait(0.0) for crew in self.crews) or time.monotonic() > until:
            self.loop.stop()
        else:
            self.loop.call_later(0.01, lambda: self._wait_for_upkeep(until=until))

    def _close(self) -> None:
        for crew in self.crews:
            crew.heartbeat.close()
        if self.server is not None:
            self.server.stop()
        if self._starter is not None:
            self._starter.close()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self.loop.close()


def stop_signals() -> list[int]:
    """Return the signals that stop a worker in this process. ``nohup`` has SIGHUP ignored, and that stays so."""
    is_heard = signal.getsignal(HANG_UP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([HANG_UP] if is_heard else [])]


def _reap_orphans(ours: set[int]) -> None:
    """Reap processes that tasks have left. Only as process 1, in a container: they are given to it.

    What starts the children reaps ``ours``, and reads their exit codes.
    """
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, 0)
