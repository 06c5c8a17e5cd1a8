"""The verbs of tasks: enqueue, claim, settle, promote, rescue, retry, cancel, reset.

Each is one guarded statement: it names the statuses it may start from and changes no row that is elsewhere. Nobody
reads a status, thinks, and writes it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from django.db import DataError, IntegrityError, connections, models, transaction
from django.db.models import Case, Exists, F, OuterRef, Q, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce, Now
from psycopg.errors import DivisionByZero

from django_pglock.conf import get_settings
from django_pglock.errors import ClaimLost
from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.postgres.message import literals, send
from django_pglock.store import plans, statements
from django_pglock.store import wake as wakeup
from django_pglock.store.admit import array_of_numbers, claim_columns
from django_pglock.store.claim_manager import ClaimStatement
from django_pglock.store.count import CountQuerySet
from django_pglock.store.liveness import LATE, MISSING, SETTLED
from django_pglock.store.outcome import Abandoned, Cancelled, Failed, Interrupted, Outcome, Retried, Snoozed, Succeeded
from django_pglock.store.prune import WINDOW
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.states import FINISHED, TaskStatus, UniqueScope, sources_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: Where a task waits when it is due: for a worker, or first for its key.
WAITS = Case(When(lock_key__isnull=True, then=Value(TaskStatus.READY.value)), default=Value(TaskStatus.BLOCKED.value))
#: No second such task with the same unique key. Also the condition of the index of these keys: what says the same in
#: other words does not use it.
HAS_UNIQUE_KEY = (
    Q(unique_scope=UniqueScope.WAITING, attempts=0, finished_at__isnull=True)
    | Q(unique_scope=UniqueScope.UNFINISHED, finished_at__isnull=True)
    | Q(unique_scope=UniqueScope.PERIOD)
)
#: Rows of one statement that knows them by an array and a join: the planner may compare each with each.
COMPARED_AT_ONCE = 200
LOST_WITH_WORKER = "django_pglock.errors.WorkerLost"


@dataclass(frozen=True, slots=True)
class Rescued:
    """A claim that was taken back from a dead worker.

    ``status`` is READY or BLOCKED, FAILED after too many rescues, or CANCELLED if somebody had asked for that.
    """

    id: int
    attempt: int
    worker: UUID
    status: str
    queue: str
    task_path: str
    lock_key: str | None


class UnknownTasks(NamedTuple):
    """Ready tasks of one function and queue that no living worker can run: how many were seen, and since when."""

    task_path: str
    queue: str
    waiting: int
    oldest: datetime


class TaskQuerySet(CountQuerySet):
    """Tasks, and what may happen to them."""

    # Sets of tasks

    def ready(self) -> TaskQuerySet:
        """Tasks that can be claimed now, in the order in which they run: priority, then first come, first served."""
        return self.filter(status=TaskStatus.READY).order_by("-priority", "id")

    def due(self) -> TaskQuerySet:
        """Scheduled tasks whose time has come, the longest overdue first."""
        return self.filter(status=TaskStatus.SCHEDULED, run_after__lte=Now()).order_by("run_after", "id")

    def stuck(self) -> TaskQuerySet:
        """Running tasks whose worker gave no sign of life for the hard limit, or is not known at all."""
        worker = self.model._meta.apps.get_model("django_pglock", "Worker")
        alive = worker.objects.using(self.db).alive().filter(pk=OuterRef("worker"))
        return self.filter(~Exists(alive), status=TaskStatus.RUNNING)

    # Claim and settle: the worker's verbs

    def prepare_session(self) -> None:
        """Have the claims of this session be planned once, by their index, whatever the statistics say."""
        plans.keep_plans(connection_for(self.db))

    def claim_statement(
        self, *, worker: UUID, paths: Sequence[str], behind: bool = False, backend: str | None = None
    ) -> ClaimStatement:
        """Return the statement that claims tasks of a queue for a worker, among the functions it knows.

        ``backend``: the alias in TASKS that the tasks have to be enqueued with; None: any.

        The name of the queue is to be filled in. With ``behind``, also two numbers: only tasks of that priority are
        claimed which were enqueued after the task of that id.
        """
        queue, priority, id_, _ = ClaimStatement.HOLES
        # Django has no SQL for an empty list. No function has an empty path.
        claimable = self.ready().filter(queue=queue, task_path__in=paths or [""], fair_key__isnull=True)
        if behind:
            claimable = claimable.filter(priority=priority, id__gt=id_)
        if backend is not None:
            claimable = claimable.filter(backend=backend)
        paused = self.model._meta.apps.get_model("django_pglock", "Queue").objects.paused().filter(name=queue)
        changes = {
            "status": TaskStatus.RUNNING,
            "attempts": F("attempts") + 1,
            "worker": worker,
            "started_at": Coalesce("started_at", Now()),
            "last_attempted_at": Now(),
        }
        returning = claim_columns(connections[self.db].ops.quote_name)
        return ClaimStatement(claimable.filter(~Exists(paused)), changes, returning)

    def claim_fair(
        self, *, worker: UUID, queue: str, paths: Sequence[str], after: str, limit: int, backend: str | None = None
    ) -> tuple[list[Claim], str]:
        """Claim tasks whose keys take turns, beginning behind the key ``after``.

        Returns the claims, in the order in which they run, and the key behind which to go on; empty when nothing is
        behind these. There may be more also where this returns no claim: it looks at so many keys and no more.
        """
        here = (queue, list(paths), backend)
        walk = (after, queue, *here, queue, limit)
        rows = self._run(statements.CLAIM_FAIR, *walk, *here, limit, limit, worker, limit)
        claims = [Claim(id_, attempt, worker, *rest) for _, place, id_, attempt, *rest in rows if place is not None]
        return claims, rows[0][0]

    def claim_group(self, leader: Claim, *, limit: int, gather: float) -> list[Claim]:
        """Claim what waits in the group of a claimed task, for the same worker: ``limit`` at most.

        ``gather`` is the time in seconds for which tasks of the group are held back.
        """
        group = (leader.lock_key, leader.lock_key, leader.task_path)
        found = (*group, limit, *group, gather, limit, limit)
        values = (leader.id, leader.attempt, *found, leader.worker)
        rows = self._run_together((f"SELECT {statements.BY_INDEX}", ()), (statements.TAKE_ALONG, values))
        return sorted((Claim(id_, attempt, leader.worker, *rest) for id_, attempt, *rest in rows), key=attrgetter("id"))

    @staticmethod
    def claims_of(rows: Iterable[tuple[Any, ...]], worker: UUID) -> list[Claim]:
        """Return the claims that a claiming statement answered with, in the order in which they run."""
        claims = [Claim(id_, attempt, worker, *rest) for id_, attempt, *rest in rows]
        # Twice by one key each, which keeps what is equal in order and is done without a call of Python's.
        claims.sort(key=attrgetter("id"))
        claims.sort(key=attrgetter("priority"), reverse=True)
        return claims

    def settle(self, outcomes: Sequence[tuple[Claim, Outcome]], worker: UUID) -> dict[int, float | None]:
        """Write a batch of outcomes, guarded by their claims.

        Returns the ids that were accepted, with the date, in seconds since the epoch, of those that are finished. A
        claim that is missing in the answer was lost: somebody else has the task now, and its outcome had no effect.
        Fails when a row is locked for longer than a moment. Successes and others are two statements: give one kind
        where it matters that all or none are written.
        """
        outcomes = sorted(outcomes, key=_by_id)
        # By functions in C where it is about each of thousands.
        are_alike = {*map(type, map(itemgetter(1), outcomes))} == {Succeeded}
        successes = outcomes if are_alike else [pair for pair in outcomes if isinstance(pair[1], Succeeded)]
        others = [_columns(*pair) for pair in ([] if are_alike else outcomes) if not isinstance(pair[1], Succeeded)]
        accepted: dict[int, float | None] = {}
        if successes:
            accepted.update(self._run(statements.SETTLE_SUCCESSES, *_success_columns(successes)))
        if others:
            accepted.update(self._run(statements.SETTLE_OTHERS, *map(list, zip(*others, strict=True)), worker))
        return accepted

    def held(self, claims: Sequence[Claim]) -> set[int]:
        """Return the ids of those claims that cannot be settled now, because somebody has locked their rows."""
        ids, attempts = [claim.id for claim in claims], [claim.attempt for claim in claims]
        return {id_ for (id_,) in self._run(statements.HELD, ids, attempts)}

    def settle_and_commit(self, successes: Sequence[tuple[Claim, Succeeded]]) -> None:
        """Write successes as the last thing in the current transaction, and commit it, in one message.

        ``atomic()`` has nothing left to commit then, and goes on to what is to happen ``on_commit``. Raises
        ``ClaimLost`` when one claim is lost; nothing is committed then.
        """
        connection = connection_for(self.db)
        connection.ensure_connection()
        statement = self._sql(statements.SETTLE_OWN_SUCCESS)
        values = [(outcome.result, claim.id, claim.attempt) for claim, outcome in successes]
        bound = [statement % literals(connection, each) for each in values]
        try:
            send(connection, ";".join([*bound, "COMMIT"]))
        except DataError as error:
            if getattr(error.__cause__, "sqlstate", None) != DivisionByZero.sqlstate:
                raise
            raise ClaimLost("The task is no longer claimed by this attempt.") from error

    def server_time(self) -> str:
        """Return what the server's clock shows, as the server's text: so no setting of time zones changes it."""
        [(now,)] = self._run("SELECT clock_timestamp()::text")
        return str(now)

    def release_unknown(
        self,
        worker: UUID,
        in_hand: Iterable[int],
        *,
        older_than: float = 0.0,
        before: str | None = None,
        except_keys: Iterable[str] = (),
    ) -> int:
        """Give back what ``worker`` owns in the table but does not know of.

        If claimed over ``older_than`` seconds ago, and ``before`` a moment of ``server_time()`` (None: any), and not
        of a lock key that is one of ``except_keys``. Returns how many tasks that were.
        """
        values = (worker, list(in_hand), older_than, before, list(except_keys))
        released = self._run(statements.RELEASE_UNKNOWN, *values)
        self.admit(key for *_, key in released)
        self.release(id_ for id_, status, _ in released if status == TaskStatus.CANCELLED)
        return len(released)

    def cancel_requests(self, worker: UUID) -> list[tuple[int, int]]:
        """Return the claims of ``worker``, as ids and attempts, whose tasks somebody has asked to end."""
        return self._run(statements.CANCEL_REQUESTS, worker)

    def note_progress(self, claims: Sequence[Claim], *, is_last: bool = False) -> None:
        """Write what these running tasks have told of their progress. A claim that was lost is left out.

        So is a row that is locked, unless it ``is_last``: what the tasks tell before their end is written by the way.
        """
        claims = sorted(claims, key=attrgetter("id"))
        for start in range(0, len(claims), COMPARED_AT_ONCE):
            self._note_progress(claims[start : start + COMPARED_AT_ONCE], is_last=is_last)

    def _note_progress(self, claims: Sequence[Claim], *, is_last: bool) -> None:
        # Read once: the functions may be telling more at this moment.
        told = [claim.progress for claim in claims]
        statement = statements.NOTE_LAST_PROGRESS if is_last else statements.NOTE_PROGRESS
        noted = self._run(statement, [claim.id for claim in claims], [claim.attempt for claim in claims], told)
        for claim, progress in zip(claims, told, strict=True):
            if (claim.id,) in noted:
                claim.noted_progress = progress

    # Upkeep

    def promote(self, *, limit: int = 1000) -> int:
        """Move scheduled tasks that are due to READY, ``limit`` at most. Returns how many."""
        promoted = self.due()._mark(limit, {"status": WAITS}, "queue", "lock_key")
        self.wake(queue for queue, key in promoted if key is None)
        self.admit_on_commit({key for _, key in promoted})
        return len(promoted)

    def next_due_in(self) -> float | None:
        """Return the seconds until the next scheduled task is due, zero or less when it is, None when there is none."""
        [(seconds,)] = self._run(statements.NEXT_DUE)
        return None if seconds is None else float(seconds)

    def rescue(self, *, limit: int = COMPARED_AT_ONCE) -> list[Rescued]:
        """Take claims back from workers that are dead, ``limit`` at most, and return them.

        A rescued task is READY again and has not spent a retry. One that took its worker down more often than
        ``MAX_RESCUES`` ends FAILED, one that was asked to end CANCELLED.
        """
        settings = get_settings()
        most = settings.MAX_RESCUES
        text = "Its worker died, or gave no sign of life for too long, while it held this attempt."
        interval = settings.HEARTBEAT_INTERVAL
        beats = MISSING * interval
        # Early enough for what a frozen worker had to run elsewhere within the limit: upkeep looks once an interval.
        longest = max(beats, settings.HEARTBEAT_LIMIT - interval)
        values = (LATE * interval, SETTLED * interval, beats, longest, limit, most, LOST_WITH_WORKER, text)
        rescued = [Rescued(*row) for row in self._run(statements.RESCUE, *values)]
        self.wake(each.queue for each in rescued if each.status == TaskStatus.READY)
        self.admit_on_commit({each.lock_key for each in rescued})
        self.release_on_commit([each.id for each in rescued if each.status in FINISHED])
        return rescued

    # What a person may ask for

    def retry(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Make failed and cancelled tasks of this queryset READY again, with all their retries and snoozes.

        Returns how many.
        One that is to run after others waits again for those that have not succeeded. It is cancelled again if one of
        these has failed and is not retried with it.

        A unique one is left alone beside another that is there already; of several with one key, the last is taken.

        Outside of a transaction some thousands are moved at a time, each time by a transaction of its own: what has
        been done stays done. ``progress`` is called after each, with the number so far and the last id.
        """
        chosen = self._without_duplicates().filter(status__in=_movable(TaskStatus.READY, FINISHED)).order_by("pk")
        return self._by_windows(chosen, TaskQuerySet._retry, progress)

    def _retry(self) -> int:
        count = self._retry_unlocked()
        retriable = self._without_duplicates().filter(status__in=_movable(TaskStatus.READY, FINISHED))
        for _ in range(TRIES):
            # A row is locked for a moment when those that wait for others are told of an end. Not if any was moved: it
            # may have been cancelled again since, for what it waits for has failed.
            if count or not retriable.exists():
                break
            time.sleep(BETWEEN_TRIES)
            count = self._retry_unlocked()
        return count

    def _retry_unlocked(self) -> int:
        for _ in range(LOOKS):
            # Another with its unique key may be committed between our look and our write; the next look sees it.
            with suppress(IntegrityError), transaction.atomic(using=self.db):
                return self._retry_once()
        with transaction.atomic(using=self.db):
            return self._retry_once()

    def _retry_once(self) -> int:
        changes = {
            "status": WAITS,
            "waits_for": 0,
            "retries": 0,
            "rescues": 0,
            "run_after": None,
            "worker": None,
            "finished_at": None,
            "cancel_requested_at": None,
            "meta": RawSQL("CASE WHEN meta ? 'snoozes' THEN meta - 'snoozes' ELSE meta END", ()),
            "progress": None,
            "expires_at": None,
        }
        chosen = self._without_duplicates()
        parts = [chosen]
        # One after the other, in one order, as enqueue_many does: two who take the same unique keys in different ones
        # would deadlock. An UPDATE of many rows takes them in the order of their ids.
        unique = chosen.filter(unique_key__isnull=False, status__in=FINISHED).order_by("unique_key")
        ids = list(unique.values_list("pk", flat=True))
        if len(ids) > 1:
            rows = type(self)(self.model, using=self.db)
            parts = [self.filter(unique_key=None), *(rows.filter(pk=id_) for id_ in ids)]
        moved = [id_ for part in parts for id_, *_ in part._move(TaskStatus.READY, changes, among=FINISHED)]
        self.wait_again(moved)
        return len(moved)

    def _without_duplicates(self) -> Self:
        others = self.model._base_manager.using(self.db).filter(unique_key=OuterRef("unique_key"))
        there = others.filter(HAS_UNIQUE_KEY).exclude(pk=OuterRef("pk"))
        last = self.filter(unique_key__isnull=False, status__in=FINISHED)
        last = last.order_by("unique_key", "-pk").distinct("unique_key")
        return self.filter(Q(unique_key__isnull=True) | (~Exists(there) & Q(pk__in=last.values("pk"))))

    def run_now(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Make scheduled tasks of this queryset READY, before their time. Returns how many.

        Some thousands at a time, and ``progress``: as in ``retry``.
        """
        chosen = self.filter(status=TaskStatus.SCHEDULED).order_by("pk")
        return self._by_windows(chosen, TaskQuerySet._run_now, progress)

    def _run_now(self) -> int:
        return len(self._move(TaskStatus.READY, {"status": WAITS, "run_after": None}, among={TaskStatus.SCHEDULED}))

    def cancel(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Cancel what waits in this queryset, and ask what runs to end. Returns how many it moved or asked.

        What waits will never run. What runs stays RUNNING until its worker, once this is committed, has passed on the
        request and the function has ended: CANCELLED if it raised, SUCCESSFUL if it returned nevertheless.

        Some thousands at a time, and ``progress``: as in ``retry``, but the newest first.
        """
        # So nothing that is to be cancelled is let through to its key, or by what it waits for, in the meantime.
        chosen = self.filter(_UNASKED | _WAITING).order_by("-pk")
        return self._by_windows(chosen, TaskQuerySet._cancel, progress)

    def _cancel(self) -> int:
        count = self._cancel_once()
        for _ in range(TRIES):
            # A row is locked for a moment when it is claimed, or when its progress is written.
            if not self.filter(_UNASKED | _WAITING).exists():
                break
            time.sleep(BETWEEN_TRIES)
            count += self._cancel_once()
        return count

    def _cancel_once(self) -> int:
        changes = {
            "status": Case(When(_RUNNING, then=F("status")), default=Value(TaskStatus.CANCELLED.value)),
            "finished_at": Case(When(_RUNNING, then=None), default=Now()),
            "expires_at": Case(When(_RUNNING, then=None), default=RawSQL(statements.EXPIRES_AT, ())),  # noqa: S611
            "cancel_requested_at": Case(When(_RUNNING, then=Now())),
        }
        unasked = self.filter(_UNASKED | ~_RUNNING)
        moved = unasked._move(TaskStatus.CANCELLED, changes)
        asked = [id_ for id_, _, status, _ in moved if status == TaskStatus.RUNNING]
        if asked:
            notify = partial(self._run, statements.NOTIFY_CANCEL, wakeup.CANCEL_CHANNEL, asked)
            transaction.on_commit(notify, using=self.db, robust=True)
        return len(moved)

    def _selection(self, limit: int) -> models.QuerySet[Any, Any]:
        # Without the key, which somebody may have locked who enqueues a task to run after one of these.
        return self.select_for_update(skip_locked=True, no_key=True).values("pk")[:limit]

    def reset_stuck(self) -> int:
        """Make stuck tasks of this queryset READY again: running ones whose worker is gone. Returns how many.

        Tasks of a living worker are left alone. A worker that comes back later finds its claim lost. A task that was
        asked to end is CANCELLED instead.
        """
        changes = {
            "status": Case(When(_ASKED, then=Value(TaskStatus.CANCELLED.value)), default=WAITS),
            "finished_at": Case(When(_ASKED, then=Now())),
            "expires_at": Case(When(_ASKED, then=RawSQL(statements.EXPIRES_AT, ()))),  # noqa: S611
            "worker": None,
        }
        return len(self.stuck()._move(TaskStatus.READY, changes, among={TaskStatus.RUNNING}))

    def _by_windows(
        self, chosen: Self, verb: Callable[[Self], int], progress: Callable[[int, int], None] | None
    ) -> int:
        """Apply ``verb`` to the ``chosen`` tasks of this queryset, some at a time, so that nobody waits for them all.

        In a transaction of the caller's to all at once, as they stay locked until its end anyway.
        """
        if in_transaction(connection_for(self.db)):
            return verb(self)
        count, ids = 0, list(chosen.values_list("pk", flat=True))
        for start in range(0, len(ids), WINDOW):
            window = ids[start : start + WINDOW]
            count += verb(self.filter(pk__in=window))
            if progress:
                progress(count, window[-1])
        return count

    def _move(
        self, target: TaskStatus, changes: dict[str, Any], *, among: Iterable[str] = TaskStatus.values
    ) -> list[tuple[Any, ...]]:
        movable = self.filter(status__in=_movable(target, among)).order_by("id")
        moved = movable._mark(_ALL, changes, "id", "queue", "status", "lock_key")
        self.wake(queue for _, queue, status, _ in moved if status == TaskStatus.READY)
        self.admit_on_commit({key for _, _, status, key in moved if status != TaskStatus.RUNNING})
        self.release_on_commit([id_ for id_, _, status, _ in moved if status in FINISHED])
        return moved

    def doubtful(self, *, backend: str | None = None) -> list[tuple[str, int]]:
        """Return how many tasks of each queue run on workers that may be dead.

        They are rescued soon, or their workers are heard again. ``backend``: only tasks of one alias in TASKS.
        """
        return self._run(statements.DOUBTFUL, backend, MISSING * get_settings().HEARTBEAT_INTERVAL)

    def unknown(
        self, *, limit: int = 1000, worker: UUID | None = None, backend: str | None = None
    ) -> list[UnknownTasks]:
        """Return which ready tasks no living worker knows, the longest waiting first.

        With ``worker``, which ones this worker does not know; with ``backend``, only tasks of that alias in TASKS.
        Looks at the first ``limit`` tasks of each queue, by index. Whether a worker that knows one also serves its
        queue is not asked.
        """
        alive = get_settings().HEARTBEAT_LIMIT
        return [UnknownTasks(*row) for row in self._run(statements.UNKNOWN, alive, worker, limit, limit, backend)]

    def ready_paths(self, *, limit: int = 1000) -> list[tuple[str, str]]:
        """Return which functions are called by ready tasks, by queue, among the first ``limit`` of each queue."""
        return self._run(statements.READY_PATHS, limit, limit)


class TaskManager(models.Manager.from_queryset(TaskQuerySet)):  # type: ignore[misc]
    """The manager of ``Task``."""


_RUNNING = Q(status=TaskStatus.RUNNING)
_ASKED = Q(cancel_requested_at__isnull=False)
_UNASKED = _RUNNING & ~_ASKED
_WAITING = Q(status__in=[TaskStatus.BLOCKED, TaskStatus.READY, TaskStatus.SCHEDULED])
#: How often, and after how many seconds, a cancel or a retry comes back to tasks whose rows were locked.
TRIES, BETWEEN_TRIES = 3, 0.01
#: How often a retry looks again when another with the same unique key came between.
LOOKS = 10
#: More rows than one statement ever moves.
_ALL = 2**31 - 1


def _movable(target: TaskStatus, among: Iterable[str]) -> list[str]:
    """Return the statuses from which a task may move to ``target``, as far as they are ``among`` these."""
    return sorted(set(sources_of(target)) & set(among))


def _by_id(pair: tuple[Claim, Outcome]) -> int:
    # All writers of several rows take them in this order or skip what is locked, so they cannot deadlock.
    return pair[0].id


def _columns(claim: Claim, outcome: Outcome) -> tuple[Any, ...]:
    """Return an outcome that is no success as a row of ``SETTLE_OTHERS``."""
    status, delay, retried, snoozes, record = outcome.status.value, 0.0, 0, 0, None
    match outcome:
        case Retried():
            record, retried, delay = "FAILED", 1, float(outcome.delay)
        case Snoozed():
            delay, snoozes = float(outcome.delay), outcome.snoozes
        case Abandoned():
            delay = float(outcome.delay)
        case Interrupted():
            record, delay = "LOST", float(outcome.delay)
        case Failed() | Cancelled():
            record = "FAILED"
    if status == TaskStatus.SCHEDULED and delay <= 0:
        # What is due at once needs nobody to promote it.
        status = TaskStatus.READY.value
    failure = getattr(outcome, "failure", None)
    path, traceback = (failure.exception_path, failure.traceback) if failure else (None, None)
    return claim.id, claim.attempt, status, delay, retried, snoozes, record, path, traceback


def _success_columns(pairs: Sequence[tuple[Claim, Outcome]]) -> tuple[str, str, list[str] | None]:
    """Return ids, attempts and results of successes as arrays; the numbers as text, which is made in no time."""
    claims, outcomes = zip(*pairs, strict=True)
    results = list(map(attrgetter("result"), outcomes))
    return (
        array_of_numbers(map(attrgetter("id"), claims)),
        array_of_numbers(map(attrgetter("attempt"), claims)),
        results if results.count("null") < len(results) else None,
    )
