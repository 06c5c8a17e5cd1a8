"""One worker process: makes its parts, and starts and stops them in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from django.db import connections

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError, model_of
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.liveness import HeartbeatReply
from django_pglock.store.statements import keep_plans
from django_pglock.store.wake import WOKEN_FIRST
from django_pglock.worker.claiming.drain import Drain
from django_pglock.worker.claiming.fetcher import Fetcher
from django_pglock.worker.claiming.queues import Queues
from django_pglock.worker.claiming.sleep import Sleep
from django_pglock.worker.in_flight import InFlight, Limits, Progress
from django_pglock.worker.liveness.heartbeat import Heartbeat
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess, instructions_for
from django_pglock.worker.liveness.listener import Listener
from django_pglock.worker.liveness.running_tasks import RunningTasks
from django_pglock.worker.liveness.session_watch import Deadlines, SessionWatch
from django_pglock.worker.liveness.timing import Rest
from django_pglock.worker.options import Identity, check_clock, check_options, database_to_serve
from django_pglock.worker.probes.health import Health
from django_pglock.worker.probes.probes import Probes
from django_pglock.worker.running.executor import Executor
from django_pglock.worker.running.stoppable import StoppableAttempt
from django_pglock.worker.running.watchdog import Watchdog
from django_pglock.worker.service import ConnectedService, Service, SharedSessions
from django_pglock.worker.settling.settler import Settler
from django_pglock.worker.supervising.channel import (
    ENDING,
    REPLACE,
    SignalSafeEvent,
    SupervisorChannel,
    SupervisorSockets,
)
from django_pglock.worker.upkeep.upkeep import Upkeep

logger = get_logger(WORKER)

#: Seconds for the last writes of outcomes when the worker must end.
LAST_WRITES = 10.0
#: The least seconds that a function gets to end after its timeout. If the grace period is longer, it is used.
LEAST_GRACE_PERIOD = 1.0
#: Seconds between two checks of the limits, and of signals that did not wake the main thread.
CHECK_INTERVAL = 1.0

#: The part of a message about a task that does not end if there is no supervisor that can replace the process.
IS_ALONE = (
    "The worker ends, with exit code 1, so that a service manager starts another. With --processes or a --max option "
    "the process is replaced."
)
#: Seconds after which a task that this process has abandoned runs elsewhere. By then the process has ended.
HANDOVER_DELAY = 3.0


class Worker:
    """Runs tasks of some queues of one database until it is stopped.

    ``using`` is the database alias (None: the one that the backends in TASKS use). ``backend`` is the alias in TASKS of
    the backend to serve, if several backends share the database (None: all of them). ``queues`` and
    ``exclude`` are the queues to serve, as in ``runlockworker`` (none: all queues). ``threads`` is the number of sync
    tasks that run at once. ``grace`` is the number of seconds that running tasks get to finish after a stop. With
    ``drain`` the worker ends when no task that it could claim is left in its queues, nothing is in flight, and no task
    of these queues runs on a worker that may be dead. Tasks that are scheduled for later do not count. Then
    ``left_behind`` has the tasks that it could not run.

    ``run()`` also ends when the process has run ``max_tasks`` tasks, uses more than ``max_memory`` MiB, or when a
    function has not ended ``grace`` seconds after its timeout. ``supervisor``: the sockets to the supervisor, if there
    is one, which then starts another process.

    Raises ``ConfigurationError`` for an unknown alias, for a database without tasks, if ``using`` is None and the
    backends in TASKS use several databases, for invalid queues, and for a number that is out of bounds.

    ``probe_port`` is the port, or ``"ADDRESS:PORT"``, at which the worker answers probes over HTTP. ``start()`` raises
    ``ConfigurationError`` if it cannot be used.

    ``start()`` returns when the worker is ready. ``stop()`` is safe in a signal handler. ``shutdown()`` blocks.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        backend: str | None = None,
        queues: Sequence[str] = (),
        exclude: Sequence[str] = (),
        threads: int = 4,
        grace: float = 30.0,
        drain: bool = False,
        max_tasks: int | None = None,
        max_memory: float | None = None,
        supervisor: SupervisorSockets | None = None,
        probe_port: int | str | None = None,
    ) -> None:
        using = database_to_serve(backend, option="using=") if using is None else using
        check_options(**locals())  # which are the arguments, here
        self.identity = Identity()
        me = self.identity.id
        self.queues = Queues(queues, exclude=exclude)
        self.grace = grace
        self._stop_requested, self._immediate_stop_requested = SignalSafeEvent(), SignalSafeEvent()
        self._ended = threading.Lock()
        self._was_stopped = self._has_ended = False
        #: The worker ends because a function did not end after its timeout.
        self.has_overrun = False
        self._serves_one_backend = backend is not None
        self.in_flight = InFlight(threads, most=max_tasks)
        self.limits = Limits(self.in_flight, max_memory=max_memory)
        model_of("Task")  # raises where the app is not installed
        self.channel = None if supervisor is None else self._make_channel(supervisor)
        watchdog = Watchdog(grace_period=max(grace, LEAST_GRACE_PERIOD), long_overdue=self._end_for_overrun)
        self.executor = Executor(self.in_flight, using, watchdog)
        self.session_watch = SessionWatch(self.executor.claim_of)
        progress = Progress(self.in_flight, using)
        self.sessions = SharedSessions(using, prepare=keep_plans)
        self.drain = Drain(using, self.queues, me, end=self.end, backend=backend) if drain else None
        self.sleep = Sleep(self.in_flight, using, me, self.queues)
        # A supervisor beats for all of its processes in one statement, so a rest would save nothing. One backend's
        # worker does not rely on others: their rows do not say which backends they serve.
        self.rest = Rest(is_possible=not drain and backend is None and supervisor is None)
        self.heartbeat_process = HeartbeatProcess(partial(instructions_for, using, me))
        self.running_tasks = self._make_running_tasks(using, progress)
        self.upkeep = Upkeep(using, me, promoted=self.in_flight.notify_fetcher, rest=self.rest, sessions=self.sessions)
        self.settler = self._make_settler(using, progress)
        self.listener = self._make_listener()
        self.heartbeat = self._make_heartbeat(using, supervisor=supervisor)
        self.fetcher = self._make_fetcher(using, backend=backend)
        self.deadlines = Deadlines(self._connected)
        self.health = self._make_health()
        number = None if supervisor is None else supervisor.number
        self.probes = self._make_probes(port=probe_port, number=number)

    def _make_channel(self, supervisor: SupervisorSockets) -> SupervisorChannel:
        return SupervisorChannel(supervisor.channel, on_supervisor_gone=self.end, on_stop_now=self._give_up_grace)

    def _make_settler(self, using: str, progress: Progress) -> Settler:
        ready, scheduled, sessions = self.sleep.note_ready, self.upkeep.wake, self.sessions
        parts = (self.in_flight, using, self.identity.id)
        return Settler(*parts, progress=progress, ready=ready, scheduled=scheduled, sessions=sessions)

    def _make_listener(self) -> Listener:
        return Listener(
            ready=self.sleep.note_ready,
            scheduled=self.upkeep.wake,
            requested=self.running_tasks.receive_request,
            missed=self._on_missed,
        )

    def _make_heartbeat(self, using: str, *, supervisor: SupervisorSockets | None) -> Heartbeat:
        return Heartbeat(
            self.in_flight,
            using,
            self.identity,
            self.queues.given,
            process=self.heartbeat_process,
            rest=self.rest,
            on_beat=self._on_beat,
            on_reply=self._on_reply,
            on_forbidden=None if self.drain is None else self.drain.give_up,
            listener=self.listener,
            supervisor=None if supervisor is None else supervisor.heartbeat,
            last_sessions=self.sessions,
        )

    def _make_running_tasks(self, using: str, progress: Progress) -> RunningTasks:
        return RunningTasks(
            self.in_flight,
            using,
            self.identity,
            progress=progress,
            cancel=self.executor.cancel,
            stack_of=self.executor.stack_of,
            process=self.heartbeat_process,
            sessions=self.sessions,
        )

    def _make_fetcher(self, using: str, *, backend: str | None) -> Fetcher:
        return Fetcher(
            self.in_flight,
            using,
            self.identity.id,
            self.queues,
            sleep=self.sleep,
            liveness=self.heartbeat,
            backend=backend,
            drain=self.drain,
            on_task_limit=self._request_replacement,
            sessions=self.sessions,
        )

    def _make_health(self) -> Health:
        return Health(
            self.services,
            heartbeat=self.heartbeat,
            fetcher=self.fetcher,
            executor=self.executor,
            is_stopping=self._stop_requested.is_set,
        )

    def _make_probes(self, *, port: int | str | None, number: int | None) -> Probes:
        return Probes(
            self.health,
            self.in_flight,
            outcomes=self.settler.counts,
            readings=self.upkeep.readings,
            port=port,
            number=number,
        )

    def _on_reply(self, reply: HeartbeatReply) -> None:
        """Tell the other parts what the database has replied to a heartbeat about the other workers."""
        self.upkeep.set_older_workers(reply.older_workers)
        is_first = reply.older_sleeping_workers < WOKEN_FIRST
        self.listener.is_woken_first = is_first or self._serves_one_backend
        self.sleep.has_delayed_workers = reply.sleeping_workers > WOKEN_FIRST
        if not reply.is_sleeping:
            self.sleep.note_flag_unset()

    def _on_missed(self) -> None:
        """Wake all parts that notifications wake.

        Notifications may have been sent before the session began to listen.
        """
        self.sleep.note_missed()
        self.upkeep.wake()
        self.running_tasks.wake()

    def _on_beat(self) -> None:
        # The other services of an idle worker rarely give back a session.
        self.sessions.close_surplus()

    @property
    def services(self) -> list[Service]:
        """The parts that run in their own threads."""
        return [*self._connected, self.executor.watchdog, self.deadlines, self.session_watch]

    @property
    def _connected(self) -> list[ConnectedService]:
        return [self.heartbeat, self.settler, self.running_tasks, self.upkeep, self.fetcher]

    @property
    def left_behind(self) -> list[str]:
        """The tasks, in words, that a worker with ``drain`` should have run but has not; empty before the end."""
        return [] if self.drain is None else self.drain.left_behind

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stop_requested.is_set()

    def start(self) -> None:
        """Start all parts: the heartbeat before the first claim, and the fetcher last.

        Waits until the database and its tables are available, or until a stop is requested. With ``drain`` it waits for
        ``HEARTBEAT_LIMIT`` seconds at most. Raises ``ConfigurationError`` if Python's clock was replaced, and in a
        ``TestCase``, which commits no task.
        """
        check_clock()
        self._refuse_in_test_case()
        began, limit = time.monotonic(), get_settings().HEARTBEAT_LIMIT
        self.probes.start()
        if self.channel is not None:
            self.channel.start()
        self.deadlines.start()
        self.heartbeat.start()
        while not self.heartbeat.first_beat.wait(0.1):
            if self.drain is not None and time.monotonic() - began > limit:
                self.drain.give_up_start(self.heartbeat.why_not_ready(), after=limit)
            if self._stop_requested.is_set():
                return
        self.settler.start()
        self.session_watch.start()
        self.executor.start()
        self.running_tasks.start()
        self.upkeep.start()
        self.fetcher.start()
        self.probes.systemd.tell_ready()
        logger.info(
            "Worker %s is ready: %s.", self.identity.name, ", ".join(map(repr, self.queues.given)) or "all queues"
        )

    def _refuse_in_test_case(self) -> None:
        blocks: list[Any] = connections[self.executor.using].atomic_blocks
        if any(block._from_testcase for block in blocks):
            raise ConfigurationError(
                "A worker was started in a TestCase. It would see no task of the test, because the test commits none. "
                "Instead, use a TransactionTestCase (pytest: django_db(transaction=True)), or call the function of the "
                "task: send.call(1)."
            )

    def run(self, *, ending: Callable[[], None] = lambda: None) -> bool:
        """Start, wait until a stop is requested or a limit is reached, and return the value of ``shutdown()``.

        Calls ``ending`` when the end begins, before anything that could hang, such as the log of the project. Raises
        ``RuntimeError`` at the end if a part of the worker has ended by itself or hangs, so that the exit code is not
        0.
        """
        self.start()
        failure: str | None = None
        reason = ""
        # Always with a timeout: the kernel may deliver a signal to another thread, for example right after SIGCONT.
        # Python's handler runs in this thread, but such a signal does not wake it.
        while not self._stop_requested.wait(CHECK_INTERVAL):
            # Otherwise the heartbeat would continue, and no part would run or settle the tasks.
            failure = self.health.missing() or self.health.stuck()
            reason = "" if failure else self.limits.reached()
            if failure or reason:
                self.retire()
        ending()
        if failure:
            logger.error("%s Worker %s ends.", failure, self.identity.name)
        elif reason:
            logger.info("Worker %s ends: %s.", self.identity.name, reason)
        have_all_finished = self.shutdown()
        if failure:
            raise RuntimeError(f"{failure} The worker has ended, too.")
        return have_all_finished

    def stop(self) -> None:
        """Request a stop. Only sets flags, so it is safe in a signal handler. A second call ends the grace period."""
        if self._was_stopped:
            self._immediate_stop_requested.set()
        self._was_stopped = True
        self._stop_requested.set()

    def end(self) -> None:
        """Request a stop, like a first ``stop()``. Further calls change nothing, and do not count as ``stop()``."""
        self._stop_requested.set()

    def retire(self) -> None:
        """Request a stop and, if there is a supervisor, a replacement."""
        self._request_replacement()
        self.end()

    def shutdown(self) -> bool:
        """Stop in order. Return whether each running task has finished.

        The worker stops claiming, gives back claims that have not begun, lets the running tasks finish within the grace
        period, and settles the outcomes. The heartbeat continues until then. May be called twice, also by two threads.
        """
        with self._ended:
            if not self._has_ended:
                self._has_ended = True
                self._all_finished = self._shut_down()
            return self._all_finished

    def _shut_down(self) -> bool:
        self._stop_requested.set()
        if self.channel is not None:
            self.channel.tell(ENDING)
        self.probes.systemd.tell_stopping()
        self.heartbeat.is_stopping = True
        self.fetcher.stop()
        self.fetcher.wait(LAST_WRITES)
        self.in_flight.give_back_waiting()
        self.executor.stop()
        have_ended = self.executor.wait_for_running(self.grace, self._immediate_stop_requested.is_set)
        self._end(self.upkeep, self.running_tasks)
        overdue = self.executor.end_overdue(HANDOVER_DELAY)
        if not have_ended:
            # As late as possible, because from here on the process has HANDOVER_DELAY seconds to end.
            self.executor.abandon_running(HANDOVER_DELAY, except_for=overdue)
        self.executor.loop.stop()
        self.settler.wait_until_settled(LAST_WRITES)
        self._end(self.settler, self.executor.watchdog, self.heartbeat, self.session_watch, self.deadlines)
        self.sessions.close()
        self.probes.stop()
        if have_ended and not overdue:
            # The program may continue, like a test, which then deletes its database.
            self.executor.loop.wait(LAST_WRITES)
        return have_ended and not overdue

    def _end(self, *services: Service) -> None:
        for service in services:
            service.stop()
            service.wait(LAST_WRITES)

    def _end_for_overrun(self, attempt: StoppableAttempt) -> None:
        """End the process in order, because a function does not end: nothing else can end it."""
        if self.is_stopping and not self.has_overrun:
            # It ends already, as somebody wants it.
            return
        self.has_overrun = True
        # First, because the log may hang, too.
        self.retire()
        claim = attempt.claim
        logger.error(
            "%s does not end, although its timeout was over %.0f s ago. %s Running tasks get %.0f s to finish. Let the "
            "function call context.check(), or limit its calls by timeouts of their own. Its code is at:\n%s",
            claim,
            self.executor.watchdog.grace_period,
            IS_ALONE if self.channel is None else "The process is replaced.",
            self.grace,
            self.executor.stack_of((claim.id, claim.attempt)),
            extra=claim.log_fields(),
        )

    def _request_replacement(self) -> None:
        if self.channel is not None:
            # The replacement needs the port and the file. The supervisor watches this process.
            self.probes.leave_to_replacement()
            self.channel.tell(REPLACE)

    def _give_up_grace(self) -> None:
        self._immediate_stop_requested.set()
        self.end()
