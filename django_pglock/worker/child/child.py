"""A child: the process that runs tasks. Its main thread hears the parent, stops functions, and ends the process.

Its other threads are the feeder, which claims, the settler, which writes outcomes, and those that run tasks. It beats
and listens for nothing itself: the parent does. If the parent ends, so does the child, at once.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

from django_pglock.conf import get_settings
from django_pglock.loggers import WORKER, get_logger, written_by_thread
from django_pglock.postgres.connections import is_forbidden
from django_pglock.store.liveness import silent_after
from django_pglock.tasks import registry
from django_pglock.worker.channel import Channel, new_loop
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.claimer import Claimer
from django_pglock.worker.child.executor import Executor
from django_pglock.worker.child.feeder import Drain, Feeder, ParentsHeartbeat
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.child.runners import Watchdog, close_sessions_of_ended_threads
from django_pglock.worker.child.settler import Settler
from django_pglock.worker.queues import Queues
from django_pglock.worker.service import Service

logger = get_logger(WORKER)

#: Seconds for the last writes of outcomes when the child must end.
LAST_WRITES = 10.0
#: The least seconds that a function gets to end after its timeout. If the grace period is longer, it is used.
LEAST_GRACE_PERIOD = 1.0
#: Seconds between two checks of the limits and of the parts, and between two while the process ends.
CHECK_INTERVAL, ENDING_INTERVAL = 1.0, 0.005
#: Seconds for which the main thread waits after it has woken the feeder. Python runs one thread at a time. Without the
#: wait, the feeder would claim only after the main thread has prepared its next wait.
PAUSE_AFTER_WAKEUP = 0.00005
#: Seconds after which a task that this process has abandoned runs elsewhere. By then the process has ended.
HANDOVER_DELAY = 3.0
#: The last of these seconds, for the end of the process itself.
MARGIN = 1.0
#: Seconds for which a thread may wait for the server before or after a function, in its BEGIN or COMMIT for example. No
#: timeout of the task applies to it, and a half-open connection never answers.
LONGEST_PHASE = 600
#: The number of new objects after which Python's garbage collector runs.
GARBAGE = 10_000
#: Seconds after which the process is replaced if it could begin no task in this time.
LONGEST_UNABLE = 30.0
#: The exit code of a child with ``drain`` that leaves tasks behind: EX_TEMPFAIL of sysexits.h, try again later.
LEFT_BEHIND = 75
CANNOT_BEGIN = (
    "No task could begin in this process, although it tried: it has no memory, threads, file descriptors or sessions "
    "left for them."
)


class Child:
    """Runs tasks for a parent, which is at the other end of ``channel``, until the parent ends it.

    ``options`` come from the parent: ``id`` and ``number`` of the child, ``using``, ``backend``, ``queues``,
    ``exclude``, ``threads``, ``grace``, ``drain``, ``max_tasks`` and ``max_memory``, as ``runlockworker`` has them.
    """

    def __init__(self, channel: Channel, options: dict[str, Any]) -> None:
        self.channel = channel
        self.options = options
        self.id = UUID(options["id"])
        using = options["using"]
        queues = Queues(options["queues"], exclude=options["exclude"])
        self.grace = float(options["grace"])
        self.loop = new_loop()
        self.in_flight = InFlight(
            options["threads"], most=options["max_tasks"], queues=queues, tell_parent=channel.send
        )
        self.heartbeat = ParentsHeartbeat()
        self.watchdog = Watchdog(
            grace_period=max(self.grace, LEAST_GRACE_PERIOD),
            send=channel.send,
            changed=lambda: self._call_soon(self._watch),
            long_overdue=self._end_for_overrun,
        )
        self.executor = Executor(self.in_flight, using, self.watchdog)
        claimer = Claimer(using, self.id, queues, backend=options["backend"])
        self.drain_state = Drain(claimer, end=self.stop) if options["drain"] else None
        self.feeder = Feeder(self.in_flight, claimer, heartbeat=self.heartbeat, drain=self.drain_state)
        self.settler = Settler(self.in_flight, using)
        #: The parts with a thread and a database session of their own.
        self.services: list[Service] = [self.feeder, self.settler]
        self._next_watch: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._known = -1
        self._is_started = self.is_stopping = False
        self._ends_at = 0.0
        #: Whether each running task has finished.
        self.have_all_finished = True

    def run(self) -> int:
        """Run until the parent ends this child, or until it has to be replaced. Return the exit code."""
        self.loop.add_reader(self.channel.fileno(), self.receive)
        # Messages may have come together with the options.
        self.loop.call_soon(self.receive)
        self._tell_functions()
        self.settler.start()
        self.executor.start()
        self.loop.call_later(0.0, self._check)
        self.loop.run_forever()
        self.loop.close()
        if self.drain_state is not None and self.drain_state.left_behind:
            self.channel.send(left_behind=self.drain_state.left_behind)
            return LEFT_BEHIND
        return 0

    # Messages of the parent

    def receive(self) -> None:
        """Do what the parent asks for. If it has ended, end at once: other workers rescue the tasks of this one."""
        for message in self.channel.receive():
            for kind, value in message.items():
                self._obey(kind, value)
        if self.channel.is_over:
            self.leave()

    def leave(self) -> None:
        """End the process now."""
        os._exit(1)

    def _obey(self, kind: str, value: Any) -> None:
        match kind:
            case "beat":
                self._note_beat(*value)
            case "cut":
                self.heartbeat.is_connected = self.heartbeat.is_listening = False
            case "wake":
                self.in_flight.notify_feeder(*value)
                time.sleep(PAUSE_AFTER_WAKEUP)
            case "poll":
                self.in_flight.notify_feeder()
            case "cancel":
                self.executor.cancel([(task, attempt) for task, attempt in value])
            case "stack":
                task, attempt = value
                self.channel.send(stack=[task, attempt, self.executor.stack_of((task, attempt))])
            case "drain":
                self.stop()
            case "end":
                self.end()

    def _note_beat(self, beat_at: float, is_listening: bool, is_sleeping: bool) -> None:
        heartbeat = self.heartbeat
        was_alive = heartbeat.is_alive()
        heartbeat.beat_at, heartbeat.is_connected, heartbeat.is_listening = beat_at, True, is_listening
        if not self._is_started:
            self._is_started = True
            self.feeder.start()
        elif not was_alive:
            self.in_flight.notify_feeder()
        if not is_sleeping:
            self.feeder.note_flag_unset()

    # Checks

    def _watch(self) -> None:
        """Stop functions whose time is over, and look again when the next time is over."""
        if self._next_watch is not None:
            self._next_watch.cancel()
        due_in = self.watchdog.check()
        self._next_watch = self.loop.call_later(due_in, self._watch) if due_in < math.inf else None

    def _check(self) -> None:
        if not self.channel.is_own():
            self.leave()
        # An idle child reports rarely, but so often that it does not look frozen.
        stages = [each.stage for each in self.services] + [each.stage for each in self.watchdog.threads()]
        is_silent = any(each.checks for each in stages)
        is_idle = not (self.in_flight.claims or self.is_stopping or is_silent)
        self.loop.call_later(get_settings().HEARTBEAT_INTERVAL if is_idle else CHECK_INTERVAL, self._check)
        self.loop.call_soon(self._watch)
        self.settler.write_progress_soon()
        error = self.feeder.last_error
        if self.drain_state is not None and error is not None and is_forbidden(error):
            self.drain_state.give_up(error)
        if registry.count() != self._known:
            self._tell_functions()
        close_sessions_of_ended_threads()
        self.channel.send(report=self.report())
        trouble = self.hung()
        if self.is_stopping:
            return
        if trouble:
            self._replace(trouble.rstrip("."), logging.ERROR)
        elif reason := self.in_flight.limit_reached(self.options["max_memory"], has_ended_any=self.settler.ended > 0):
            self._replace(reason)

    def _replace(self, *why: Any) -> None:
        """End, and have the parent start another child at once: for a reason, which is logged at a level."""
        self.channel.send(replace=why)
        self.stop()

    def _tell_functions(self) -> None:
        self._known = registry.count()
        self.channel.send(ready=[os.getpid(), registry.known_versions()])

    def report(self) -> dict[str, Any]:
        """Return the numbers and the health of this child, for probes and metrics."""
        in_flight = self.in_flight
        return {
            "in_flight": len(in_flight.claims),
            "running": in_flight.running,
            "unsettled": in_flight.unsettled,
            "unready": self.unready(),
        }

    def hung(self) -> str | None:
        """Return which part has ended or hangs, in a sentence. It is called once a second."""
        if troubles := [trouble for each in self.services if (trouble := each.trouble())]:
            return troubles[0]
        for thread in self.watchdog.threads():
            claim = thread.claim if thread.attempt is None else None
            if thread.stage.check(claim) > LONGEST_PHASE:
                return f"{claim} has waited for {LONGEST_PHASE} s before or after its function."
        if self.executor.is_missing:
            return "A thread of the executor has ended."
        return CANNOT_BEGIN if self.in_flight.unable_for > LONGEST_UNABLE else None

    def unready(self) -> str | None:
        """Return why the child claims no tasks, in a sentence."""
        if self.is_stopping:
            return "The worker is stopping."
        if not self.heartbeat.is_alive():
            return f"The last heartbeat was written more than {silent_after():.0f} s ago."
        return None if self.feeder.is_claiming else "The feeder claims no tasks at the moment."

    # The end

    def stop(self) -> None:
        """Claim nothing more, give back what has not begun, and end when the running tasks have finished."""
        self._call_soon(self._begin_to_end)

    def end(self) -> None:
        """Stop, and give the running tasks no time to finish."""
        self.grace, self._ends_at = 0.0, time.monotonic()
        self.stop()

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Call a function in the main thread. For any thread."""
        with suppress(RuntimeError):  # the process has just ended its work
            self.loop.call_soon_threadsafe(call)

    def _begin_to_end(self) -> None:
        if not self.is_stopping:
            self.is_stopping = self.watchdog.is_stopping = True
            self._ends_at = time.monotonic() + self.grace
            self.channel.send(ending=True)
            self._ending = self.loop.create_task(self._end_parts())

    async def _end_parts(self) -> None:
        """End one part after the other. Each ``await`` is a pause, in which the loop hears the parent."""
        self.feeder.stop()
        await self._until(lambda: self.feeder.wait(0.0), LAST_WRITES)
        self.in_flight.give_back_waiting()
        self.executor.stop()
        await self._until(self._may_end, 1.0)
        if not self._may_end():
            running = ", ".join(map(str, self.in_flight.claims.values()))
            logger.info("Waiting up to %.0f s for running tasks: %s.", self.grace, running)
            await self._until(self._may_end)
        # First what has ended is written, because tasks that still run are given up as late as possible: from then on,
        # the process has HANDOVER_DELAY seconds to end.
        await self._until(lambda: not self.in_flight.unsettled, LAST_WRITES)
        try:
            # In a thread, because a backoff of the project may use the ORM, which Django refuses in a loop.
            self.have_all_finished = await asyncio.to_thread(self.executor.give_up, HANDOVER_DELAY)
        except RuntimeError:  # the process has no thread left
            self.have_all_finished = self.executor.give_up(HANDOVER_DELAY)
        self.executor.loop.stop()
        ends_at = time.monotonic() + (LAST_WRITES if self.have_all_finished else HANDOVER_DELAY - MARGIN)
        await self._until(lambda: not self.in_flight.claims, ends_at - time.monotonic())
        self.settler.stop()
        await self._until(lambda: self.settler.wait(0.0), ends_at - time.monotonic())
        if self.have_all_finished:
            # The sessions of the event loop are closed in order.
            await self._until(lambda: self.executor.loop.has_ended, ends_at - time.monotonic())
        self.channel.send(report=self.report())
        self.loop.stop()

    def _may_end(self) -> bool:
        return self.executor.is_idle or time.monotonic() >= self._ends_at

    async def _until(self, is_so: Callable[[], bool], seconds: float = math.inf) -> None:
        """Pause until something is so, for some seconds at most."""
        until = time.monotonic() + seconds
        while not is_so() and time.monotonic() < until:
            await asyncio.sleep(ENDING_INTERVAL)

    def _end_for_overrun(self, attempt: Attempt) -> None:
        """End the process in order, because a function does not end: nothing else can end it."""
        if self.is_stopping:
            return
        claim = attempt.claim
        # First, because the log may hang, too.
        self._replace(f"task {claim.id} does not end")
        logger.error(
            "%s does not end, although its timeout was over %.0f s ago. The process is replaced. Running tasks get "
            "%.0f s to finish. Let the function call context.check(), or limit its calls by timeouts of their own. Its "
            "code is at:\n%s",
            claim,
            self.watchdog.grace_period,
            self.grace,
            self.executor.stack_of_claim(claim),
            extra=claim.log_fields(),
        )


def run_child(end: socket.socket) -> int:
    """Run a child in this process. ``end`` is its end of the channel. Return the exit code."""
    channel = Channel(end)
    options = _options_from(channel)
    child = Child(channel, options)
    prepare_process(options["number"])
    with written_by_thread(only_mine=True):
        code = child.run()
    channel.flush()
    if child.have_all_finished:
        # Otherwise others will soon run the tasks that still run here.
        send_collected()
        for process in multiprocessing.active_children():
            # What tasks have left, such as the processes of a pool. Its exit function would wait for their end.
            process.terminate()
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does for its children
    return code


#: What loggers, Sentry and OpenTelemetry have collected is sent by these: module, function, method of what it returns.
SENDERS = (
    ("logging", "shutdown", None),
    ("sentry_sdk", "flush", None),
    ("opentelemetry.trace", "get_tracer_provider", "force_flush"),
    ("opentelemetry.metrics", "get_meter_provider", "force_flush"),
    ("opentelemetry._logs", "get_logger_provider", "force_flush"),
)


def send_collected() -> None:
    """Do what the exit functions of these packages do. Those of the parent are not called here: ``starter.py``."""
    for module, function, method in SENDERS:
        with suppress(Exception):
            if module in sys.modules:
                returned = getattr(sys.modules[module], function)()
                if method is not None:
                    getattr(returned, method)()


def _options_from(channel: Channel) -> dict[str, Any]:
    """Wait for the options, which are the first message."""
    while not channel.is_over:
        for message in channel.receive():
            if "start" in message:
                options: dict[str, Any] = message["start"]
                return options
        time.sleep(0.001)
    os._exit(1)


def prepare_process(number: int) -> None:
    """Prepare this process for tasks: its name, signals and garbage collection."""
    multiprocessing.current_process().name = f"worker-{number}"
    # Those of the process that has forked this one are not its own.
    multiprocessing.process._children = set()  # type: ignore[attr-defined]  # noqa: SLF001 - as its own children do
    # Signals that reach all processes of a group, as Ctrl-C on a terminal does, are for the parent, which ends its
    # children in order. Handlers, because a program that a task starts would inherit that signals are ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave_to_parent)
    gc.collect()
    gc.freeze()
    often, *others = gc.get_threshold()
    if often:  # zero: the collector is switched off
        gc.set_threshold(max(often, GARBAGE), *others)


def _leave_to_parent(number: int, frame: Any) -> None:
    """Do nothing."""


def _reset_signals_after_fork() -> None:
    """Let the signals end a process that a task has forked: multiprocessing's terminate(), for example, is for it.

    A handler in Python would not do. In a process that another thread than the main thread has forked, Python 3.13.0
    does not call handlers while Python code runs.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _leave_to_parent:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_reset_signals_after_fork)
