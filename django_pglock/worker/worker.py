"""One worker process: its parts, and the order in which they start and stop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from django_pglock.errors import model_of
from django_pglock.store.liveness import HeartbeatReply
from django_pglock.store.plans import keep_plans
from django_pglock.store.wake import WOKEN_FIRST
from django_pglock.worker.claiming.drain import Drain
from django_pglock.worker.claiming.fetcher import Fetcher
from django_pglock.worker.claiming.queues import Queues
from django_pglock.worker.claiming.sleep import Sleep
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.deadlines import Deadlines
from django_pglock.worker.liveness.heartbeat import Heartbeat
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess, instructions_for
from django_pglock.worker.liveness.listener import Listener
from django_pglock.worker.liveness.rest import Rest
from django_pglock.worker.liveness.running_tasks import RunningTasks
from django_pglock.worker.liveness.session_watch import SessionWatch
from django_pglock.worker.options import check_options
from django_pglock.worker.probes.health import Health
from django_pglock.worker.probes.probes import Probes
from django_pglock.worker.running.executor import Executor
from django_pglock.worker.running.stoppable import StoppableAttempt
from django_pglock.worker.running.watchdog import Watchdog
from django_pglock.worker.service import ConnectedService, Service
from django_pglock.worker.settling.progress import Progress
from django_pglock.worker.settling.settler import Settler
from django_pglock.worker.shared_sessions import SharedSessions
from django_pglock.worker.signal_safe_event import SignalSafeEvent
from django_pglock.worker.supervising.channel import ENDING, REPLACE, SupervisorChannel, SupervisorSockets
from django_pglock.worker.supervising.limits import Limits
from django_pglock.worker.upkeep.upkeep import Upkeep

logger = logging.getLogger("django_pglock.worker")

#: Seconds for which known outcomes may still be written when the worker has to end.
LAST_WRITES = 10.0
#: The least seconds that a function gets to end after its timeout; with a longer grace, the grace.
LEAST_PATIENCE = 1.0
#: Seconds between two checks of the limits, and of a signal that has come without waking the main thread.
CHECK_INTERVAL = 1.0

#: What follows from a lost thread where no supervisor can replace the process.
THREAD_IS_LOST = (
    "Its thread is lost, and the task stays RUNNING until the function returns or the worker ends. "
    "With --processes or a --max option the process is replaced."
)
#: Seconds after which a task that this process could not wait for runs elsewhere. By then the process has ended.
HANDOVER = 3.0


class Worker:
    """Runs tasks of some queues of one database until it is told to stop.

    ``using`` is the database alias; ``backend`` the alias in TASKS of the backend to serve, where several share the
    database (None: all of them); ``queues``, ``exclude`` and ``order`` say which queues it serves, and in which
    order, as ``runlockworker`` takes them (none: all); ``threads`` is how many sync tasks run at once, ``grace`` the
    seconds that running tasks get to finish after a stop. With ``drain`` it ends when nothing that it could claim is
    left in its queues, nothing is in flight, and nothing there runs on a worker that may be dead. Tasks that are
    scheduled for later do not count. ``left_behind`` then says what it could not run.

    ``run()`` also ends when the process has run ``max_tasks`` tasks, takes more than ``max_memory`` MiB, or after
    ``max_time`` seconds. ``supervisor``: the sockets to the supervisor, if there is one, which then starts another
    process.

    Raises ``ConfigurationError`` for an unknown alias, for queues that are not valid, for a number that is out of
    bounds, and for an option that would be ignored, such as a ``probe_host`` without a port.

    ``probe_port`` and ``probe_host`` say where it answers probes over HTTP, ``heartbeat_file`` the path of a file whose
    mtime is that of its last beat; ``start()`` raises ``ConfigurationError`` where it cannot.

    ``start()`` returns at once; ``stop()`` may be called from a signal handler; ``shutdown()`` blocks until the end.
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
        supervisor: SupervisorSockets | None = None,
        probe_port: int | None = None,
        probe_host: str | None = None,
        heartbeat_file: str | None = None,
    ) -> None:
        check_options(**locals())  # which are the arguments, here
        self.identity = Identity()
        me = self.identity.id
        self.queues = Queues(queues, exclude=exclude, order=order)
        self.grace = grace
        self._asked_to_stop, self._asked_to_stop_now = SignalSafeEvent(), SignalSafeEvent()
        self._ended = threading.Lock()
        self._was_stopped = self._has_ended = False
        self._serves_one_backend = backend is not None
        self.in_flight = InFlight(threads, most=max_tasks)
        self.limits = Limits(self.in_flight, max_memory=max_memory, max_time=max_time)
        model_of("Task")  # raises where the app is not installed
        self.channel = None if supervisor is None else self._make_channel(supervisor)
        watchdog = Watchdog(patience=max(grace, LEAST_PATIENCE), stuck=self._give_up_thread)
        self.executor = Executor(self.in_flight, using, watchdog)
        self.session_watch = SessionWatch(self.executor.claim_of)
        progress = Progress(self.in_flight, using)
        # Settings that keep plans would also reach the other clients of a pooler.
        self.sessions = SharedSessions(using, prepare=keep_plans) if listens else SharedSessions(using)
        self.drain = Drain(using, self.queues, me, end=self.end, backend=backend) if drain else None
        self.sleep = Sleep(self.in_flight, using, me, self.queues)
        # A supervisor beats for all of its processes in one statement, so a rest would save nothing. One backend's
        # worker does not rely on others: their rows do not say which backends they serve.
        self.rest = Rest(is_possible=listens and not drain and backend is None and supervisor is None)
        self.heartbeat_process = HeartbeatProcess(partial(instructions_for, using, me))
        self.running_tasks = self._make_running_tasks(using, progress)
        self.upkeep = Upkeep(using, me, promoted=self.in_flight.tell_news, rest=self.rest, sessions=self.sessions)
        self.settler = Settler(
            self.in_flight, using, me, progress=progress, scheduled=self.upkeep.wake, sessions=self.sessions
        )
        self.listener = self._make_listener() if listens else None
        self.heartbeat = self._make_heartbeat(using, is_pooled=not listens, supervisor=supervisor)
        self.fetcher = self._make_fetcher(using, listens=listens, backend=backend)
        self.deadlines = Deadlines(self._connected)
        self.health = self._make_health()
        number = None if supervisor is None else supervisor.number
        self.probes = self._make_probes(host=probe_host, port=probe_port, path=heartbeat_file, number=number)

    def _make_channel(self, supervisor: SupervisorSockets) -> SupervisorChannel:
        return SupervisorChannel(supervisor.channel, on_supervisor_gone=self.end, on_stop_now=self._give_up_grace)

    def _make_listener(self) -> Listener:
        return Listener(
            ready=self.sleep.hear,
            scheduled=self.upkeep.wake,
            cancelled=self.running_tasks.hear_of_cancel,
            missed=self._note_missed,
        )

    def _make_heartbeat(self, using: str, *, is_pooled: bool, supervisor: SupervisorSockets | None) -> Heartbeat:
        return Heartbeat(
            self.in_flight,
            using,
            self.identity,
            self.queues.asked,
            process=self.heartbeat_process,
            rest=self.rest,
            on_beat=self._note_beat,
            on_reply=self._note_reply,
            on_forbidden=None if self.drain is None else self.drain.give_up,
            listener=self.listener,
            supervisor=None if supervisor is None else supervisor.heartbeat,
            is_pooled=is_pooled,
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

    def _make_fetcher(self, using: str, *, listens: bool, backend: str | None) -> Fetcher:
        return Fetcher(
            self.in_flight,
            using,
            self.identity.id,
            self.queues,
            sleep=self.sleep,
            liveness=self.heartbeat,
            listens=listens,
            backend=backend,
            drain=self.drain,
            on_task_limit=self._ask_for_replacement,
            sessions=self.sessions,
        )

    def _make_health(self) -> Health:
        return Health(
            self.services,
            heartbeat=self.heartbeat,
            fetcher=self.fetcher,
            executor=self.executor,
            is_stopping=self._asked_to_stop.is_set,
        )

    def _make_probes(self, *, host: str | None, port: int | None, path: str | None, number: int | None) -> Probes:
        return Probes(
            self.health,
            self.in_flight,
            outcomes=self.settler.counts,
            history=self.settler.history,
            queue_counts=self.upkeep.queue_counts,
            host=host,
            port=port,
            path=path,
            number=number,
        )

    def _note_reply(self, reply: HeartbeatReply) -> None:
        """Tell the other parts what the database has replied to a heartbeat about the other workers."""
        self.upkeep.set_older_workers(reply.older_workers)
        if self.listener is not None:
            is_first = reply.older_sleeping_workers < WOKEN_FIRST
            self.listener.is_woken_first = is_first or self._serves_one_backend
        self.sleep.has_delayed_workers = reply.sleeping_workers > WOKEN_FIRST
        if not reply.is_sleeping:
            self.sleep.note_flag_unset()

    def _note_missed(self) -> None:
        """Have all parts look that notifications wake: some may have been sent before the session began to listen."""
        self.in_flight.tell_news()
        self.upkeep.wake()
        self.running_tasks.wake()

    def _note_beat(self) -> None:
        self.probes.file.touch()
        # The other parts of an idle worker seldom give back a session.
        self.sessions.close_surplus()

    @property
    def services(self) -> list[Service]:
        """The parts that run in threads of their own."""
        return [*self._connected, self.executor.watchdog, self.deadlines, self.session_watch]

    @property
    def _connected(self) -> list[ConnectedService]:
        return [self.heartbeat, self.settler, self.running_tasks, self.upkeep, self.fetcher]

    @property
    def left_behind(self) -> list[str]:
        """What a worker with ``drain`` has left although it should have run it, in words; empty before the end."""
        return [] if self.drain is None else self.drain.left_behind

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked the worker to stop."""
        return self._asked_to_stop.is_set()

    def start(self) -> None:
        """Start all parts: the heartbeat before anything is claimed, and the fetcher last.

        Waits for the database and its tables as long as it takes, or until somebody asks to stop.
        """
        self.probes.start()
        if self.channel is not None:
            self.channel.start()
        self.deadlines.start()
        self.heartbeat.start()
        while not self.heartbeat.first_beat.wait(0.1):
            if self._asked_to_stop.is_set():
                return
        self.settler.start()
        self.session_watch.start()
        self.executor.start()
        self.running_tasks.start()
        self.upkeep.start()
        self.fetcher.start()
        self.probes.systemd.tell_ready()
        logger.info(
            "Worker %s is ready: %s.", self.identity.name, ", ".join(map(repr, self.queues.asked)) or "all queues"
        )

    def run(self) -> bool:
        """Start, wait until somebody asks to stop or a limit is reached, and return what ``shutdown()`` returns.

        Raises ``RuntimeError`` after that if a part of the worker has ended by itself, so that the exit code tells.
        """
        self.start()
        missing: str | None = None
        # Never without a timeout: the kernel may deliver a signal to another thread, as it does right after SIGCONT.
        # Python's handler runs in this thread, which such a signal does not wake.
        while not self._asked_to_stop.wait(CHECK_INTERVAL):
            if missing := self.health.missing():
                # The heartbeat would keep alive tasks that no part runs or settles any more.
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
        """Ask the worker to stop. Only sets flags: safe in a signal handler. The second call gives up the grace."""
        if self._was_stopped:
            self._asked_to_stop_now.set()
        self._was_stopped = True
        self._asked_to_stop.set()

    def end(self) -> None:
        """Ask the worker to stop, however often: like a first ``stop()``, and the next ``stop()`` is the first."""
        self._asked_to_stop.set()

    def retire(self) -> None:
        """Ask the worker to stop and, if it has a supervisor, to be replaced."""
        self._ask_for_replacement()
        self.end()

    def shutdown(self) -> bool:
        """Stop in order and say whether every running task could finish.

        Stop claiming, give back what no thread has begun, let the rest finish within the grace, settle the outcomes;
        the heartbeat stops last. May be called twice, also by two threads.
        """
        with self._ended:
            if not self._has_ended:
                self._has_ended = True
                self._all_finished = self._shut_down()
            return self._all_finished

    def _shut_down(self) -> bool:
        self._asked_to_stop.set()
        if self.channel is not None:
            self.channel.tell(ENDING)
        self.probes.systemd.tell_stopping()
        self.heartbeat.is_draining = True
        self.fetcher.stop()
        self.fetcher.wait(LAST_WRITES)
        self.in_flight.give_back_waiting()
        self.executor.stop()
        have_ended = self.executor.wait_for_running(self.grace, self._asked_to_stop_now.is_set)
        self._end(self.upkeep, self.running_tasks)
        stuck = self.executor.end_stuck()
        if not have_ended:
            # As late as possible: from here on the process has HANDOVER seconds to end.
            self.executor.abandon_running(HANDOVER, except_for=stuck)
        self.executor.loop.stop()
        self.settler.drain(LAST_WRITES)
        self._end(self.settler, self.executor.watchdog, self.heartbeat, self.session_watch, self.deadlines)
        self.sessions.close()
        self.probes.stop()
        return have_ended and not stuck

    def _end(self, *services: Service) -> None:
        for service in services:
            service.stop()
            service.wait(LAST_WRITES)

    def _give_up_thread(self, attempt: StoppableAttempt, where: str) -> None:
        logger.error(
            "%s does not end, although its timeout was over %.0f s ago. %s Its code is at:\n%s",
            attempt.claim,
            self.executor.watchdog.patience,
            THREAD_IS_LOST if self.channel is None else "The process is replaced.",
            where,
            extra=attempt.claim.log_fields(),
        )
        if self.channel is not None:
            self.retire()

    def _ask_for_replacement(self) -> None:
        if self.channel is not None:
            # The port and the file are for the replacement. The supervisor watches this process.
            self.probes.leave_to_replacement()
            self.channel.tell(REPLACE)

    def _give_up_grace(self) -> None:
        self._asked_to_stop_now.set()
        self.end()
