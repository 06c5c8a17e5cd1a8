"""Runs enqueued tasks in the calling thread, on the way that they take in a child: claim, attempt, settle.

In a ``TestCase`` all of this is part of the test's transaction. Each task runs in a savepoint, which is rolled back if
the task has broken the transaction. After each task, the hooks of the commit run: those that admit to keys, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.asyncio import async_unsafe
from psycopg.pq import TransactionStatus

from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import connection_for, in_test_case, in_transaction, transaction_status
from django_pglock.postgres.stopping import stopping_wrapper
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.liveness import alive
from django_pglock.store.outcome import Failed, Retried
from django_pglock.store.rate import open_rates
from django_pglock.store.ready import paused_queues
from django_pglock.store.release import promote
from django_pglock.store.statements import rows_of
from django_pglock.tasks import registry
from django_pglock.tasks.backends import database_of_tasks, require_tasks
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import TaskResult, task_backends
from django_pglock.tasks.retry import FlowWord
from django_pglock.tasks.states import WAITING, TaskStatus
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.claimer import ALL, Claimer
from django_pglock.worker.child.executor import execute
from django_pglock.worker.child.in_flight import EndedClaim, InFlight
from django_pglock.worker.child.logs import observers
from django_pglock.worker.child.run import run as run_attempt
from django_pglock.worker.child.run import run_async
from django_pglock.worker.child.runners import Runner, TaskThread, Watchdog
from django_pglock.worker.child.settler import Settler
from django_pglock.worker.queues import Queues

logger = get_logger(WORKER)

#: The worker of these claims. It has no row. The context of ``task.call()`` has the same one.
NO_WORKER = UUID(int=0)
#: The attribute of a connection with the test that was the last one to run hooks.
_LAST_TEST = "_django_pglock_last_test"
#: Exceptions with which the function of a task may fail. All others, such as Ctrl-C, are for the test or its runner.
OF_FUNCTIONS = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)


@dataclass(frozen=True)
class TaskRun:
    """One attempt that ``run_tasks()`` has run.

    ``outcome`` is ``"succeeded"``, ``"failed"``, ``"retried"``, ``"snoozed"`` or ``"cancelled"``; ``"lost"`` if the
    task was reset or deleted meanwhile. ``exception`` is what the function has raised, if this was not a ``Snooze``.
    ``attempt`` is the number of the attempt.
    """

    task_id: int
    task_path: str
    attempt: int
    outcome: str
    exception: BaseException | None
    backend: str

    @property
    def result(self) -> TaskResult[..., Any]:
        """The ``TaskResult`` of the task, as it is now."""
        return task_backends[self.backend].get_result(str(self.task_id))


@async_unsafe("run_tasks() blocks the event loop here. Write: await sync_to_async(run_tasks)()")
def run_tasks(
    queue: str | Sequence[str] | None = None,
    *,
    until: Literal["idle", "due"] = "idle",
    raise_errors: bool = False,
    limit: int = 1000,
    using: str | None = None,
) -> list[TaskRun]:
    """Run the enqueued tasks in this thread, as a worker would, and return what ran, in order.

    It also works in a ``TestCase`` and with pytest's ``db``. There it first calls the functions of
    ``transaction.on_commit()``, also those of the test itself, and again after each task.

    ``queue`` is the queue to serve, a prefix with ``*``, or a list of these (None: all). With ``until="idle"``,
    retries, snoozes and tasks that are scheduled for later run as well, in the order of their dates, without a wait.
    With ``until="due"``, only tasks run that are due now or become ready because of them. ``raise_errors`` raises the
    first exception of a function, also if the task would be retried, but not ``Retry``, ``Snooze`` and ``Cancel``.

    Raises ``RuntimeError`` when ``limit`` attempts have run and tasks are left, because snoozes and tasks that enqueue
    the next one may have no end. Raises ``ConfigurationError`` inside of ``atomic()``, because no worker would see the
    tasks of an open transaction, and outside of a ``TestCase`` if a worker runs on the database.
    """
    if until not in ("idle", "due"):
        raise ValueError(f'until={until!r} is not possible; use "idle" or "due".')
    alias = database_of_tasks(option="using=") if using is None else using
    require_tasks(alias)
    _check_transaction(alias)
    queues = Queues([queue] if isinstance(queue, str) else queue or ())
    return copy_context().run(_run, Here(alias, queues), until=until, raise_errors=raise_errors, limit=limit)


def _run(here: Here, *, until: str, raise_errors: bool, limit: int) -> list[TaskRun]:
    runs: list[TaskRun] = []
    with here.prepared():
        here.promote()
        while (claim := here.claim()) or (until == "idle" and here.advance()):
            if claim is None:
                continue
            if len(runs) >= limit:
                here.give_back(claim)
                raise RuntimeError(
                    f"run_tasks() has run {limit} attempts, and {claim} would follow. If such tasks come to an end, "
                    "give a higher limit=. If they snooze or enqueue themselves without end, let the test end them; "
                    "until='due' runs no task that has snoozed."
                )
            ended = here.run(claim)
            runs += map(_task_run, (ended, *ended.same_call))
            if (error := _error_of(ended, raise_errors=raise_errors)) is not None:
                raise error
    return runs


def _check_transaction(using: str) -> None:
    connection = connection_for(using)
    if in_transaction(connection):
        raise ConfigurationError(
            f"run_tasks() was called inside of a transaction on database {using!r}. A worker would see no task of it. "
            "Call run_tasks() after the end of the atomic() block."
        )
    if not in_test_case(connection) and (worker := alive(rows_of("Worker", using)).first()) is not None:
        # It would take back the claims, because their worker has no row.
        raise ConfigurationError(
            f"Worker {worker.name} runs the tasks of database {using!r}. Stop it before you call run_tasks()."
        )


def _task_run(ended: EndedClaim) -> TaskRun:
    claim, failure = ended.claim, getattr(ended.outcome, "failure", None)
    return TaskRun(
        task_id=claim.id,
        task_path=claim.task_path,
        attempt=claim.number,
        outcome="lost" if ended.outcome is None else type(ended.outcome).__name__.lower(),
        exception=failure and failure.exception,
        backend=claim.backend,
    )


def _error_of(ended: EndedClaim, *, raise_errors: bool) -> BaseException | None:
    """Return the exception to raise; None: continue."""
    error = _task_run(ended).exception
    if error is None or not isinstance(error, OF_FUNCTIONS):
        return error
    is_wanted = isinstance(ended.outcome, Failed) or (
        isinstance(ended.outcome, Retried) and not isinstance(error, FlowWord)
    )
    return error if raise_errors and is_wanted else None


class Here:
    """What the parts of a child are for ``run_tasks()``: claims one task after the other, runs it, and settles it."""

    def __init__(self, using: str, queues: Queues) -> None:
        self.using = using
        self.queues = queues
        self.in_flight = InFlight(1)
        self.settler = Settler(self.in_flight, using)
        self.settler.use_connection_of_thread()
        # It does not wait for more outcomes.
        self.settler.stopping.set()
        self.thread = TaskThread(Watchdog())
        # By this clock, each claim comes long after the one before. So it begins at the start of its queue, and finds
        # what the last task has enqueued.
        self._claimer = Claimer(using, NO_WORKER, queues, clock=count(0, 1000).__next__)
        self._known = -1

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Prepare the connections of this thread for tasks, and leave them as they were."""
        each: Any
        with contextlib.ExitStack() as wrappers:
            for each in connections.all(initialized_only=True):
                wrappers.enter_context(each.execute_wrapper(stopping_wrapper))
                if each.connection is not None and not each.in_atomic_block:
                    self.thread.add(each)
            try:
                self.settler.connected()
                self._run_hooks()
                yield
            finally:
                self.thread.leave()
                if transaction_status(connection_for(self.using)) != TransactionStatus.INERROR:
                    self.settler.flush()

    def promote(self) -> None:
        """Make all tasks ready that are due, also those that another program has written by a plain INSERT."""
        while promote(self.using):
            pass
        admit(self.using, [*open_rates(self.using), *blocked_keys(self.using, "")])
        self._run_hooks()

    def claim(self) -> Claim | None:
        """Claim the next task; None: no task is ready that could run here."""
        if claims := self._claimer.claim(ALL, 1):
            self.in_flight.add(claims)
            return claims[0]
        return self.claim() if self._claimer.was_ready and self._claimer.search() else None

    def advance(self) -> bool:
        """Make the next scheduled task due. Without one, the next token of a rate. Return whether there was any."""
        tasks = rows_of("Task", self.using)
        waiting = tasks.filter(status__in=WAITING, task_path__in=registry.known_paths())
        queues = set(filter(self.queues.serves, waiting.order_by().values_list("queue", flat=True).distinct()))
        waiting = waiting.filter(queue__in=queues - paused_queues(self.using).keys())
        scheduled = waiting.filter(status=TaskStatus.SCHEDULED).order_by("run_after", "pk").first()
        if scheduled is not None:
            # A wait for an event ends by its timeout, and one for other code as well.
            waits = rows_of("Step", self.using).filter(task=scheduled.pk, finished_at=None)
            waits.update(started_at=F("started_at") - (scheduled.run_after - timezone.now()))
            is_due = bool(tasks.filter(pk=scheduled.pk).run_now())
            self._run_hooks()
            return is_due
        blocked = waiting.filter(status=TaskStatus.BLOCKED).values("lock_key")
        bucket = rows_of("RateLimit", self.using).filter(opens_at__isnull=False, pk__in=blocked).order_by("opens_at")
        return any(self._open_rate(each.key) for each in bucket[:1])

    def _open_rate(self, key: str) -> bool:
        """Let the bucket of a key be as full as it will be when its next token is due. Return whether a task got it."""
        bucket = rows_of("RateLimit", self.using).filter(pk=key)
        bucket.update(arrives_at=F("arrives_at") - (F("opens_at") - Now()), opens_at=None)
        return bool(admit(self.using, [key]))

    def run(self, claim: Claim) -> EndedClaim:
        """Run one claim, and settle it."""
        observers.checked_at = -math.inf
        ended = copy_context().run(execute, claim, self.using, self.in_flight, self._begin)
        assert ended is not None  # noqa: S101 - for the type checker
        self.thread.clean_up(claim)
        self.in_flight.end(ended)
        lost = self.settler.lost
        self._settle()
        if self.settler.lost > lost:
            for each in (ended, *ended.same_call):
                each.outcome = None
        return ended

    def give_back(self, claim: Claim) -> None:
        """Give back a claim that is not to run."""
        self.in_flight.give_back(claim)
        self._settle()

    def _begin(self, attempt: Attempt) -> EndedClaim:
        with contextlib.ExitStack() as savepoints:
            for each in _test_cases():
                savepoints.enter_context(_savepoint(each))
            if registry.is_async(attempt.claim.task_path):
                return async_to_sync(run_async)(attempt, Runner(CancelInTime()))
            return run_attempt(attempt, self.thread)

    def _settle(self) -> None:
        while self.in_flight.claims:
            self.settler.run_once()
        self._run_hooks()

    def _run_hooks(self) -> None:
        for each in _test_cases():
            _run_hooks(each)


class CancelInTime(Watchdog):
    """Cancels the current coroutine at the deadline of its attempt."""

    def watch(self, attempt: Attempt) -> None:
        me: Any = asyncio.current_task()
        asyncio.get_running_loop().call_at(attempt.deadline, me.cancel)


def _test_cases() -> list[Any]:
    """Return the connections on which the only open transaction is that of a ``TestCase``."""
    initialized: Sequence[Any] = connections.all(initialized_only=True)
    return [each for each in initialized if in_test_case(each)]


@contextlib.contextmanager
def _savepoint(connection: Any) -> Iterator[None]:
    """Roll back to here if the block breaks the transaction of the test, and keep its session open.

    A worker commits each statement of a function that is not atomic, so all other changes stay.
    """
    savepoint = transaction.atomic(using=connection.alias)
    # So that functions with durable=True run, and locks are what they are in the test itself.
    savepoint._from_testcase = True
    with savepoint, _kept_open(connection):
        yield
        if connection.vendor == "postgresql" and transaction_status(connection) == TransactionStatus.INERROR:
            connection.needs_rollback = True


@contextlib.contextmanager
def _kept_open(connection: Any) -> Iterator[None]:
    """Do not close the session for a function that calls ``close()``. If it does so in ``atomic()``, roll that back."""

    def close() -> None:
        if not in_test_case(connection):
            connection.needs_rollback = True

    kept = {"close": connection.__dict__["close"]} if "close" in connection.__dict__ else {}
    connection.close = close
    try:
        yield
    finally:
        del connection.close
        connection.__dict__.update(kept)


def _run_hooks(connection: Any) -> None:
    """Run the hooks of the commit, as ``captureOnCommitCallbacks(execute=True)`` does, and leave a stand-in for each.

    A test may call ``run_tasks()`` in such a block, which finds its own hooks by their places in the list. Hooks of
    ``setUpTestData()`` stay, because what they do is rolled back with the first test. Each test runs them once.
    """
    # Each test is a savepoint in the transaction of its class.
    test = connection.savepoint_ids[-1] if connection.savepoint_ids else None
    is_first, connection.__dict__[_LAST_TEST] = connection.__dict__.get(_LAST_TEST) != test, test
    place = 0
    while place < len(connection.run_on_commit):
        savepoints, hook, is_robust = connection.run_on_commit[place]
        is_of_class = test is not None and test not in savepoints
        if not is_of_class:
            connection.run_on_commit[place] = (savepoints, _has_run, is_robust)
        place += 1
        if is_of_class and not is_first:
            continue
        try:
            hook()
        except Exception:
            if not is_robust:
                raise
            logger.exception("A hook of the commit raised an error.")


def _has_run() -> None:
    """Stand for a hook that has run."""
