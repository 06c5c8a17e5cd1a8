"""The threads that run tasks, and the thread that starts coroutines on the event loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial

from django.core.cache import caches
from django.db import connections

from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import connection_for, has_manual_transaction
from django_pglock.store.admit import admit
from django_pglock.store.claim import claim_group
from django_pglock.store.outcome import Retried, Succeeded
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import task_backends, task_started
from django_pglock.tasks.options import Group
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.event_loop import EventLoop
from django_pglock.worker.child.in_flight import EndedClaim, InFlight, Slot
from django_pglock.worker.child.logs import send
from django_pglock.worker.child.run import end_by_error, prepare, run
from django_pglock.worker.child.runners import TaskThread, Watchdog, stacks, stop
from django_pglock.worker.child.task_connections import (
    CHECK_INTERVAL,
    close_unkept_connections,
    ends_transactions_of,
    is_kept,
    prepare_connections,
    renew_connections,
    wait_for_call,
)

logger = get_logger(WORKER)


class Executor:
    """Runs the claims of the inboxes, and puts ended claims into the outbox."""

    def __init__(self, in_flight: InFlight, using: str, watchdog: Watchdog) -> None:
        self.in_flight = in_flight
        self.using = using
        self.loop = EventLoop(in_flight, using, watchdog)
        self.watchdog = watchdog
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        in_flight.coroutines.on_first = self._start_async

    def start(self) -> None:
        """Start the threads. The event loop and the thread before it start with the first async task."""
        for number, slot in enumerate(self.in_flight.threads.slots, start=1):
            thread = threading.Thread(target=self._work, args=[slot], name=f"lockworker-thread-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

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
        return (ended or self.loop.is_missing) and not self._stopping.is_set()

    @property
    def is_idle(self) -> bool:
        """Whether, after ``stop()``, at most attempts run that do not end although their time is over."""
        given_up = [runner for runner, attempt in self.watchdog.running() if attempt.is_long_overdue]
        threads = {each.ident for each in given_up if isinstance(each, TaskThread)}
        coroutines = self.in_flight.coroutines.running - (len(given_up) - len(threads))
        return coroutines <= 0 and not any(each.is_alive() and each.ident not in threads for each in self._threads)

    def give_up(self, delay: float) -> bool:
        """End the claims that are still in flight. Return whether there are none.

        Attempts whose time is over have failed. The others are abandoned: other workers run them in ``delay`` seconds.
        By then this process has ended. Otherwise a function could run twice at the same time.
        """
        overdue = [attempt for _, attempt in self.watchdog.running() if attempt.is_overdue]
        for attempt in overdue:
            ended = attempt.ended(attempt.failure(attempt.timed_out()))
            for each in (ended, *ended.same_call):
                if isinstance(each.outcome, Retried):
                    each.outcome = replace(each.outcome, delay=max(delay, each.outcome.delay))
            self.in_flight.end(ended)
        have_ended = self.is_idle
        if not have_ended:
            of_overdue = {claim for attempt in overdue for claim in attempt.claims}
            running = [claim for claim in self.in_flight.claims.values() if claim not in of_overdue]
            logger.warning("The grace period is over. Giving up %s.", ", ".join(map(str, running)))
            self.in_flight.abandon(running, delay)
        # Those of this thread, which a backoff of the project has opened.
        connections.close_all()
        return have_ended and not overdue

    def cancel(self, requests: Iterable[tuple[int, int]]) -> None:
        """Cancel claims, by id and attempt: they do not begin, or are stopped. May be called several times."""
        for request in requests:
            if (claim := self.in_flight.claims.get(request)) is not None:
                claim.is_cancelled = True
        for runner, attempt in self.watchdog.running():
            if attempt.is_cancelled:
                stop(runner, attempt)

    def stack_of(self, request: tuple[int, int]) -> str:
        """Return the stack of a running task, by id and attempt; empty if no thread and no coroutine runs it."""
        claim = self.in_flight.claims.get(request)
        return self.stack_of_claim(claim) if claim is not None else ""

    def stack_of_claim(self, claim: Claim) -> str:
        """Do the same for a claim, which may have ended while a call of its coroutine still runs."""
        runners = [*self.watchdog.runners, *filter(None, [self.loop.orm.runner])]
        with stacks() as innermost:
            return next((each.stack(innermost) for each in runners if each.runs(claim)), "")

    # The threads

    def _work(self, slot: Slot) -> None:
        threads = self.in_flight.threads
        self._execute_all(partial(threads.next, slot, wait_for_call), partial(threads.free, slot))

    def _start_coroutines(self) -> None:
        coroutines = self.in_flight.coroutines
        self.loop.start()
        self._execute_all(
            partial(wait_for_call, coroutines.inbox), lambda _cost: coroutines.free(), are_coroutines=True
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
        begin = self.loop.run if are_coroutines else partial(run, runner=thread)
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
                cost = time.perf_counter() - began
                if not isinstance(ended.outcome, Succeeded):
                    checked_at = 0.0
                if pause := self.in_flight.pause_after(ended):
                    self._stopping.wait(pause)
                self.in_flight.end(ended)
                # The time of a claim that could not begin is not the cost of a task.
                free(None if pause else cost)
        finally:
            connections.close_all()


def execute(
    claim: Claim, using: str, in_flight: InFlight, begin: Callable[[Attempt], EndedClaim | None]
) -> EndedClaim | None:
    """Run one claim to its end. ``begin`` runs its attempt, or returns None if the event loop ends it."""
    attempt: Attempt | EndedClaim | None = None
    try:
        attempt = prepare(claim, using)
        if isinstance(attempt, EndedClaim):
            return attempt
        if attempt.definition.group is not None:
            include_others(attempt, attempt.definition.group, in_flight)
        if attempt.has_observers:
            with ends_transactions_of("task_started"):
                send(task_started, claim, attempt.result)
        return begin(attempt)
    except BaseException as error:  # noqa: BLE001 - see attempt.py
        if isinstance(attempt, Attempt):
            return end_by_error(attempt.claims, using, error, has_begun=attempt.began is not None)
        return end_by_error([claim], using, error, has_begun=False)


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


def include_others(first: Attempt, group: Group, in_flight: InFlight) -> None:
    """Claim the waiting tasks of the group of ``first``, and make it the attempt for all of them."""
    in_flight.claiming_groups[first.claim] = first.claim.lock_key
    try:
        claims = []
        if group.limit > 1:
            claims = claim_group(first.using, first.claim, limit=group.limit - 1, gather=group.seconds)
        commit_own(first.using)
        in_flight.add(claims)
    except BaseException:
        in_flight.changed_at = time.monotonic()
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
    first.include(others)
    if group.concurrency > 1:
        # Another run may begin beside this one, with the tasks that are left.
        admit(first.using, [first.claim.lock_key])
        commit_own(first.using)


def commit_own(using: str) -> None:
    """With AUTOCOMMIT off, commit our own statements. Otherwise the function would commit them or roll them back."""
    connection = connection_for(using)
    if has_manual_transaction(connection):
        connection.commit()
