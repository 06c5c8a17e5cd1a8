"""The event loop that runs the async tasks of a worker, and the thread in which Django's ORM runs for them.

Django's connections belong to a thread, and asgiref runs the functions that coroutines pass to ``sync_to_async`` in one
thread of their loop. All coroutines share this thread and its connections. So the thread records for which attempt it
works. This is needed to cancel only the SQL of a task whose time is over, and to close a connection that a task has
left in a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

from asgiref.sync import AsyncToSync
from django.db import connections

from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.stopping import current_attempt
from django_pglock.store.outcome import GivenBack
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.in_flight import EndedClaim, InFlight
from django_pglock.worker.child.run import end_by_error, run_async
from django_pglock.worker.child.runners import Runner, TaskThread, Watchdog, close, coroutine_text, stack_text
from django_pglock.worker.child.task_connections import (
    CHECK_INTERVAL,
    IDLE_TIMEOUT,
    close_idle_connections,
    expect_next_task,
    is_reusable,
    prepare_connections,
    renew_connections,
)

logger = get_logger(WORKER)


class EventLoop:
    """One event loop in a thread of its own, started when the first async task comes."""

    def __init__(self, in_flight: InFlight, using: str, watchdog: Watchdog) -> None:
        self.in_flight = in_flight
        self.watchdog = watchdog
        self.orm = OrmThread(using, watchdog)
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = 0
        self._close_idle: asyncio.TimerHandle | None = None

    @property
    def is_missing(self) -> bool:
        """Whether the loop's thread has ended although the loop was not stopped."""
        return self._loop is not None and self.thread is not None and not self.thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether, after ``stop()``, the loop has ended and its sessions are closed."""
        return self.thread is None or not (self.thread.is_alive() or self.orm.is_open)

    def start(self) -> None:
        """Start both threads. Raises ``RuntimeError`` if the process has no thread left for them."""
        self.orm.submit(time.monotonic)
        loop = asyncio.new_event_loop()
        # Here sync_to_async() looks up the thread of a loop. The type annotation of asgiref allows only its own
        # executor class, but asgiref works with any executor.
        executors: dict[Any, Any] = AsyncToSync.loop_thread_executors
        executors[loop] = self.orm
        thread = threading.Thread(target=self._serve, args=[loop], name="lockworker-loop", daemon=True)
        thread.start()
        self.thread, self._loop = thread, loop

    def run(self, attempt: Attempt) -> None:
        """Start an attempt on the loop and return at once."""
        loop: Any = self._loop
        loop.call_soon_threadsafe(self._start, attempt)

    def stop(self) -> None:
        """End the loop. Coroutines that still run are cancelled."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # its thread has ended
                loop.call_soon_threadsafe(loop.stop)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._serve_until_stopped(loop)
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left))
        except BaseException as error:
            # One of them may have broken the loop, and would do so again in each next process. So it counts.
            for each in self.watchdog.runners:
                if isinstance(each, Coroutine):
                    claims, using = each.started.claims, each.started.using
                    self._free(each.ended or end_by_error(claims, using, error, has_begun=True))
            raise
        finally:
            AsyncToSync.loop_thread_executors.pop(loop, None)
            self.orm.end()
            loop.close()

    def _serve_until_stopped(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until ``stop()`` ends it. Nothing that a coroutine does may end it for the others."""
        while True:
            try:
                loop.run_forever()
            except BaseException as error:
                # If a coroutine that a task has started raises SystemExit, asyncio raises it out of the loop. A
                # coroutine that awaits the started one gets the exception as well, so the loop can continue. Or the log
                # of asyncio has raised, for example while it reported that a callback has failed.
                if loop.is_closed() or isinstance(error, OSError):
                    # A task has closed the descriptor by which the loop waits. Without this thread the process is
                    # replaced.
                    raise
                logger.warning(
                    "A coroutine that a task has started tried to end the process, or its error could not be logged. "
                    "The worker continues.",
                    exc_info=True,
                )
            if self._loop is not loop:
                return

    # In the thread of the loop

    def _start(self, attempt: Attempt) -> None:
        if self._close_idle is not None:
            self._close_idle.cancel()
        coroutine = Coroutine(self, attempt)
        self._running += 1
        self.watchdog.runners.add(coroutine)
        coroutine.task.add_done_callback(lambda task: self._end(coroutine, attempt))

    def _end(self, coroutine: Coroutine, attempt: Attempt) -> None:
        """End an attempt when its coroutine is done.

        The coroutine may have been cancelled before its first step, so that no line of it has run: a function may
        cancel all coroutines of its loop.
        """
        self._running -= 1
        self.watchdog.runners.discard(coroutine)
        ended, loop = coroutine.ended or attempt.ended(GivenBack()), coroutine.loop
        if pause := self.in_flight.pause_after(ended):
            # Meanwhile the claim takes up capacity.
            loop.call_later(pause, self._free, ended)
        else:
            self._free(ended)
        self.orm.close_left_open_soon()
        if attempt.is_overdue and self.orm.runs(attempt):
            loop.call_later(self.watchdog.grace_period, self._end_if_left, attempt)
        if not self._running:
            # Not while a coroutine runs, which may need them.
            self._close_idle = loop.call_later(IDLE_TIMEOUT, self.orm.submit, close_idle_connections)

    def _end_if_left(self, attempt: Attempt) -> None:
        """End the process if a call of an ended coroutine does not end: the ORM of all coroutines waits for it."""
        if self.orm.runs(attempt):
            self.watchdog.long_overdue(attempt)

    def _free(self, ended: EndedClaim) -> None:
        self.in_flight.end(ended)
        self.in_flight.coroutines.free()


class Coroutine(Runner):
    """Runs one attempt on the event loop. It can be stopped where it awaits something, and at its statements."""

    def __init__(self, events: EventLoop, attempt: Attempt) -> None:
        super().__init__(events.watchdog)
        self.events = events
        self.started = attempt
        self.ended: EndedClaim | None = None
        self._is_cancel_sent = False
        self._ident = threading.get_ident()
        self.loop = asyncio.get_running_loop()
        self.task = self.loop.create_task(self._run(attempt))

    async def _run(self, attempt: Attempt) -> None:
        # Not returned: asyncio counts a coroutine that has cancelled itself at its end as cancelled.
        try:
            self.ended = await run_async(attempt, self)
        except BaseException as error:  # noqa: BLE001 - see attempt.py
            self.ended = end_by_error(attempt.claims, attempt.using, error, has_begun=attempt.began is not None)

    def stop(self, attempt: Attempt) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            self.loop.call_soon_threadsafe(self._cancel, attempt)
        # The cancellation of the coroutine does not reach a call in the ORM's thread, so its SQL is cancelled, too.
        self.events.orm.stop(attempt)

    def _cancel(self, attempt: Attempt) -> None:
        # A cancelled task gets one CancelledError, so that it can clean up.
        if self.attempt is attempt and (attempt.is_overdue or not self._is_cancel_sent):
            self._is_cancel_sent = True
            self.task.cancel()

    def stack(self, innermost: Mapping[int, FrameType]) -> str:
        """Return the stack of the coroutine. Where it waits for Django's ORM, the stack of the ORM's thread follows.

        A coroutine that runs Python code now is on the stack of the loop's thread.
        """
        if asyncio.current_task(self.loop) is self.task:
            return stack_text(innermost.get(self._ident))
        text, orm = coroutine_text(self.task.get_coro()), self.events.orm.runner
        return text + (orm.stack(innermost) if orm is not None and orm.attempt is self.attempt else "")


class OrmThread(ThreadPoolExecutor):
    """An executor of one thread. The calling coroutine's attempt is that of the call."""

    def __init__(self, using: str, watchdog: Watchdog) -> None:
        super().__init__(1, thread_name_prefix="lockworker-orm", initializer=self._prepare)
        self.using = using
        self.watchdog = watchdog
        #: The thread as a runner, once it has started.
        self.runner: TaskThread | None = None
        self._ended: Future[None] | None = None
        self._renewed_at = 0.0
        #: The attempt of the last call.
        self._last: Attempt | None = None
        # By alias: the attempt that has begun the open transaction.
        self._open: dict[str, Attempt | None] = {}

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, current_attempt.get(), partial(function, *args, **kwargs))

    def stop(self, attempt: Attempt) -> None:
        """Cancel the statement that runs for an attempt. For other threads."""
        if self.runner is not None:
            self.runner.stop(attempt)

    def runs(self, attempt: Attempt) -> bool:
        """Return whether a call of an attempt runs now. For other threads."""
        return self.runner is not None and self.runner.attempt is attempt

    def close_left_open_soon(self) -> None:
        """Note that a coroutine has ended, and perhaps left a transaction open. For the thread of the loop."""
        if self._open:
            self.submit(time.monotonic)

    def end(self) -> None:
        """Close the sessions after the present call, and end the thread."""
        self._ended = self.submit(connections.close_all)
        self.shutdown(wait=False)

    @property
    def is_open(self) -> bool:
        """Whether there may be sessions."""
        return self._ended is None or not self._ended.done()

    def _prepare(self) -> None:
        prepare_connections()
        self.runner = TaskThread(self.watchdog)

    def _run(self, attempt: Attempt | None, call: Callable[[], Any]) -> Any:
        runner: Any = self.runner
        runner.attempt = attempt
        try:
            self._begin(attempt)
            return call()
        finally:
            runner.release()
            self._close_left_open(attempt)

    def _begin(self, attempt: Attempt | None) -> None:
        if attempt is None or attempt is self._last:
            return
        self._last, now = attempt, time.monotonic()
        if now - self._renewed_at > CHECK_INTERVAL:
            self._renewed_at = now
            renew_connections(self.using)
        for session in connections.all(initialized_only=True):
            expect_next_task(session)

    def _close_left_open(self, attempt: Attempt | None) -> None:
        """Close the connections that ended attempts have left in a transaction."""
        sessions: Any = connections.all(initialized_only=True)
        left = {each.alias: each for each in sessions if not is_reusable(each)}
        self._open = {alias: self._open.get(alias, attempt) for alias in left}
        for alias, owner in list(self._open.items()):
            if owner is not None and owner.is_over:
                del self._open[alias]
                close(left[alias], owner.claim)
