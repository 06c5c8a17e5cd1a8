"""The event loop that runs the async tasks of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from asgiref.sync import AsyncToSync, sync_to_async

from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.stopping import current_attempt
from django_pglock.store.outcome import GivenBack
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child import task_connections, task_thread
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.in_flight import EndedClaim, InFlight
from django_pglock.worker.child.orm_thread import OrmThread
from django_pglock.worker.child.run import end_by_error, run_async
from django_pglock.worker.child.stoppable import StoppableAttempt, coroutine_text, stack_text
from django_pglock.worker.child.task_connections import CHECK_INTERVAL, prepare_connections, renew_connections
from django_pglock.worker.child.watchdog import Watchdog

logger = get_logger(WORKER)


class EventLoop:
    """One event loop in a thread of its own, started when the first async task comes."""

    def __init__(self, in_flight: InFlight, using: str, watchdog: Watchdog) -> None:
        self.in_flight = in_flight
        self.watchdog = watchdog
        self.using = using
        self.generation = task_thread.generation
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._running: dict[asyncio.Task[Any], Attempt] = {}
        #: Attempts whose coroutines have not taken their first step.
        self._not_begun: set[Attempt] = set()
        self._renewed_at = 0.0
        self._renewal: asyncio.Future[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self.orm = OrmThread(prepare_connections)

    @property
    def is_missing(self) -> bool:
        """Whether the loop's thread has ended although the loop was not stopped."""
        return self._loop is not None and self._thread is not None and not self._thread.is_alive()

    def run(self, attempt: Attempt) -> None:
        """Start an attempt on the loop and return at once."""
        with self._starting:
            loop = self._loop = self._loop or self._new_loop()
        loop.call_soon_threadsafe(self._start, loop, attempt)

    def _start(self, loop: asyncio.AbstractEventLoop, attempt: Attempt) -> None:
        self._not_begun.add(attempt)
        loop.create_task(self._run(attempt)).add_done_callback(lambda task: self._end_if_not_begun(attempt))

    def _end_if_not_begun(self, attempt: Attempt) -> None:
        """End an attempt whose coroutine was cancelled before its first step, so that no line of ``_run()`` has run.

        A function may cancel all coroutines of its loop.
        """
        if attempt in self._not_begun:
            self._not_begun.remove(attempt)
            self._end(attempt, attempt.ended(GivenBack()))

    async def _run(self, attempt: Attempt) -> None:
        self._not_begun.remove(attempt)
        current_attempt.set(attempt)
        try:
            await self._renew_connections()
            ended = await run_async(attempt, self._call)
        except BaseException as error:  # noqa: BLE001 - see the top of run.py
            if attempt.began is None and isinstance(error, asyncio.CancelledError):
                self._end(attempt, attempt.ended(GivenBack()))
                return
            ended = end_by_error(attempt.claims, self.using, error, has_begun=attempt.was_called)
        await self._pause_if_unable(ended)
        self._end(attempt, ended)

    async def _pause_if_unable(self, ended: EndedClaim) -> None:
        """Pause as a thread does that cannot begin a task. Meanwhile the claim takes up capacity."""
        if isinstance(ended.outcome, GivenBack):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(self.in_flight.note_unable())
        else:
            self.in_flight.note_able()

    def _end(self, attempt: Attempt, ended: EndedClaim) -> None:
        self.orm.end(attempt)
        self.in_flight.end(ended)
        self.in_flight.coroutines.free()
        if not self._running:
            self._schedule_close()

    def _schedule_close(self) -> None:
        """Have the connections of the ORM's thread closed if no coroutine begins for a while."""
        if self._idle is not None:
            self._idle.cancel()
        loop = asyncio.get_running_loop()
        close = partial(self._close_if_idle, time.monotonic())
        self._idle = loop.call_later(task_connections.IDLE_TIMEOUT, loop.run_in_executor, self.orm, close)

    def _close_if_idle(self, since: float) -> None:
        """Close the connections of the ORM's thread, unless a coroutine runs. Its end schedules the next call.

        Called in the ORM's thread.
        """
        if not self._running:
            task_connections.close_idle_connections(since)

    async def _renew_connections(self) -> None:
        """Have broken connections closed in the thread in which Django's ORM runs for coroutines.

        Does not wait for that, because another call may keep the thread busy. The thread takes calls in their order, so
        this one comes before those of the coroutine that starts now.
        """
        now = time.perf_counter()
        if now - self._renewed_at > CHECK_INTERVAL:
            self._renewed_at = now
            self._renewal = asyncio.ensure_future(sync_to_async(renew_connections)(self.using))
            await asyncio.sleep(0)

    async def _call(self, attempt: Attempt) -> Any:
        """Call the function of an attempt. It can be stopped where it awaits something, and at its statements."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None  # noqa: S101 - for the type checker
        self._running[me] = attempt
        try:
            return await call_async(attempt, partial(self._call_watched, loop, me))
        finally:
            self.watchdog.forget(attempt)
            del self._running[me]

    async def _call_watched(self, loop: asyncio.AbstractEventLoop, me: asyncio.Task[Any], attempt: Attempt) -> Any:
        if attempt.timeout is not None:
            self.watchdog.watch(attempt, partial(self._stop, loop, me))
        try:
            return await attempt.call()
        finally:
            if task_thread.generation != self.generation:
                task_thread.end_process(sys.exc_info()[1])

    def stack_of(self, claim: Claim, innermost: Mapping[int, FrameType]) -> str:
        """Return the stack of the coroutine that runs for a claim; empty if there is none. For other threads.

        ``innermost``: the innermost frame of each thread. A coroutine that runs Python code now is on the stack of the
        loop's thread. Where it waits for Django's ORM, the stack of the ORM's thread follows.
        """
        loop, thread = self._loop, self._thread
        running = (task for task, attempt in list(self._running.items()) if claim in attempt.claims)
        if loop is None or thread is None or (task := next(running, None)) is None:
            return ""
        if asyncio.current_task(loop) is task:
            return stack_text(innermost.get(thread.ident or 0))
        text = coroutine_text(task.get_coro())
        in_orm = self.orm.attempt
        if in_orm is not None and claim in in_orm.claims:
            text += stack_text(innermost.get(self.orm.ident or 0))
        return text

    def cancel(self, claim: Claim) -> None:
        """Stop the coroutine that runs for a cancelled claim, if there is one."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just been closed
                loop.call_soon_threadsafe(self._cancel, claim)

    def _cancel(self, claim: Claim) -> None:
        for task, attempt in self._running.items():
            if claim in attempt.claims and attempt.is_cancelled and not attempt.is_cancel_sent:
                attempt.is_cancel_sent = True
                self._stop_coroutine(task)

    def _stop(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], attempt: StoppableAttempt) -> None:
        """Stop a coroutine whose time is over. For the watchdog, which calls it again until the coroutine has ended."""
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(self._stop_coroutine, task)

    def _stop_coroutine(self, task: asyncio.Task[Any]) -> None:
        if (attempt := self._running.get(task)) is not None:
            # The cancellation of the coroutine does not reach a call in the ORM's thread, so its SQL is cancelled, too.
            with contextlib.suppress(RuntimeError):  # a function has shut down the executor of the loop
                asyncio.get_running_loop().run_in_executor(None, self.orm.cancel, attempt)
            task.cancel()

    def stop(self) -> None:
        """End the loop. Coroutines that still run are cancelled."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # its thread has ended
                loop.call_soon_threadsafe(loop.stop)

    @property
    def has_ended(self) -> bool:
        """Whether, after ``stop()``, the loop has ended and its sessions are closed."""
        return self._thread is None or (not self._thread.is_alive() and self.orm.is_closed)

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        # Here sync_to_async() looks up the thread of a loop. The type annotation of asgiref allows only its own
        # executor class, but asgiref works with any executor.
        executors: dict[Any, Any] = AsyncToSync.loop_thread_executors
        executors[loop] = self.orm
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
        """Run the loop until ``stop()`` ends it. Nothing that a coroutine does may end it for the others."""
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # If a coroutine that a task has started raises one of these, asyncio raises it out of the loop. A
                # coroutine that awaits the started one gets the exception as well, so the loop can continue.
                logger.warning(
                    "A coroutine that a task has started tried to end the process. The worker continues.", exc_info=True
                )
            except BaseException:
                # The log of asyncio has raised, for example while it reported that a callback has failed.
                if loop.is_closed():
                    raise
                logger.exception("The event loop of the worker has raised an error, and continues.")
            if self._loop is not loop:
                return


async def call_async(attempt: Attempt, call: Callable[[Attempt], Awaitable[Any]]) -> Any:
    """Call the function of an attempt by ``call``. What is raised is the error to record."""
    current_attempt.set(attempt)
    try:
        attempt.begin()
        value = await call(attempt)
        attempt.refuse_late_success()
    except BaseException as error:
        if (reason := attempt.reason_of(error)) is error:
            raise
        raise reason  # noqa: B904 - its cause is set
    finally:
        attempt.end()
        current_attempt.set(None)
    return value
