"""The threads that run tasks, and the thread that starts coroutines on the event loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial

from django.core.cache import caches
from django.db import Error as DatabaseFailure
from django.db import connections

from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import connection_for, has_manual_transaction
from django_pglock.postgres.thread_stacks import stacks
from django_pglock.store.claim import claim_group
from django_pglock.store.outcome import Cancelled, Failed, GivenBack, Outcome, Retried, Snoozed, Succeeded
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import task_backends, task_started
from django_pglock.tasks.options import Group
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.capacity import Slot
from django_pglock.worker.child.event_loop import EventLoop
from django_pglock.worker.child.in_flight import EndedClaim, InFlight
from django_pglock.worker.child.logs import send
from django_pglock.worker.child.run import end_by_error, prepare, run
from django_pglock.worker.child.stoppable import StoppableAttempt, stack_text
from django_pglock.worker.child.task_connections import (
    CHECK_INTERVAL,
    close_unkept_connections,
    is_kept,
    prepare_connections,
    renew_connections,
    wait_for_claim,
)
from django_pglock.worker.child.watchdog import Watchdog

logger = get_logger(WORKER)

#: Seconds after which the process ends if it could begin no task in this time.
LONGEST_UNABLE = 30.0


class Executor:
    """Runs the claims of the inboxes, and puts ended claims into the outbox."""

    def __init__(self, in_flight: InFlight, using: str, watchdog: Watchdog) -> None:
        self.in_flight = in_flight
        self.using = using
        self.loop = EventLoop(in_flight, using, watchdog)
        self.watchdog = watchdog
        self._is_started = False
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name=f"lockworker-thread-{number}", daemon=True)
            for number, slot in enumerate(in_flight.threads.slots, start=1)
        ]
        in_flight.coroutines.on_first = self._start_async

    def start(self) -> None:
        """Start the threads. The event loop and the thread before it start with the first async task."""
        for thread in self._threads:
            thread.start()
        self._is_started = True

    def _start_async(self) -> None:
        """Start the thread that prepares coroutines: to read earlier attempts would block the event loop."""
        thread = threading.Thread(target=self._start_coroutines, name="lockworker-async-starter", daemon=True)
        # If there is no thread for it, one is missing, so the process is replaced, and the claims are given back.
        with contextlib.suppress(RuntimeError):
            thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        """Make each thread end after its present task."""
        self._stopping.set()
        for _ in self.in_flight.threads.slots:
            self.in_flight.threads.inbox.put(None)
        self.in_flight.coroutines.inbox.put(None)

    @property
    def is_missing(self) -> bool:
        """Whether a thread has ended although the executor was not stopped."""
        ended = any(not thread.is_alive() for thread in self._threads)
        return self._is_started and (ended or self.loop.is_missing) and not self._stopping.is_set()

    @property
    def is_unable(self) -> bool:
        """Whether the process cannot begin tasks. Another one may have the memory, threads or sessions for them."""
        return self.in_flight.unable_for > LONGEST_UNABLE and not self._stopping.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until only long overdue attempts run. Return whether this is the case."""
        deadline = time.monotonic() + timeout
        given_up = self._long_overdue()
        their_threads = {each.ident for each in self.watchdog.task_threads if each.attempt in given_up}
        awaited = [thread for thread in self._threads if thread.ident is not None and thread.ident not in their_threads]
        for thread in awaited:
            thread.join(max(0.0, deadline - time.monotonic()))
        is_idle = not any(thread.is_alive() for thread in awaited)
        coroutines = len(given_up) - len(their_threads)
        return self.in_flight.coroutines.wait(max(0.0, deadline - time.monotonic()), besides=coroutines) and is_idle

    def _long_overdue(self) -> list[StoppableAttempt]:
        return [attempt for attempt in self.watchdog.overdue if attempt.is_long_overdue]

    def end_overdue(self, delay: float) -> list[Attempt]:
        """End the attempts whose time is over, and return them. Those that are retried wait ``delay`` seconds at least.

        By then this process has ended. Otherwise a function could run twice at the same time.
        """
        overdue = [attempt for attempt in self.watchdog.overdue if isinstance(attempt, Attempt)]
        for attempt in overdue:
            ended = attempt.ended(attempt.failure(attempt.timed_out()))
            for each in (ended, *ended.same_call):
                if isinstance(each.outcome, Retried):
                    each.outcome = replace(each.outcome, delay=max(delay, each.outcome.delay))
            self.in_flight.end(ended)
        return overdue

    def abandon_running(self, delay: float, *, except_for: Sequence[Attempt]) -> None:
        """Have other workers run the running tasks in ``delay`` seconds. By then this process has ended."""
        ended = {claim for attempt in except_for for claim in attempt.claims}
        running = [claim for claim in self.in_flight.claims.values() if claim not in ended]
        logger.warning("The grace period is over. Giving up %s.", ", ".join(map(str, running)))
        self.in_flight.abandon(running, delay)

    def cancel(self, requests: Iterable[tuple[int, int]]) -> None:
        """Cancel claims, by id and attempt: they do not begin, or are stopped. May be called several times."""
        for request in requests:
            if (claim := self.in_flight.claims.get(request)) is not None:
                claim.is_cancelled = True
                self._stop_claim(claim)

    def _stop_claim(self, claim: Claim) -> None:
        for thread in self.watchdog.task_threads:
            attempt = thread.attempt
            if attempt is not None and claim in attempt.claims and attempt.is_cancelled:
                thread.stop(attempt)
        self.loop.cancel(claim)

    def stack_of(self, request: tuple[int, int]) -> str:
        """Return the stack of a running task, by id and attempt; empty if no thread and no coroutine runs it."""
        claim = self.in_flight.claims.get(request)
        if claim is None:
            return ""
        with stacks() as innermost:
            for thread in self.watchdog.task_threads:
                attempt = thread.attempt
                if thread.claim is claim or (attempt is not None and claim in attempt.claims):
                    return stack_text(innermost.get(thread.ident))
            return self.loop.stack_of(claim, innermost)

    # The threads

    def _work(self, slot: Slot) -> None:
        threads = self.in_flight.threads
        self._execute_all(partial(threads.next, slot, wait_for_claim), partial(threads.free, slot))

    def _start_coroutines(self) -> None:
        coroutines = self.in_flight.coroutines

        self._execute_all(
            partial(coroutines.next, wait_for_claim), lambda _cost: coroutines.free(), are_coroutines=True
        )

    def _execute_all(
        self,
        next_claim: Callable[[], Claim | None],
        free: Callable[[float | None], None],
        *,
        are_coroutines: bool = False,
    ) -> None:
        """Execute claims until ``next_claim`` returns None.

        Call ``free`` after each claim that has ended here, with its seconds, or with None if they do not count. With
        ``are_coroutines``, the event loop ends the claims that begin.
        """
        checked_at = 0.0
        prepare_connections()
        thread = self.watchdog.watch_this_thread()
        begin = self.loop.run if are_coroutines else partial(run, call=thread.call)
        clean = clean_context()
        keeps_all = all(map(is_kept, connections.settings.values()))
        try:
            while (claim := next_claim()) is not None:
                began = time.perf_counter()
                if began - checked_at > CHECK_INTERVAL:
                    renew_connections(self.using)
                    checked_at = began
                # Coroutines inherit the context of this thread, because the loop is called with the caller's context.
                thread.claim = claim
                ended = clean.copy().run(execute, claim, self.using, self.in_flight, begin)
                thread.claim = None
                thread.clean_up(claim)
                if not keeps_all:
                    close_unkept_connections()
                if ended is None:
                    continue
                cost: float | None = time.perf_counter() - began
                if not isinstance(ended.outcome, Succeeded):
                    checked_at = 0.0
                if isinstance(ended.outcome, GivenBack):
                    # Without a pause this thread would take and give back tasks faster than others can run them.
                    self._stopping.wait(self.in_flight.note_unable())
                    # The time of a claim that could not begin is not the cost of a task.
                    cost = None
                else:
                    self.in_flight.note_able()
                self.in_flight.end(ended)
                free(cost)
        finally:
            connections.close_all()


def execute(
    claim: Claim, using: str, in_flight: InFlight, begin: Callable[[Attempt], EndedClaim | None]
) -> EndedClaim | None:
    """Run one claim to its end. ``begin`` runs its attempt, or returns None if the event loop ends it."""
    attempt: Attempt | EndedClaim | None = None
    try:
        attempt = prepare(claim, using)
        if isinstance(attempt, Attempt) and attempt.definition.group is not None:
            attempt = _with_others(attempt, attempt.definition.group, in_flight)
        if isinstance(attempt, EndedClaim):
            return attempt
        if attempt.has_observers:
            send(task_started, claim, attempt.result)
        return begin(attempt)
    except BaseException as error:  # noqa: BLE001 - see the top of run.py
        if isinstance(attempt, Attempt):
            return end_by_error(attempt.claims, using, error, has_begun=attempt.was_called)
        return end_by_error([claim], using, error, has_begun=False)


def _with_others(attempt: Attempt, group: Group, in_flight: InFlight) -> Attempt | EndedClaim:
    try:
        return with_others(attempt, group, in_flight)
    except DatabaseFailure:
        logger.warning("The group of %s cannot be read. Its tasks are given back.", attempt.claim, exc_info=True)
        return EndedClaim(attempt.claim, GivenBack())


def clean_context() -> Context:
    """Return the context of this thread. Each task gets a copy, so that it does not see the variables of earlier tasks.

    Django keeps caches and task backends in a context variable, and makes each of them at its first use. They are made
    here. Otherwise each task would make its own, and would open its own connections.
    """
    for handler in (caches, task_backends):
        # If a cache or backend cannot be made, the error is raised where it is used.
        with contextlib.suppress(Exception):
            handler.all()
    return copy_context()


class GroupAttempt(Attempt):
    """One attempt for several claims. The function gets the list of their keyword arguments.

    Its return value is the result of each claim. If it raises, each claim fails or is retried by its own retries.
    """

    def __init__(self, claim: Claim, using: str) -> None:
        super().__init__(claim, using)
        self.others: list[Attempt] = []
        self._error: BaseException | None = None

    def include(self, others: list[Attempt]) -> None:
        """Add the claims of these attempts."""
        self.others = others
        self.args, self.kwargs = [[self.kwargs, *(other.kwargs for other in others)]], {}

    @property
    def claims(self) -> list[Claim]:
        return [self.claim, *(other.claim for other in self.others)]

    @property
    def is_cancelled(self) -> bool:
        """Whether all of its tasks are cancelled. The cancel of one task does not end the common call."""
        return all(claim.is_cancelled for claim in self.claims)

    def failure(self, error: BaseException) -> Outcome:
        self._error = error
        for other in self.others:
            other.timeout, other.deadline = self.timeout, self.deadline
        return super().failure(error)

    def outcomes(self, outcome: Outcome) -> list[tuple[Claim, Outcome]]:
        return [(self.claim, outcome), *((other.claim, self._outcome_of(other, outcome)) for other in self.others)]

    def ended(self, outcome: Outcome | None, *, is_settled: bool = False) -> EndedClaim:
        ended = super().ended(outcome, is_settled=is_settled)
        # If a claim was lost, the common transaction was rolled back. The first claim is reported as lost, and the
        # other tasks run again.
        shared = GivenBack() if outcome is None else outcome
        for other in self.others:
            other.began, other.logs = self.began, self.logs
        ended.same_call = [other.ended(self._outcome_of(other, shared), is_settled=is_settled) for other in self.others]
        return ended

    def _outcome_of(self, other: Attempt, outcome: Outcome) -> Outcome:
        if self._error is not None and isinstance(outcome, Failed | Retried | Snoozed | Cancelled):
            return other.failure(self._error)
        return outcome


def with_others(first: Attempt, group: Group, in_flight: InFlight) -> Attempt:
    """Claim the waiting tasks of the group of ``first``. Return the attempt for all of them."""
    # Made before the claim. So if earlier attempts cannot be read, only the first claim has to be given back.
    attempt = GroupAttempt(first.claim, first.using)
    in_flight.claiming_groups[first.claim] = first.claim.lock_key
    try:
        claims = []
        if group.limit > 1:
            claims = claim_group(first.using, first.claim, limit=group.limit - 1, gather=group.seconds)
        connection = connection_for(first.using)
        if claims and has_manual_transaction(connection):
            # With AUTOCOMMIT off, otherwise the function would commit the claims or roll them back.
            connection.commit()
        in_flight.add(claims)
    except BaseException:
        in_flight.answer_lost_at = time.monotonic()
        raise
    finally:
        del in_flight.claiming_groups[first.claim]
    others: list[Attempt] = []
    for claim in claims:
        other = prepare(claim, first.using)
        if isinstance(other, EndedClaim):
            in_flight.end(other)
        else:
            others.append(other)
    attempt.include(others)
    return attempt
