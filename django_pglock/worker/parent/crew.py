"""The children of one database: starts them, hears what they tell, and replaces them. Beats and keeps up for them.

A child is replaced at once if it asks for that. It is killed if it was stopped (SIGSTOP), if a part of it that is ours
makes no progress, or if a function has not ended after its timeout and the grace period, and the child cannot end by
itself, because the function keeps it from running.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import time
from asyncio import AbstractEventLoop, TimerHandle
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from django_pglock.conf import get_settings
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import pause_after
from django_pglock.store.liveness import Beat, HeartbeatReply, missing
from django_pglock.worker.channel import Channel
from django_pglock.worker.child.child import LEFT_BEHIND
from django_pglock.worker.parent.heartbeat import Heartbeat
from django_pglock.worker.parent.starter import Starter
from django_pglock.worker.parent.upkeep import Upkeep

logger = get_logger(WORKER)

#: Seconds before a child that ended unexpectedly is started again. Doubled each time, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
#: If a child has lived for this number of seconds, its end is not counted as one more failure in a row.
STABLE_AFTER = 60.0
#: Seconds beyond the grace period within which a child must write its last outcomes and end.
MARGIN = 30.0
#: Seconds beyond timeout and grace period within which a child must begin to end because of a function that does not.
OVERRUN_MARGIN = 2.0
#: Seconds for a child to end after its channel is closed. Its end closes the channel, too.
DEAF_MARGIN = 1.0
#: Seconds at the end for the upkeep to end its present statement, and for the heartbeat to close its session.
LAST_UPKEEP, LAST_HEARTBEAT = 10.0, 1.0
#: The longest time in seconds for which code of a task may keep all threads of a child from running.
LONGEST_SILENCE = 3600.0
#: Seconds between two checks of the children, and of the worker's files.
CHECK_INTERVAL = 1.0


class Child:
    """One child: a worker, with its row in the table of workers."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.id = uuid4()
        self.channel = channel
        #: Its process; 0 before it can run tasks.
        self.pid = 0
        self.started_at = time.monotonic()
        self.heard_at = self.started_at
        #: The functions that it knows.
        self.functions: list[str] = []
        #: Its last report: numbers, and sentences about its health.
        self.report: dict[str, Any] = {}
        #: The deadlines of the attempts with a timeout, by task and attempt.
        self.deadlines: dict[tuple[int, int], float] = {}
        #: The attempts whose time was over when the child was killed.
        self.overruns: list[tuple[int, int]] = []
        #: It is killed if it has not ended by then. It ends if this is not infinite.
        self.kill_at = math.inf
        #: Its row is written; another one was started in its place; it was killed.
        self.is_known = self.is_replaced = self.is_killed = False

    @property
    def name(self) -> str:
        """The name for the table of workers and for people: host, process, and the start of the id."""
        return f"{socket.gethostname()[:80]}:{self.pid}:{self.id.hex[:8]}"

    @property
    def is_ending(self) -> bool:
        """Whether it ends, or has to."""
        return self.kill_at < math.inf

    def note_ready(self, pid: int, functions: list[str]) -> None:
        """Note that it can run these functions: at its start, and when it has got to know another one."""
        is_new, self.pid, self.functions = not self.pid, pid, functions
        if is_new:
            logger.info("Started %r.", self)

    def end_within(self, seconds: float) -> None:
        """Note that it ends. It is killed if it has not ended within some seconds."""
        self.kill_at = min(self.kill_at, time.monotonic() + seconds)

    def __repr__(self) -> str:
        return f"worker-{self.number}[{self.pid}]"


class Crew:
    """Keeps ``count`` children of one database running until ``drain()`` or ``end()``.

    ``options`` are those of a child (``worker/child.py``). Its methods are called in the thread of the loop, except for
    those of the heartbeat.
    """

    def __init__(
        self, loop: AbstractEventLoop, starter: Starter, options: dict[str, Any], *, first: int, count: int
    ) -> None:
        self.loop = loop
        self._starter = starter
        self.using: str = options["using"]
        self.id = uuid4()
        self.options = options
        #: The seconds that running tasks get to finish.
        self.grace = float(options["grace"])
        self.heartbeat = Heartbeat(self.using, self.id, self)
        self.upkeep = Upkeep(self.using, self.heartbeat)
        #: For the heartbeat, in its thread.
        self.wake_upkeep = self.upkeep.wake
        self.all: list[Child] = []
        #: When the loop last checked the children.
        self.checked_at = time.monotonic()
        self.is_stopping = False
        #: Whether a child ended because of an error.
        self.have_failed = False
        #: What draining children could not run.
        self.left_behind: list[str] = []
        self._failures: Counter[int] = Counter()
        # The numbers of the children that have to be started later.
        self._later: dict[int, TimerHandle] = {}
        self._numbers = range(first, first + count)
        # The values of the row of each child.
        self._row: dict[str, Any] = {"hostname": socket.gethostname()[:255], "threads": options["threads"]}
        self._row["queues"] = options["queues_given"]

    @property
    def are_gone(self) -> bool:
        """Whether no child runs, and none will be started."""
        return not self.all and not self._later

    @property
    def services(self) -> tuple[Heartbeat, Upkeep]:
        """The parts with a thread and a database session of their own."""
        return self.heartbeat, self.upkeep

    def start(self) -> None:
        """Start all children and services, and check the children from now on."""
        for service in self.services:
            service.start()
        for number in self._numbers:
            self._start(number)

    def close(self) -> None:
        """End the services. First the upkeep rescues the tasks of children that did not end in order."""
        for service, seconds in ((self.upkeep, LAST_UPKEEP), (self.heartbeat, LAST_HEARTBEAT)):
            service.stop()
            service.wait(seconds)

    # For the heartbeat, in its thread. The loop adds and removes children, so these copy the list.

    def beats(self) -> Sequence[Beat]:
        if time.monotonic() - self.checked_at > CHECK_INTERVAL + missing():
            # The loop hangs, so nobody would see the death of a child.
            return []
        return [self._beat_of(child) for child in list(self.all) if not child.is_killed and child.pid]

    def note_beat(self, replies: dict[UUID, HeartbeatReply], began: float) -> None:
        for child in list(self.all):
            if reply := replies.get(child.id):
                child.channel.send(beat=[began, self.heartbeat.is_listening, reply.is_sleeping])
                if not child.is_known:
                    child.is_known = True
                    queues = ", ".join(map(repr, self.options["queues_given"])) or "all queues"
                    logger.info("Worker %s is ready: %s.", child.name, queues)

    def tell(self, worker: UUID | None = None, **message: Any) -> None:
        for child in [each for each in list(self.all) if worker in (None, each.id)]:
            child.channel.send(**message)

    def wake(self, worker: str, queue: str, hops: int) -> None:
        # If it ends or has ended, another one, which serves the same queues.
        able = [each for each in list(self.all) if not each.is_ending and not each.is_killed]
        for child in [each for each in able if str(each.id) == worker] or able[:1]:
            child.channel.send(wake=[queue, hops])

    # The end

    def end(self, *, drain: bool) -> None:
        """Have all children end, and start none any more: after their running tasks, or without waiting for these."""
        self.stop_starting()
        for child in self.all:
            child.channel.send(**{"drain" if drain else "end": True})
            child.end_within(MARGIN + (self.grace if drain else 0.0))
        # Now, because a worker that its row shows as stopping is not woken.
        self.heartbeat.beat_soon()

    def kill(self, child: Child, why: str) -> None:
        """Kill a child, and say why. The time of its attempts may be over."""
        logger.error("%r %s. It is killed.", child, why)
        child.is_killed = True
        child.overruns = [key for key, deadline in child.deadlines.items() if deadline < time.monotonic()]
        self._starter.kill(child.id.hex)

    def note_end(self, key: str, code: int | str) -> None:
        """Note that a process has ended with an exit code, or could not be started, perhaps one of these children."""
        for child in [each for each in self.all if each.id.hex == key]:
            self._receive(child)
            self._forget(child)
            self._replace_after_end(child, code)
            self.upkeep.end_worker(child.id, child.overruns)

    def _beat_of(self, child: Child) -> Beat:
        about: dict[str, Any] = {
            "name": child.name,
            "pid": child.pid,
            "is_stopping": child.is_ending,
            "task_paths": child.functions,
        }
        return Beat(child.id, self.id, **about, **self._row)

    def stop_starting(self) -> None:
        """Start no child any more."""
        self.is_stopping = True
        for timer in self._later.values():
            timer.cancel()
        self._later.clear()

    def _start(self, number: int) -> None:
        self._later.pop(number, None)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # the process has no file descriptors left
            self._start_later(number, f"worker-{number} cannot be started ({error})")
            return
        child = Child(number, Channel(ours))
        child.channel.send(start={**self.options, "id": str(child.id), "number": number})
        self.all.append(child)
        self.loop.add_reader(child.channel.fileno(), self._receive, child)
        with theirs:
            self._starter.start(child.id.hex, theirs)

    def _start_later(self, number: int, why: str) -> None:
        self._failures[number] += 1
        pause = pause_after(self._failures[number], FIRST_PAUSE, LONGEST_PAUSE)
        logger.warning("%s. It is started again in %.1f s.", why, pause)
        self._later[number] = self.loop.call_later(pause, self._start, number)

    def _receive(self, child: Child) -> None:
        for message in child.channel.receive():
            child.heard_at = time.monotonic()
            for kind, value in message.items():
                self._hear(child, kind, value)
        if child.channel.is_over:
            # It has ended, or a task has closed the files of its process. Then it hears nothing more.
            self.loop.remove_reader(child.channel.fileno())
            child.end_within(DEAF_MARGIN)

    def _hear(self, child: Child, kind: str, value: Any) -> None:
        match kind:
            case "ready":
                child.note_ready(*value)
                self.heartbeat.beat_soon()
            case "report":
                child.report = value
            case "began":
                child.deadlines[value[0], value[1]] = value[2]
            case "ended":
                child.deadlines.pop((value[0], value[1]), None)
            case "ending":
                child.end_within(self.grace + MARGIN)
            case "replace":
                self._replace(child, *value)
            case "left_behind":
                self.left_behind += value
            case "scheduled":
                self.upkeep.wake()
            case "stack":
                self.heartbeat.answer_stack(child.id, *value)

    # Replacement

    def _replace(self, child: Child, why: str, level: int = logging.INFO) -> None:
        """Start another child at once, because this one will end. It says itself when it begins to end."""
        if not child.is_replaced and not self.is_stopping:
            logger.log(level, "Replacing %r: %s.", child, why)
            child.is_replaced = True
            self._failures[child.number] = 0
            self._start(child.number)

    def check(self) -> None:
        """Kill children that are frozen or overdue, and end sessions whose answers are late. Called once a second."""
        self.checked_at = now = time.monotonic()
        for service in self.services:
            service.trouble()
        for child in list(self.all):
            child.channel.flush()
            if child.is_killed:
                self._starter.kill(child.id.hex)
            else:
                self._check_child(child, now)

    def _check_child(self, child: Child, now: float) -> None:
        silence = now - child.heard_at
        overdue = now - min(child.deadlines.values(), default=now)
        if child.is_ending:
            if now >= child.kill_at:
                self.kill(child, "has not ended in time")
        elif overdue > max(self.grace, 1.0) + OVERRUN_MARGIN:
            # The child itself would have begun to end, but the function keeps it from running.
            self.kill(child, "runs a task long after its timeout, and does not react")
        elif silence > LONGEST_SILENCE or (silence > get_settings().HEARTBEAT_LIMIT and is_stopped(child.pid)):
            self.kill(child, f"has been frozen for {silence:.0f} s")

    def _forget(self, child: Child) -> None:
        self.all.remove(child)
        self.loop.remove_reader(child.channel.fileno())
        child.channel.close()

    def _replace_after_end(self, child: Child, code: int | str) -> None:
        is_in_order = code == 0
        is_drained = self.options["drain"] and code in (0, LEFT_BEHIND)
        if child.is_replaced or self.is_stopping or is_drained:
            logger.log(logging.INFO if is_in_order else logging.ERROR, "%r has ended %s.", child, in_words(code))
            self.have_failed = self.have_failed or not (is_in_order or child.is_replaced)
            return
        if time.monotonic() - child.started_at >= STABLE_AFTER:
            self._failures[child.number] = 0
        self._start_later(child.number, f"{child!r} has ended unexpectedly {in_words(code)}")


def in_words(code: int | str) -> str:
    """Return in words how a process has ended, or why it could not be started."""
    if isinstance(code, str):
        return f"because it cannot be started ({code})"
    if code >= 0:
        return f"with exit code {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP, or by a debugger, as far as the system tells."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
