"""The threads that run tasks, and the event loop that runs the async ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from asgiref.sync import AsyncToSync, sync_to_async
from django.core.cache import caches
from django.db import Error as DatabaseFailure
from django.db import connections

from django_pglock.postgres.connections import has_hung_up
from django_pglock.postgres.known_connections import is_on_standby, note_connection
from django_pglock.postgres.sessions import limit_waiting
from django_pglock.store.outcome import Released, Succeeded
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import task_backends, task_started
from django_pglock.tasks.options import Group
from django_pglock.worker.capacity import Slot
from django_pglock.worker.in_flight import Ending, Hand
from django_pglock.worker.liveness.session_watch import SessionWatch
from django_pglock.worker.running.attempt import Attempt, break_off, prepare, run, run_async
from django_pglock.worker.running.forked_child import end_here
from django_pglock.worker.running.group import with_others
from django_pglock.worker.running.orm_thread import OrmThread, current_attempt
from django_pglock.worker.running.watchdog import Seat, Watchdog
from django_pglock.worker.settling.report import tell

logger = logging.getLogger("django_pglock.worker")

#: Seconds between two looks at a thread's connections while its tasks succeed. A look costs as much as a small task.
BETWEEN_LOOKS = 0.1
#: Seconds for which a thread rests that had to give a task back.
BETWEEN_TRIES = 1.0


class Executor:
    """Runs what is in the inbox and puts the endings into the outbox."""

    def __init__(self, hand: Hand, using: str, watchdog: Watchdog) -> None:
        self.hand = hand
        self.using = using
        self.loop = AsyncLoop(hand, using)
        self.watchdog = watchdog
        self.session_watch = SessionWatch(self.claim_of)
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"lockworker-thread-{number}", daemon=True)
            for number, slot in enumerate(hand.threads.slots, start=1)
        ]
        # Prepares what runs on the loop: to read of earlier attempts, or to claim a group, would hold up the others.
        self._threads.append(threading.Thread(target=self._begin_coroutines, name="lockworker-beginner", daemon=True))

    def start(self) -> None:
        """Start the threads. The loop starts with the first async task."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread end after its present task."""
        self._is_stopping = True
        for _ in self.hand.threads.slots:
            self.hand.threads.inbox.put(None)
        self.hand.coroutines.inbox.put(None)

    @property
    def is_missing(self) -> bool:
        """Whether a thread has ended although nobody asked for that."""
        ended = any(thread.ident is not None and not thread.is_alive() for thread in self._threads)
        return (ended or self.loop.is_missing) and not self._is_stopping

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until nothing runs any more but what is stuck, and say whether that came."""
        deadline = time.monotonic() + timeout
        stuck = {seat.thread for seat in self._stuck_seats()}
        awaited = [thread for thread in self._threads if thread.ident is not None and thread.ident not in stuck]
        for thread in awaited:
            thread.join(max(0.0, deadline - time.monotonic()))
        is_idle = not any(thread.is_alive() for thread in awaited)
        return self.hand.coroutines.wait(max(0.0, deadline - time.monotonic())) and is_idle

    def stuck(self) -> list[Attempt]:
        """Return the attempts whose functions do not end, although their time has been over for long."""
        return [attempt for seat in self._stuck_seats() if isinstance(attempt := seat.attempt, Attempt)]

    def _stuck_seats(self) -> list[Seat]:
        return [seat for seat in self.watchdog.seats if (attempt := seat.attempt) is not None and attempt.is_stuck]

    def cancel(self, requests: Iterable[tuple[int, int]]) -> None:
        """Let claims in hand, named by id and attempt, end: not begin, or be told if they run. May come again."""
        for request in requests:
            if (claim := self.hand.claims.get(request)) is not None:
                claim.is_cancelled = True
                self._interrupt(claim)

    def _interrupt(self, claim: Claim) -> None:
        for seat in self.watchdog.seats:
            attempt = seat.attempt
            if attempt is not None and claim in attempt.claims and attempt.is_cancelled:
                seat.cancel(attempt)
        self.loop.interrupt(claim)

    def _work(self, slot: Slot) -> None:
        threads = self.hand.threads

        def over(ending: Ending | None, cost: float) -> None:
            # What could not begin says nothing of what a task costs.
            is_telling = ending is not None and not isinstance(ending.outcome, Released)
            threads.free(slot, cost=cost if is_telling else None)

        self._execute_all(partial(threads.next, slot), over)

    def _begin_coroutines(self) -> None:
        coroutines = self.hand.coroutines

        def over(ending: Ending | None, _cost: float) -> None:
            if ending is not None:
                coroutines.free()

        self._execute_all(coroutines.next, over)

    def _execute_all(
        self, next_claim: Callable[[], Claim | None], over: Callable[[Ending | None, float], None]
    ) -> None:
        """Execute claims until there is none; ``over`` is called after each, with the seconds that it took."""
        looked_at = 0.0
        prepare_connections()
        seat = self.watchdog.seat()
        clean = clean_context()
        keeps_all = all(map(is_kept, connections.settings.values()))
        try:
            while (claim := next_claim()) is not None:
                began = time.perf_counter()
                if began - looked_at > BETWEEN_LOOKS:
                    look_at_connections(self.using)
                    looked_at = began
                # Coroutines take theirs along from here: the loop is called with the context of its caller.
                seat.claim = claim
                ending = clean.copy().run(self._execute, claim, seat)
                seat.claim = None
                seat.clean_up(claim)
                if not keeps_all:
                    close_what_is_not_kept()
                if ending is not None:
                    if not isinstance(ending.outcome, Succeeded):
                        looked_at = 0.0
                        if isinstance(ending.outcome, Released):
                            # This thread cannot connect. Without a pause it would claim and give back as fast as it
                            # can, and faster than threads that can; to put the tasks off would keep them from those.
                            time.sleep(BETWEEN_TRIES)
                    self.hand.ended(ending)
                over(ending, time.perf_counter() - began)
        finally:
            connections.close_all()

    def claim_of(self, thread: int | None) -> Claim | None:
        """Return the claim that a thread of this process, by its number, runs now."""
        claims = (seat.claim for seat in self.watchdog.seats if seat.thread == thread)
        return next(claims, None) or self.loop.orm.claim_of(thread)

    def _execute(self, claim: Claim, seat: Seat) -> Ending | None:
        attempt: Attempt | Ending | None = None
        try:
            attempt = prepare(claim, self.using)
            if isinstance(attempt, Attempt) and attempt.definition.group is not None:
                attempt = self._with_others(attempt, attempt.definition.group)
            if isinstance(attempt, Ending):
                return attempt
            if attempt.is_heard:
                tell(task_started, claim, attempt.result)
            if registry.is_async(claim.task_path):
                self.loop.run(attempt)
                return None
            ending = run(attempt, seat.call)
            if attempt.is_disturbed:
                connections.close_all()
        except BaseException as error:  # noqa: BLE001 - see the top of attempt.py
            return break_off(attempt.claims if isinstance(attempt, Attempt) else [claim], error)
        return ending

    def _with_others(self, attempt: Attempt, group: Group) -> Attempt | Ending:
        try:
            return with_others(attempt, group, self.hand)
        except DatabaseFailure:
            logger.warning("The group of %r cannot be read; it is given back.", attempt.claim, exc_info=True)
            return Ending(attempt.claim, Released())


class AsyncLoop:
    """One event loop in a thread of its own, started when the first async task comes."""

    def __init__(self, hand: Hand, using: str) -> None:
        self.hand = hand
        self.using = using
        self.process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._running: dict[asyncio.Task[Any], Attempt] = {}
        self._looked_at = 0.0
        self._look: asyncio.Future[None] | None = None
        self.orm = OrmThread(prepare_connections)

    @property
    def is_missing(self) -> bool:
        """Whether the loop's thread has ended although nobody asked for that."""
        return self._loop is not None and self._thread is not None and not self._thread.is_alive()

    def run(self, attempt: Attempt) -> None:
        """Start an attempt on the loop and return at once."""
        with self._starting:
            loop = self._loop = self._loop or self._new_loop()
        loop.call_soon_threadsafe(lambda: loop.create_task(self._run(attempt)))

    async def _run(self, attempt: Attempt) -> None:
        current_attempt.set(attempt)
        try:
            await self._have_connections_looked_at()
            ending = await run_async(attempt, self._call)
        except BaseException as error:  # noqa: BLE001 - see the top of attempt.py
            ending = break_off(attempt.claims, error)
        self.orm.end(attempt)
        self.hand.ended(ending)
        self.hand.coroutines.free()

    async def _have_connections_looked_at(self) -> None:
        """Look after the connections of the thread in which Django's ORM runs for coroutines.

        Not waited for: something else may keep that thread busy. It takes turns, so the look comes first all the same.
        """
        now = time.perf_counter()
        if now - self._looked_at > BETWEEN_LOOKS:
            self._looked_at = now
            self._look = asyncio.ensure_future(sync_to_async(look_at_connections)(self.using))
            await asyncio.sleep(0)

    async def _call(self, attempt: Attempt) -> Any:
        """Call the function of an attempt. It can be interrupted where it awaits something, and nowhere else."""
        attempt.begin()
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None  # noqa: S101 - for the type checker
        timer = None if attempt.timeout is None else loop.call_at(attempt.deadline, self._expire, me)
        self._running[me] = attempt
        try:
            return await attempt.call()
        finally:
            if os.getpid() != self.process:
                end_here(sys.exc_info()[1])
            del self._running[me]
            if timer is not None:
                timer.cancel()

    def interrupt(self, claim: Claim) -> None:
        """Interrupt the coroutine that runs for a cancelled claim, if there is one."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just been closed
                loop.call_soon_threadsafe(self._cancel, claim)

    def _cancel(self, claim: Claim) -> None:
        for task, attempt in self._running.items():
            if claim in attempt.claims and attempt.is_cancelled:
                self._strike(task)

    def _expire(self, task: asyncio.Task[Any]) -> None:
        # The loop's timers may be a tick early.
        attempt = self._running[task]
        attempt.deadline = min(attempt.deadline, time.monotonic())
        self._strike(task)

    def _strike(self, task: asyncio.Task[Any]) -> None:
        attempt = self._running[task]
        if not attempt.is_struck:
            attempt.is_struck = True
            # Python goes on in the thread whatever becomes of the coroutine; its SQL need not.
            asyncio.get_running_loop().run_in_executor(None, self.orm.cancel, attempt)
            task.cancel()

    def stop(self) -> None:
        """End the loop; coroutines that are still under way are cancelled."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        # Where sync_to_async() looks for the thread of a loop.
        AsyncToSync.loop_thread_executors[loop] = self.orm  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._serve, args=(loop,), name="lockworker-loop", daemon=True)
        self._thread.start()
        return loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._serve_until_stopped(loop)
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left))
        finally:
            AsyncToSync.loop_thread_executors.pop(loop, None)
            self.orm.close()
            loop.close()

    def _serve_until_stopped(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until ``stop()`` ends it: nothing that a coroutine does may end it for the others."""
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets these two through when they leave a coroutine that another one has started. Who waits for
                # that one gets them all the same, and the loop is as it was.
                logger.warning("A coroutine that a task has started wants to end the process.", exc_info=True)
            if self._loop is not loop:
                return


def clean_context() -> Context:
    """Return the context of this thread, of which each task gets a copy: what one sets is not there for the next.

    Django keeps caches and task backends in a context variable, each made when it is needed first. They are made here,
    or each task would make, and connect, its own.
    """
    for handler in (caches, task_backends):
        # What cannot be made fails where it is used.
        with contextlib.suppress(Exception):
            handler.all()
    return copy_context()


def prepare_connections() -> None:
    """Let no connection of this thread be opened without a limit, or wait for an answer without being known."""
    for alias in connections:
        # What cannot be made fails where it is used.
        with contextlib.suppress(Exception):
            connection: Any = connections[alias]
            if connection.vendor == "postgresql":
                limit_waiting(connection)
                note_connection(connection)


def look_at_connections(using: str) -> None:
    """Close this thread's connections that are broken, too old or hung up, so that the next task opens new ones.

    And that of the tasks' database, ``using``, if it leads to a standby: its address led there for a while.
    """
    connection: Any
    for connection in connections.all(initialized_only=True):
        if connection.vendor == "postgresql" and (
            has_hung_up(connection) or (connection.alias == using and is_on_standby(connection))
        ):
            connection.close()
        else:
            connection.close_if_unusable_or_obsolete()


def is_kept(settings: Mapping[str, Any]) -> bool:
    """Say whether a thread keeps a connection with these settings from one task to the next.

    Not one of a pool, which may have fewer of them than there are threads; nor one without AUTOCOMMIT, whose open
    transaction would go on in the next task.
    """
    return bool(settings["AUTOCOMMIT"] and not settings["OPTIONS"].get("pool"))


def close_what_is_not_kept() -> None:
    """Close this thread's connections that no other task may have as they are. What is not committed is rolled back."""
    for connection in connections.all(initialized_only=True):
        if not is_kept(connection.settings_dict):
            connection.close()
