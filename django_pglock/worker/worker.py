"""One worker process: makes its parts, and starts and stops them in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from django_pglock.errors import model_of
from django_pglock.store.plans import keep_plans
from django_pglock.store.wake import WOKEN_FIRST
from django_pglock.worker.claiming.drain import Drain
from django_pglock.worker.claiming.fetcher import Fetcher
from django_pglock.worker.claiming.queues import Queues
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.deadlines import Deadlines
from django_pglock.worker.liveness.heartbeat import Heartbeat
from django_pglock.worker.liveness.listener import Listener
from django_pglock.worker.liveness.running_tasks import RunningTasks
from django_pglock.worker.liveness.session_watch import SessionWatch
from django_pglock.worker.liveness.supervisor_heartbeat import SupervisorHeartbeat
from django_pglock.worker.options import check_options
from django_pglock.worker.probes.health import Health
from django_pglock.worker.probes.heartbeat_file import HeartbeatFile
from django_pglock.worker.probes.metrics import Metrics
from django_pglock.worker.probes.server import ProbeServer
from django_pglock.worker.probes.systemd import SystemdNotifier
from django_pglock.worker.running.attempt import Attempt
from django_pglock.worker.running.executor import Executor
from django_pglock.worker.running.stoppable import StoppableAttempt
from django_pglock.worker.running.watchdog import Watchdog
from django_pglock.worker.service import ConnectedService, Service
from django_pglock.worker.settling.progress import Progress
from django_pglock.worker.settling.settler import Settler
from django_pglock.worker.shared_sessions import SharedSessions
from django_pglock.worker.signal_safe_event import SignalSafeEvent
from django_pglock.worker.supervising.channel import ENDING, REPLACE, SupervisorChannel
from django_pglock.worker.supervising.limits import Limits
from django_pglock.worker.upkeep.upkeep import Upkeep

logger = logging.getLogger("django_pglock.worker")

#: Seconds for the last writes of outcomes when the worker must end.
LAST_WRITES = 10.0
#: The least seconds that a function gets to end after its timeout. If the grace period is longer, it is used.
LEAST_GRACE_PERIOD = 1.0
#: Seconds between two checks of the limits, and of signals that did not wake the main thread.
CHECK_INTERVAL = 1.0

#: The part of a message about a lost thread if there is no supervisor that can replace the process.
THREAD_IS_LOST = (
    "Its thread is lost, and the task stays RUNNING until the function returns or the worker ends. "
    "With --processes or a --max option the process is replaced."
)
#: Seconds after which a task that this process has abandoned runs elsewhere. By then the process has ended.
HANDOVER = 3.0


class Worker:
    """Runs tasks of some queues of one database until it is stopped.

    ``using`` is the database alias. ``backend`` is the alias in TASKS of the backend to serve, if several backends
    share the database (None: all of them). ``queues``, ``exclude`` and ``order`` are the queues to serve and their
    order, as in ``runlockworker`` (none: all queues). ``threads`` is the number of sync tasks that run at once.
    ``grace`` is the number of seconds that running tasks get to finish after a stop. With ``drain`` the worker ends
    when no task that it could claim is left in its queues, nothing is in flight, and no task of these queues runs on a
    worker that may be dead. Tasks that are scheduled for later do not count. Then ``left_behind`` has the tasks that it
    could not run.

    ``run()`` also ends when the process has run ``max_tasks`` tasks, uses more than ``max_memory`` MiB, or after
    ``max_time`` seconds. ``channel`` leads to the supervisor, if there is one. It then starts another process.

    Raises ``ConfigurationError`` for an unknown alias, for invalid queues, for a number that is out of bounds, and for
    an option that would be ignored, such as a ``probe_host`` without a port.

    ``probe_port`` and ``probe_host`` are the address at which the worker answers probes over HTTP. ``heartbeat_file``
    is the path of a file whose mtime is the time of the last beat. ``start()`` raises ``ConfigurationError`` if the
    address or the file cannot be used.

    ``start()`` returns when the worker is ready. ``stop()`` is safe in a signal handler. ``shutdown()`` blocks.
    """

    def __init__(
        self,
        *,
        using: str = "default",
        backend: str | None = None,
        queues: Sequence[str] = (),
        exclude: Sequence[str] = (),
        order: str = "weighted",
        threads: int = 4,
        grace: float = 30.0,
        listens: bool = True,
        drain: bool = False,
        max_tasks: int | None = None,
        max_memory: float | None = None,
        max_time: float | None = None,
        channel: SupervisorChannel | None = None,
        probe_port: int | None = None,
        probe_host: str | None = None,
        heartbeat_file: str | None = None,
    ) -> None:
        check_options(**locals())  # which are the arguments, here
        self.identity = Identity()
        self.queues = Queues(queues, exclude=exclude, order=order)
        self.grace = grace
        self.channel = channel
        self._stop_requested, self._immediate_stop_requested = SignalSafeEvent(), SignalSafeEvent()
        self._ended = threading.Lock()
        self._was_stopped = self._has_ended = False
        self.in_flight = InFlight(threads, most=max_tasks)
        self.limits = Limits(self.in_flight, max_memory=max_memory, max_time=max_time)
        model_of("Task")  # raises where the app is not installed
        watchdog = Watchdog(grace_period=max(grace, LEAST_GRACE_PERIOD), stuck=self._give_up_thread)
        self.executor = Executor(self.in_flight, using, watchdog)
        self.session_watch = SessionWatch(self.executor.claim_of)
        progress = Progress(self.in_flight, using)
        # Behind a pooler, the settings that keep plans would also affect its other clients.
        self.sessions = SharedSessions(using, prepare=keep_plans) if listens else SharedSessions(using)
        self.heartbeat = Heartbeat(
            self.in_flight, using, self.identity, self.queues.given, is_pooled=not listens, last_sessions=self.sessions
        )
        self.running_tasks = self._make_running_tasks(using, progress)
        self.upkeep = Upkeep(using, self.identity.id, promoted=self.in_flight.notify_fetcher, sessions=self.sessions)
        self.settler = self._make_settler(using, progress)
        self.drain = Drain(using, self.queues, self.identity.id, end=self.end, backend=backend) if drain else None
        self.fetcher = Fetcher(
            self.in_flight,
            using,
            self.identity,
            self.queues,
            listens=listens,
            backend=backend,
            drain=self.drain,
            on_task_limit=self._request_replacement,
            sessions=self.sessions,
        )
        self.deadlines = Deadlines([*self._connected, self.session_watch])
        self._make_probes(probe_host, probe_port, heartbeat_file)
        self._connect_parts(listens=listens)

    def _make_running_tasks(self, using: str, progress: Progress) -> RunningTasks:
        return RunningTasks(
            self.in_flight,
            using,
            self.identity,
            progress=progress,
            cancel=self.executor.cancel,
            stack_of=self.executor.stack_of,
            process=self.heartbeat.process,
            sessions=self.sessions,
        )

    def _make_probes(self, host: str | None, port: int | None, path: str | None) -> None:
        """Make the parts that report to other programs whether the worker lives and works."""
        number = 1 if self.channel is None else self.channel.number
        self.health = Health(
            self.services,
            heartbeat=self.heartbeat,
            fetcher=self.fetcher,
            executor=self.executor,
            is_stopping=self._stop_requested.is_set,
        )
        counts = self.settler.counts
        history, queue_counts = self.settler.history, self.upkeep.queue_counts
        self.metrics = Metrics(
            self.in_flight, outcomes=counts, history=history, queue_counts=queue_counts, health=self.health
        )
        is_one_of_several = self.channel is not None
        self.notifier = SystemdNotifier(
            self.health, self.in_flight, outcomes=counts, is_one_of_several=is_one_of_several
        )
        self.probes: ProbeServer | None = None
        if port is not None:
            self.probes = ProbeServer(self.health, self.metrics, host=host, port=port, number=number)
        self.heartbeat_file = HeartbeatFile(path, number=number)

    def _make_settler(self, using: str, progress: Progress) -> Settler:
        scheduled, sessions = self.upkeep.wake, self.sessions
        return Settler(
            self.in_flight, using, self.identity.id, progress=progress, scheduled=scheduled, sessions=sessions
        )

    def _connect_parts(self, *, listens: bool) -> None:
        """Set callbacks of parts that were made before the parts that are called."""
        if listens:
            self.heartbeat.listener = Listener(
                ready=self.fetcher.note_ready,
                scheduled=self.upkeep.wake,
                cancelled=self.running_tasks.note_request,
                missed=self._on_missed_notifications,
            )
        heartbeat, fetcher = self.heartbeat, self.fetcher
        heartbeat.on_beat, heartbeat.on_requested_beat = self._note_beat, fetcher.wake
        heartbeat.on_sleep_flag_unset = fetcher.restore_sleep_flag
        heartbeat.on_older_workers = self.upkeep.set_older_workers
        heartbeat.on_sleeping_workers = self._note_sleeping_workers
        fetcher.is_heartbeat_stale, fetcher.is_listening = heartbeat.is_heartbeat_stale, heartbeat.is_listening
        fetcher.is_resting = self.upkeep.is_resting = heartbeat.is_resting
        if self.drain is not None:
            fetcher.forbidden = heartbeat.forbidden = self.drain.give_up
        # A worker of one backend does not rely on others, because their rows do not say which backends they serve.
        heartbeat.can_rest = listens and self.drain is None and fetcher.claimer.backend is None
        if self.channel is not None:
            if self.channel.heartbeat_socket is not None:
                self.heartbeat.use_supervisor(SupervisorHeartbeat(self.channel.heartbeat_socket))
            self.channel.on_supervisor_gone, self.channel.on_stop_now = self.end, self._give_up_grace

    def _note_sleeping_workers(self, older: int, every: int) -> None:
        if self.heartbeat.listener is not None:
            self.heartbeat.listener.is_woken_first = older < WOKEN_FIRST or self.fetcher.claimer.backend is not None
        self.fetcher.has_delayed_workers = every > WOKEN_FIRST

    def _note_beat(self) -> None:
        self.heartbeat_file.touch()
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

        Waits until the database and its tables are available, or until a stop is requested.
        """
        self.heartbeat_file.check()
        if self.probes is not None:
            self.probes.start()
        self.notifier.start()
        if self.channel is not None:
            self.channel.start()
        self.deadlines.start()
        self.heartbeat.start()
        while not self.heartbeat.first_beat.wait(0.1):
            if self._stop_requested.is_set():
                return
        self.settler.start()
        self.session_watch.start()
        self.executor.start()
        self.running_tasks.start()
        self.upkeep.start()
        self.fetcher.start()
        self.notifier.tell_ready()
        logger.info(
            "Worker %s is ready: %s.", self.identity.name, ", ".join(map(repr, self.queues.given)) or "all queues"
        )

    def run(self) -> bool:
        """Start, wait until a stop is requested or a limit is reached, and return the value of ``shutdown()``.

        Raises ``RuntimeError`` at the end if a part of the worker has ended by itself, so that the exit code is not 0.
        """
        self.start()
        missing: str | None = None
        # Always with a timeout: the kernel may deliver a signal to another thread, for example right after SIGCONT.
        # Python's handler runs in this thread, but such a signal does not wake it.
        while not self._stop_requested.wait(CHECK_INTERVAL):
            if missing := self.health.missing():
                # Otherwise the heartbeat would continue, and no part would run or settle the tasks.
                logger.error("%s Worker %s ends.", missing, self.identity.name)
                self.retire()
            elif reason := self.limits.reached():
                logger.info("Worker %s ends: %s.", self.identity.name, reason)
                self.retire()
        have_all_finished = self.shutdown()
        if missing:
            raise RuntimeError(f"{missing} The worker has ended, too.")
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
        period, and settles the outcomes. The heartbeat stops last. May be called twice, also by two threads.
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
        self.notifier.tell_stopping()
        self.heartbeat.is_draining = True
        self.fetcher.stop()
        self.fetcher.wait(LAST_WRITES)
        self.in_flight.give_back_waiting()
        self.executor.stop()
        have_ended = self._wait_for_running()
        self._end(self.upkeep, self.running_tasks)
        stuck = self.executor.stuck()
        self._end_stuck(stuck)
        if not have_ended:
            # As late as possible, because from here on the process has HANDOVER seconds to end.
            self._abandon_running(except_for=stuck)
        self.executor.loop.stop()
        self.settler.drain(LAST_WRITES)
        self._end(self.settler, self.executor.watchdog, self.heartbeat, self.session_watch, self.deadlines)
        self.sessions.close()
        self.notifier.stop()
        self._stop_probes()
        return have_ended and not stuck

    def _end(self, *services: Service) -> None:
        for service in services:
            service.stop()
            service.wait(LAST_WRITES)

    def _wait_for_running(self) -> bool:
        waited, said = 0.0, False
        while not self.executor.wait(0.1):
            waited += 0.1
            if waited > 1 and not said:
                said = True
                running = ", ".join(map(str, self.in_flight.claims.values()))
                logger.info("Waiting up to %.0f s for running tasks: %s.", self.grace, running)
            if waited >= self.grace or self._immediate_stop_requested.is_set():
                return False
        return True

    def _end_stuck(self, stuck: list[Attempt]) -> None:
        """End attempts that do not end by themselves. Only at the end of the process, so that they do not run twice."""
        for attempt in stuck:
            self.in_flight.end(attempt.ended(attempt.failure(attempt.timed_out())))

    def _abandon_running(self, *, except_for: list[Attempt]) -> None:
        """Abandon the claims of tasks that still run. The process, and their threads with it, ends right after that."""
        ended = {claim for attempt in except_for for claim in attempt.claims}
        running = [claim for claim in self.in_flight.claims.values() if claim not in ended]
        logger.warning("The grace period is over. Giving up %s.", ", ".join(map(str, running)))
        self.in_flight.abandon(running, HANDOVER)

    def _give_up_thread(self, attempt: StoppableAttempt, where: str) -> None:
        logger.error(
            "%s does not end, although its timeout was over %.0f s ago. %s Its code is at:\n%s",
            attempt.claim,
            self.executor.watchdog.grace_period,
            THREAD_IS_LOST if self.channel is None else "The process is replaced.",
            where,
            extra=attempt.claim.log_fields(),
        )
        if self.channel is not None:
            self.retire()

    def _request_replacement(self) -> None:
        if self.channel is not None:
            # The replacement needs the port and the file. The supervisor watches this process.
            self._stop_probes()
            self.channel.tell(REPLACE)

    def _stop_probes(self) -> None:
        self.heartbeat_file.remove()
        if self.probes is not None:
            self.probes.stop()

    def _give_up_grace(self) -> None:
        self._immediate_stop_requested.set()
        self.end()

    def _on_missed_notifications(self) -> None:
        self.in_flight.notify_fetcher()
        self.upkeep.wake()
        self.running_tasks.wake()
