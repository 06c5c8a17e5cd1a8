"""Settles claims: one guarded UPDATE writes a batch of outcomes.

The guard is the fence: the row must still have the id and the attempt number of the claim, and the status RUNNING. If
the task was rescued, given back or reset meanwhile, it has not, and the outcome has no effect. A cancel request changes
neither the status nor the attempt of a running task, so its outcome is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter, itemgetter
from typing import Any, cast
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import transaction
from psycopg.errors import DivisionByZero

from django_pglock.error_reading import fingerprint_of
from django_pglock.errors import ClaimLost
from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import is_plain_django, literals, send
from django_pglock.store.admit import admit
from django_pglock.store.enqueue import enqueue_handlers
from django_pglock.store.outcome import SUCCEEDED, Cancelled, Failed, Interrupted, Outcome, Retried, Succeeded
from django_pglock.store.release import release
from django_pglock.store.requests_to_worker import write_progress
from django_pglock.store.statements import IN_INDEX_ORDER, array_of_numbers, filled, run
from django_pglock.store.steps import note_causes, write_suspensions
from django_pglock.store.wake import wake
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.states import TaskStatus

#: The SQLSTATEs with which the result of a function or its transaction is refused: a value, a serialization failure, a
#: transaction that is aborted or has ended. And those of a lost session.
NOT_OURS = ("22", "54", "40001", "25P", "08", "57P")

ID, ATTEMPT = attrgetter("id"), attrgetter("attempt")

# Settles successes. It has only the columns that a success needs, because most outcomes are successes. The arrays are
# in the order of the ids, so that ``width_bucket`` finds the position of a task in them. A join with the arrays would
# take longer, and a planner that expects few rows would compare each row with each outcome. The status is compared in a
# form that no index has. Otherwise a planner that expects few running tasks would read the running tasks of all
# workers.
#
# If another open transaction has locked one of the rows, all other outcomes would wait for it. So the statement waits
# for a moment only, and then fails. ``LOCKED_BY_OTHERS`` then returns the locked rows. To skip locked rows, SKIP
# LOCKED, would write each row twice. The statement itself sets the limit before it locks a row, so this works behind a
# pooler, too.
SETTLE_SUCCESSES = """
WITH ended AS MATERIALIZED (SELECT %s::bigint[] AS ids, %s::int[] AS attempts, %s::jsonb AS results)
UPDATE {task} AS task
SET status = 'SUCCESSFUL', finished_at = clock_timestamp(), expires_at = {expires_at},
    result = NULLIF((SELECT results FROM ended) -> (width_bucket(task.id, (SELECT ids FROM ended)) - 1), 'null')
WHERE task.id = ANY (ARRAY(SELECT unnest(ids) FROM ended))
  AND task.attempts = (SELECT attempts FROM ended)[width_bucket(task.id, (SELECT ids FROM ended))]
  AND task.status || '' = 'RUNNING' AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
RETURNING task.id, date_part('epoch', task.finished_at)
"""

# Settles successes without observers. The answer is one row: NULL if all were accepted, otherwise the accepted ids. For
# a thousand outcomes, server and worker would spend most of their time for the answer on its rows.
SETTLE_UNOBSERVED = f"""
WITH settled AS ({SETTLE_SUCCESSES.replace(", date_part('epoch', task.finished_at)", "")})
SELECT CASE WHEN count(*) < %s THEN coalesce(array_agg(id), '{{{{}}}}') END FROM settled
"""

# Settles all other outcomes. The same statement inserts the failed attempt, so that neither exists without the other.
# If a claim is given back, ``started_at`` is cleared if this claim has set it. A task with a lock key that runs again
# waits for its key again. A task whose cancel was requested does not run again. Snoozes are counted in ``meta``,
# because few tasks limit them, and each claim would have to read a separate column. Only a failed task has a
# fingerprint.
SETTLE_OTHERS = """
WITH outcome AS MATERIALIZED (
    SELECT *, status NOT IN ('SCHEDULED', 'READY') AS is_final FROM unnest(
        %s::bigint[], %s::int[], %s::text[], %s::float8[], %s::int[], %s::int[], %s::int[], %s::text[], %s::text[],
        %s::text[], %s::bigint[], %s::text[])
        AS outcome (id, attempt, status, delay, retried, rescued, snoozes, record, exception_path, traceback,
                    fingerprint, log)
), settled AS (
    UPDATE {task} AS task
    SET status = CASE WHEN NOT outcome.is_final AND task.cancel_requested_at IS NOT NULL THEN 'CANCELLED'
                      WHEN outcome.status = 'READY' AND task.lock_key IS NOT NULL THEN 'BLOCKED'
                      ELSE outcome.status END,
        retries = task.retries + outcome.retried, rescues = LEAST(task.rescues, 32766) + outcome.rescued,
        meta = CASE WHEN outcome.snoozes > 0 THEN jsonb_set(task.meta, '{{snoozes}}', to_jsonb(outcome.snoozes))
                    ELSE task.meta END,
        fingerprint = outcome.fingerprint, log = outcome.log,
        uncounted = LEAST(task.uncounted, task.attempts - 1)
            + CASE WHEN outcome.record IS NULL AND NOT outcome.is_final THEN 1 ELSE 0 END,
        run_after = CASE WHEN outcome.status = 'SCHEDULED'
                         THEN clock_timestamp() + make_interval(secs => outcome.delay) ELSE task.run_after END,
        finished_at = CASE WHEN outcome.is_final OR task.cancel_requested_at IS NOT NULL THEN clock_timestamp() END,
        expires_at = CASE WHEN outcome.status = 'FAILED' AND task.meta ? 'keeps_failures' THEN NULL
                          WHEN outcome.is_final OR task.cancel_requested_at IS NOT NULL THEN {expires_at} END,
        worker = CASE WHEN outcome.is_final OR task.cancel_requested_at IS NOT NULL THEN task.worker END,
        started_at = CASE WHEN outcome.record IS NULL AND outcome.status = 'READY'
                               AND task.started_at = task.last_attempted_at
                          THEN NULL ELSE task.started_at END
    FROM outcome
    WHERE task.id = outcome.id AND task.id = ANY (ARRAY(SELECT id FROM outcome))
      AND task.attempts = outcome.attempt AND task.status || '' = 'RUNNING'
      AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
    RETURNING task.id, task.attempts - task.uncounted AS number, task.last_attempted_at, task.finished_at
), recorded AS (
    INSERT INTO {attempt}
        (task_id, number, worker, worker_name, started_at, finished_at, outcome, exception_path, traceback, log)
    SELECT settled.id, settled.number, me.id, (SELECT worker.name FROM {worker} AS worker WHERE worker.id = me.id),
           settled.last_attempted_at, clock_timestamp(), outcome.record, outcome.exception_path, outcome.traceback,
           outcome.log
    FROM settled JOIN outcome ON outcome.id = settled.id CROSS JOIN (SELECT %s::uuid AS id) AS me
    WHERE outcome.record IS NOT NULL
)
SELECT id, date_part('epoch', finished_at) FROM settled
"""

# The claims of these that cannot be settled now because another transaction has locked their rows. Lost claims are not
# returned: their rows are not locked, or have another attempt number.
LOCKED_BY_OTHERS = """
WITH claim AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[]) AS claim (id, attempt)
), free AS MATERIALIZED (
    SELECT task.id FROM {task} AS task WHERE task.id = ANY (ARRAY(SELECT id FROM claim))
    FOR NO KEY UPDATE SKIP LOCKED
)
SELECT task.id FROM {task} AS task JOIN claim ON claim.id = task.id
WHERE task.id = ANY (ARRAY(SELECT id FROM claim)) AND task.id <> ALL (ARRAY(SELECT id FROM free))
  AND task.attempts = claim.attempt AND task.status || '' = 'RUNNING'
"""

# By the primary key. A condition on the date would let the planner read all finished tasks by the index on the date.
FINISH_DATES = "SELECT id, date_part('epoch', finished_at) FROM {task} WHERE id = ANY (%s::bigint[])"

# Settles the success of one task inside of its function's own transaction. If the claim is lost, the statement fails
# with a division by zero. Then the COMMIT that follows in the same message is not executed.
SETTLE_OWN_SUCCESS = """
WITH settled AS (
    UPDATE {task} AS task
    SET status = 'SUCCESSFUL', finished_at = clock_timestamp(), result = NULLIF(%s::jsonb, 'null'),
        expires_at = {expires_at}
    WHERE task.id = %s AND task.attempts = %s AND task.status = 'RUNNING'
    RETURNING task.id)
SELECT 1 / count(*) FROM settled
"""

# Settles the successes of a group in the same way, all or none, and without the limit of ``SETTLE_SUCCESSES``. With a
# statement for each task, the server would spend most of its time on their plans.
_LIMIT = "AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''"
SETTLE_OWN_SUCCESSES = f"""
WITH settled AS ({SETTLE_SUCCESSES.replace(_LIMIT, "")})
SELECT 1 / (count(*) = %s)::int FROM settled
"""

# Sent before it, if calls of a group have failed by themselves. The first one locks the rows of all calls in the order
# in which each other statement locks them, because the failures are written before the successes.
LOCK_OWN = "SELECT FROM {task} WHERE id = ANY (%s::bigint[]) ORDER BY id FOR NO KEY UPDATE"
SETTLE_OWN_OTHERS = SETTLE_OTHERS.replace(_LIMIT, "")

# Sent before it. Limits that a role has for its own statements must not decide over ours: the table may be locked, for
# example by a migration, and the function has returned. The transaction ends here, so its limits end with it.
OWN_LIMITS = ("SET LOCAL lock_timeout = '30s'", "SET LOCAL statement_timeout = '60s'")
OWN_LIMITS_FROM_17 = (*OWN_LIMITS, "SET LOCAL transaction_timeout = 0")
SHORT_LIMITS = "SET LOCAL lock_timeout = '100ms';SET LOCAL statement_timeout = '5s'"


CLAIM_LOST = "The task is no longer claimed by this attempt."


class SettleRefused(Exception):
    """The database has refused the statement by which we settle a claim in its function's transaction."""


def settle(using: str, outcomes: Sequence[tuple[Claim, Outcome]], worker: UUID) -> dict[int, float | None]:
    """Write a batch of outcomes, guarded by their claims.

    Returns the accepted ids, each with the date at which the task ended in seconds since the epoch, or None if the task
    runs again. A claim that is missing in the answer was lost: the task no longer belongs to it, and the outcome had no
    effect. Raises ``OperationalError`` if a row stays locked for longer than a moment. Successes and other outcomes are
    two statements. If all or none must be written, pass only one kind.
    """
    successes = [pair for pair in outcomes if isinstance(pair[1], Succeeded)]
    accepted: dict[int, float | None] = {}
    if successes:
        claims, ended = zip(*successes, strict=True)
        columns = _success_columns(claims, map(attrgetter("result"), ended))
        accepted.update(run(using, SETTLE_SUCCESSES, *columns, prepared=True))
    if others := [pair for pair in outcomes if not isinstance(pair[1], Succeeded)]:
        accepted.update(_settle_others(using, others, worker))
    return accepted


def _settle_others(
    using: str, others: Sequence[tuple[Claim, Outcome]], worker: UUID, statement: str = SETTLE_OTHERS
) -> dict[int, float | None]:
    """Write outcomes other than successes, and what follows from them. Return the accepted ids with their dates."""
    columns = sorted((_columns(*pair) for pair in others), key=itemgetter(0, 1))
    handlers = [(claim.id, path) for claim, outcome in others if (path := _handler_of(claim, outcome))]
    suspended = [(claim, how) for claim, outcome in others if (how := getattr(outcome, "suspension", None))]
    causes = [(claim.id, name) for claim, outcome in others if (name := _cause_of(outcome))]
    with transaction.atomic(using=using) if handlers or suspended or causes else nullcontext():
        accepted = dict(run(using, statement, *map(list, zip(*columns, strict=True)), worker))
        enqueue_handlers(using, [(id_, path) for id_, path in handlers if id_ in accepted])
        write_suspensions(using, [(claim, how) for claim, how in suspended if claim.id in accepted])
        note_causes(using, [(id_, name) for id_, name in causes if id_ in accepted])
    return accepted


def _handler_of(claim: Claim, outcome: Outcome) -> str | None:
    """Return the path of the function of ``on_failure=``, if the task has failed and has one."""
    if not isinstance(outcome, Failed) or '"on_failure"' not in claim.meta:
        return None
    path: str | None = from_json(claim.meta).get("on_failure")
    return path


def _cause_of(outcome: Outcome) -> str:
    """Return the name of the failed step that has ended the task; an empty string if none has."""
    return outcome.failure.step if isinstance(outcome, Failed | Cancelled) else ""


def settle_unobserved(using: str, claims: Sequence[Claim], results: Sequence[str]) -> list[int] | None:
    """Write successes as ``settle`` does, without returning the dates at which the tasks ended.

    ``results`` are JSON texts. Returns None if all were accepted, otherwise the accepted ids.
    """
    columns = _success_columns(claims, results)
    [(accepted,)] = run(using, SETTLE_UNOBSERVED, *columns, len(claims), prepared=True)
    return cast("list[int] | None", accepted)


def locked_by_others(using: str, claims: Sequence[Claim]) -> set[int]:
    """Return the ids of the claims that cannot be settled now, because another transaction has locked their rows."""
    ids, attempts = [claim.id for claim in claims], [claim.attempt for claim in claims]
    return {id_ for (id_,) in run(using, LOCKED_BY_OTHERS, ids, attempts)}


def finish_dates(using: str, ids: Sequence[int]) -> dict[int, float]:
    """Return, by id, when tasks finished, in seconds since the epoch. Tasks that have not finished are left out."""
    rows = run(using, FINISH_DATES, array_of_numbers(ids))
    return {id_: date for id_, date in rows if date is not None}


def settle_and_commit(using: str, ended: Sequence[tuple[Claim, Outcome]], *, wait_for_disk: bool = True) -> None:
    """Write outcomes as the last statement of the current transaction, and commit it, in one message.

    If calls of a group have failed by themselves, their outcomes are written by a message before it.
    ``wait_for_disk=False``: the COMMIT returns before the disk has it. A crash of the server may lose it, as a whole:
    https://www.postgresql.org/docs/current/wal-async-commit.html.

    Then ``atomic()`` has nothing to commit, and it calls the functions of ``on_commit``. Raises ``ClaimLost`` if one
    claim is lost, and ``SettleRefused`` if a statement of ours is refused. Then nothing is committed. In a ``TestCase``
    the transaction is a savepoint of that of the test, so there is no COMMIT.
    """
    connection = connection_for(using)
    connection.ensure_connection()
    # Raises the reason if the transaction cannot be committed. Otherwise the error would be that values cannot be
    # quoted for a closed session.
    connection.validate_no_broken_transaction()
    others = [pair for pair in ended if not isinstance(pair[1], Succeeded)]
    settling = _settling_own(connection, [pair for pair in ended if isinstance(pair[1], Succeeded)])
    is_own_transaction = len(connection.atomic_blocks) == 1
    limits = OWN_LIMITS if connection.pg_version < 170000 else OWN_LIMITS_FROM_17
    if not wait_for_disk:
        limits = (*limits, "SET LOCAL synchronous_commit = off")
    # A cursor does not tell which statement of a message was refused. So the COMMIT is a message of its own.
    is_direct = is_plain_django(connection)
    with _refusals_of(len(limits) + len(settling)):
        told = [claim for claim, _ in ended if claim.progress is not claim.written_progress]
        if told or others:
            send(connection, ";".join(limits))
            write_progress(using, told, is_last=True)
        if others:
            _settle_own_others(using, others, ended)
        commit = ["COMMIT"] if is_direct and is_own_transaction else []
        send(connection, ";".join([*limits, *settling, *commit]))
    if is_own_transaction and not is_direct:
        send(connection, "COMMIT")


def _settle_own_others(using: str, others: Sequence[tuple[Claim, Outcome]], ended: Sequence[tuple[Claim, Any]]) -> None:
    """Write those outcomes of a group that are no successes in the current transaction."""
    run(using, LOCK_OWN, array_of_numbers(claim.id for claim, _ in ended))
    if len(_settle_others(using, others, others[0][0].worker, SETTLE_OWN_OTHERS)) < len(others):
        raise ClaimLost(CLAIM_LOST)


def _settling_own(connection: Any, successes: Sequence[tuple[Claim, Any]]) -> list[str]:
    """Return a list of the statement that settles these successes in their own transaction, or an empty list."""
    if not successes:
        return []
    [(claim, outcome), *others] = successes
    statement, values = SETTLE_OWN_SUCCESS, tuple[Any, ...]((outcome.result, claim.id, claim.attempt))
    if others:
        claims, results = zip(*((each, success.result) for each, success in successes), strict=True)
        statement, values = SETTLE_OWN_SUCCESSES, (*_success_columns(claims, results), len(claims))
    with connection.wrap_database_errors:
        return [filled(statement) % literals(connection, values)]


@contextmanager
def _refusals_of(count: int) -> Iterator[None]:
    """Tell the refusals of our own statements, the first ``count`` of a message, from those of what was written."""
    try:
        yield
    except DatabaseFailure as error:
        cause: Any = error.__cause__
        if _is_claim_lost(cause):
            raise ClaimLost(CLAIM_LOST) from error
        state = getattr(cause, "sqlstate", None)
        if state is None or state.startswith(NOT_OURS) or getattr(cause, "accepted", 0) >= count:
            raise
        raise SettleRefused from error


def _is_claim_lost(error: Any) -> bool:
    # A trigger of the project that divides by zero has a context: the name of its function.
    return getattr(error, "sqlstate", None) == DivisionByZero.sqlstate and error.diag.context is None


def take_success(using: str, claims: Sequence[Claim]) -> bool:
    """Return whether the table would take the success of these claims now. Nothing is written."""
    try:
        with transaction.atomic(using=using):
            run(using, SHORT_LIMITS)
            [settling] = _settling_own(connection_for(using), [(claim, SUCCEEDED) for claim in claims])
            send(connection_for(using), settling)
            transaction.set_rollback(True, using=using)
    except DatabaseFailure:
        return False
    return True


def _columns(claim: Claim, outcome: Outcome) -> tuple[Any, ...]:
    """Return an outcome other than success as a row of ``SETTLE_OTHERS``."""
    status, delay = outcome.status.value, float(getattr(outcome, "delay", 0.0))
    if status == TaskStatus.SCHEDULED and delay <= 0:
        # A task that is due at once does not have to be promoted.
        status = TaskStatus.READY.value
    rescued, snoozes = getattr(outcome, "rescued", 0), getattr(outcome, "snoozes", 0)
    attempt: tuple[str | None, ...] = (None, None, None)
    if failure := getattr(outcome, "failure", None):
        record = "LOST" if isinstance(outcome, Interrupted) else "FAILED"
        attempt = (record, failure.exception_path, failure.traceback)
    fingerprint = None
    if isinstance(outcome, Failed):
        fingerprint = fingerprint_of(claim.task_path, outcome.failure.exception_path, outcome.failure.place)
    move = (claim.id, claim.attempt, status, delay, int(isinstance(outcome, Retried)), rescued, snoozes)
    return (*move, *attempt, fingerprint, claim.log or None)


def _success_columns(claims: Sequence[Claim], results: Iterable[str]) -> tuple[str, str, str | None]:
    """Return ids and attempts of successes as the text of arrays, which is faster than lists, and their results.

    The results are one JSON array; None if no task has a result, as in most batches. All are sorted by id and attempt.
    Each statement that writes several rows locks them in this order, or skips locked rows. So two statements cannot
    deadlock. Of two attempts of one task, only the later one can be settled, and ``width_bucket`` finds the last of
    equal ids.
    """
    # By functions written in C, because there may be thousands.
    rows = sorted(zip(map(ID, claims), map(ATTEMPT, claims), results, strict=True))
    ids, attempts, texts = zip(*rows, strict=True)
    has_results = texts.count("null") < len(texts)
    return array_of_numbers(ids), array_of_numbers(attempts), f"[{','.join(texts)}]" if has_results else None


# Gives back claims whose answer was lost: by the table a worker has them, but the worker does not know of them.
#
# Without this, such a task would stay RUNNING as long as its worker lives.


# The tasks are found first, in the order of an index. When a row is locked, its conditions are checked again, because
# the row may have changed.
#
# Claims that were made after the worker has listed its tasks in flight are not given back. Neither are claims of lock
# keys for whose groups threads of the worker are claiming at this moment. A claim whose date is
# far ahead of the clock was made before that, and the clock has been put back since.
GIVE_BACK = """
WITH mine AS MATERIALIZED (
    SELECT id FROM {task} WHERE status = 'RUNNING' AND worker BETWEEN %s AND %s ORDER BY worker
)
UPDATE {task} AS task
SET status = CASE WHEN task.cancel_requested_at IS NOT NULL THEN 'CANCELLED'
                  WHEN task.lock_key IS NOT NULL THEN 'BLOCKED' ELSE 'READY' END,
    finished_at = CASE WHEN task.cancel_requested_at IS NOT NULL THEN clock_timestamp() END, worker = NULL,
    uncounted = LEAST(uncounted, attempts - 1) + 1,
    expires_at = CASE WHEN task.cancel_requested_at IS NOT NULL THEN {expires_at} END,
    started_at = CASE WHEN started_at = last_attempted_at THEN NULL ELSE started_at END
WHERE task.id = ANY (ARRAY(SELECT id FROM mine)) AND task.status || '' = 'RUNNING'
  AND task.worker = %s AND task.id <> ALL (%s::bigint[])
  AND (task.last_attempted_at < LEAST(clock_timestamp() - make_interval(secs => %s), %s::timestamptz)
       OR task.last_attempted_at > GREATEST(clock_timestamp(), %s::timestamptz) + interval '1 minute')
  AND COALESCE(task.lock_key <> ALL (%s::text[]), true)
RETURNING task.id, task.status, task.queue, task.lock_key
"""


def server_time(using: str) -> str:
    """Return the time of the server's clock as text of the server, so that no time zone setting changes it."""
    [(now,)] = run(using, "SELECT clock_timestamp()::text")
    return str(now)


def give_back(
    using: str,
    worker: UUID,
    in_flight: Iterable[int],
    *,
    older_than: float = 0.0,
    before: str | None = None,
    except_keys: Iterable[str] = (),
) -> int:
    """Give back the tasks that ``worker`` has by the table and whose ids are not in ``in_flight``.

    Only claims are given back that are older than ``older_than`` seconds, that were made before ``before``, a moment
    of ``server_time()`` (None: any), and whose lock key is not in ``except_keys``. Returns the number of tasks.
    """
    values = (worker, worker, worker, list(in_flight), older_than, before, before, list(except_keys))
    given_back = run(using, GIVE_BACK, *values, first=IN_INDEX_ORDER)
    # The worker may have no free thread, and other workers may sleep.
    wake(using, (queue for _, status, queue, _ in given_back if status == TaskStatus.READY))
    admit(using, (key for *_, key in given_back))
    release(using, (id_ for id_, status, *_ in given_back if status == TaskStatus.CANCELLED))
    return len(given_back)
