"""The settler: writes outcomes to the database in batches, and then reports them.

The claims that end while one write is in progress are the next batch. So there is no delay for an idle worker, and
batches are large under load.

Another transaction may have locked a task's row, for example to cancel the task. This must not delay the other outcomes
of the batch. So the outcome of a locked row is set aside, and tried again from time to time until the row is free.
"""

from __future__ import annotations

import math
import random
import time
from operator import attrgetter
from queue import Empty
from typing import Any

from django.db import DatabaseError, OperationalError
from django.db import Error as DatabaseFailure
from psycopg.errors import LockNotAvailable

from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, RateOfRecords, get_logger
from django_pglock.postgres.connections import close_unusable_connections
from django_pglock.store.admit import admit_without_wake
from django_pglock.store.numbers import MINUTE, Counts, add_numbers, bucket_of, clock, take_counted_steps
from django_pglock.store.outcome import (
    CANCEL_REQUESTED,
    FINAL,
    Abandoned,
    Cancelled,
    Failed,
    Failure,
    GivenBack,
    Interrupted,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.store.release import release
from django_pglock.store.requests_to_worker import write_logs
from django_pglock.store.rescue import judge, server_times
from django_pglock.store.settle import finish_dates, locked_by_others, settle, settle_unobserved
from django_pglock.store.wake import wake, wake_except
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child.in_flight import EndedClaim, InFlight, with_new_progress, write_new_progress
from django_pglock.worker.child.logs import report, report_lost
from django_pglock.worker.child.task_connections import ends_transactions_of
from django_pglock.worker.service import Service

logger = get_logger(WORKER)

# Functions written in C, because they are called for thousands of ended claims. A name with a dot takes twice as long.
CLAIM, OUTCOME, RESULT = attrgetter("claim"), attrgetter("outcome"), attrgetter("result")
TASK_ID, LOCK_KEY, PROGRESS = attrgetter("id"), attrgetter("lock_key"), attrgetter("progress")
QUEUE, PATH, IS_SETTLED = attrgetter("queue"), attrgetter("task_path"), attrgetter("is_settled")
#: The largest number of outcomes in one statement, and of characters of their results. The limit of PostgreSQL for one
#: value is a gigabyte.
LARGEST_BATCH, LARGEST_TEXT = 1500, 20_000_000
#: If all ended claims have already been settled by their own transactions, the settler waits for this number of seconds
#: for more of them, so that they share a statement.
LINGER = 0.005
#: Seconds without anything to write before the session is closed.
IDLE_TIMEOUT = 30.0
#: Seconds between two checks of rows that other transactions have locked.
BETWEEN_LOCK_CHECKS = 0.1
#: Classes of SQLSTATE that a single row does not cause: a table or column is missing, or has changed since the
#: statement was prepared, or the server is read-only. They occur while a migration runs, or after a failover.
SCHEMA_ERRORS = ("0A", "25", "26", "42")
#: The class of values that are too large or too deep for PostgreSQL. psycopg raises an OperationalError for it.
TOO_LARGE = "54"
#: The classes of values that PostgreSQL refuses: these, data errors, and violated constraints. All other refusals of a
#: row are not the task's: a trigger of the project, for example, or a broken index.
OF_VALUES = (TOO_LARGE, "22", "23", "No")
#: Seconds between two attempts to write an outcome that is refused for another reason.
BETWEEN_REFUSALS = 3.0
#: The failure of a task whose own failure cannot be stored.
UNSTORABLE = Failed(
    Failure("builtins.ValueError", "The outcome of this task cannot be stored. The log of its worker has the reason.\n")
)
refusals = RateOfRecords(60.0)
#: The name of each outcome in the table of numbers.
NAMES: dict[type[Any], str] = {
    Succeeded: "succeeded",
    Failed: "failed",
    Retried: "retried",
    Cancelled: "cancelled",
    Snoozed: "snoozed",
    Interrupted: "lost",
    Abandoned: "lost",
}
#: The approximate number of attempts that are measured in a batch of attempts with the same queue, function and
#: outcome. It is a sample: the other attempts are counted with the same times. To measure each of a thousand tasks that
#: take some microseconds would take 5 % of their time.
MEASURED = 8
#: The number of minutes, in addition to the present one, whose counts are kept while the database refuses them.
MOST_MINUTES = 10


def is_plain(batch: list[EndedClaim]) -> bool:
    """Return whether all of these are unsettled successes without observers and progress, as in most batches."""
    return (
        are_successes(batch)
        and not any(map(RESULT, batch))
        and not any(map(IS_SETTLED, batch))
        and not any(map(PROGRESS, map(CLAIM, batch)))
        and not is_too_large(batch)
    )


def are_successes(batch: list[EndedClaim]) -> bool:
    """Return whether all of these have succeeded."""
    return {*map(type, map(OUTCOME, batch))} == {Succeeded}


def is_too_large(successes: list[EndedClaim]) -> bool:
    """Return whether the results of these are too large for one statement."""
    return sum(map(len, map(RESULT, map(OUTCOME, successes)))) > LARGEST_TEXT


def is_of_a_row(error: DatabaseError) -> bool:
    """Return whether a single row may be the cause of this error, so that the others can be written."""
    state = class_of(error)
    return state == TOO_LARGE or (state not in SCHEMA_ERRORS and not isinstance(error, OperationalError))


def class_of(error: DatabaseError) -> str:
    """Return the first letters of the SQLSTATE; "No" if the error does not come from the server."""
    return str(getattr(error.__cause__, "sqlstate", None))[:2]


class Settler(Service):
    """Takes ended claims from the outbox, settles them in batches, and reports the accepted outcomes.

    It keeps an outcome until the database has answered, so a lost connection causes a delay, but no outcome is lost.

    It opens its session when there is something to write, and closes it after some time without outcomes.
    """

    name = "settler"
    keeps_plans = True

    def __init__(self, in_flight: InFlight, using: str) -> None:
        super().__init__(using)
        self.in_flight = in_flight
        self._batch: list[EndedClaim] = []
        self._written: list[EndedClaim] = []
        # Ended claims whose rows another transaction has locked, or whose outcomes are refused, and when to try again.
        self._locked: dict[Claim, EndedClaim] = {}
        self._check_locked_at = 0.0
        self._is_progress_due = False
        #: The number of claims that have ended, and of those that were lost.
        self.ended = self.lost = 0
        self.history = History(using)

    def connected(self) -> None:
        self.history.set_clock()

    def wake(self) -> None:
        self.in_flight.outbox.put(None)

    def open(self) -> None:
        if self._batch or self._written:
            super().open()

    def write_progress_soon(self) -> None:
        """Have the progress of running tasks written, if there is any. For other threads."""
        if with_new_progress(list(self.in_flight.claims.values())) and not self._is_progress_due:
            self._is_progress_due = True
            self.wake()

    def run_once(self) -> None:
        if not self._batch and not self._written:
            self._batch = self._gather()
            self.in_flight.settling = len(self._batch) + len(self._locked)
            # After the batch is stored, so that no outcome is lost if this fails.
            self.open()
        if self._batch:
            self._written, self._batch = self._write(self._batch), []
        if self._written:
            # They stay in flight until the tasks that waited for them are ready, because a draining worker must run
            # those.
            self._release_and_admit(self._written)
        # Lowered before the claims are removed, because that may wake the feeder, which reads it.
        self.in_flight.settling = len(self._locked)
        if self._written:
            self.in_flight.remove(self._written)
            self._written = []
        if self._is_progress_due:
            self._is_progress_due = False
            super().open()
            write_new_progress(self.using, list(self.in_flight.claims.values()))
        if self.history.due_in() == 0:
            super().open()
            self.history.write()

    def flush(self) -> None:
        if self.history.due_in() < math.inf:
            super().open()
            self.history.write()

    def finish(self) -> None:
        for claim in self._locked:
            text = "%s has ended, but its row is locked or its outcome is refused. The task will run again."
            logger.warning(text, claim)

    def _gather(self) -> list[EndedClaim]:
        batch: list[EndedClaim | None] = [*self._unlocked()]
        # Under load the outbox is not empty. Then the session is kept, because to take one again has a cost.
        self._take_more(batch)
        if not batch:
            due_in = self.history.due_in()
            timeout = BETWEEN_LOCK_CHECKS if self._locked else min(IDLE_TIMEOUT, due_in)
            self.report_alive(timeout)
            try:
                batch.append(self.in_flight.outbox.get(timeout=timeout))
            except Empty:
                if not self._locked and due_in == math.inf:
                    self.close()
            self.report_alive()
            self._take_more(batch)
        if all(ended is not None and ended.is_settled and ended.claim.lock_key is None for ended in batch):
            # None of these has to be written, and no task waits for their lock keys.
            self.stopping.wait(LINGER)
            self._take_more(batch)
        # An abandoned claim may already have ended, with its outcome set aside.
        return self._without_locked([ended for ended in batch if ended is not None])

    def _unlocked(self) -> list[EndedClaim]:
        """Return the ended claims whose rows are no longer locked."""
        if not self._locked or time.monotonic() < self._check_locked_at:
            return []
        super().open()
        return self._set_locked_aside(list(self._locked.values()))

    def _set_locked_aside(self, ended_claims: list[EndedClaim]) -> list[EndedClaim]:
        """Set aside the ended claims whose rows another transaction has locked. Return the others."""
        self._check_locked_at = time.monotonic() + BETWEEN_LOCK_CHECKS
        locked = locked_by_others(self.using, list(map(CLAIM, ended_claims)))
        for ended in ended_claims:
            if ended.claim.id in locked:
                self._locked.setdefault(ended.claim, ended)
            else:
                self._locked.pop(ended.claim, None)
        return [ended for ended in ended_claims if ended.claim.id not in locked]

    def _take_more(self, batch: list[EndedClaim | None]) -> None:
        try:
            while len(batch) < LARGEST_BATCH:
                batch.append(self.in_flight.outbox.get_nowait())
        except Empty:
            pass

    def _write(self, batch: list[EndedClaim]) -> list[EndedClaim]:
        """Write these outcomes. Return the ended claims without those that were set aside."""
        for ended in batch if self._locked else ():
            # An earlier write of this batch may have set it aside, and then failed.
            self._locked.pop(ended.claim, None)
        if is_plain(batch):
            return self._write_plain(batch)
        open_ = [ended for ended in batch if ended.outcome is not None and not ended.is_settled]
        if unwritten := set(write_new_progress(self.using, map(CLAIM, open_))):
            self._set_locked_aside([ended for ended in open_ if ended.claim in unwritten])
            open_ = self._without_locked(open_)
        if logged := [
            each.claim
            for each in batch
            if each.claim.log is not None and (each.is_settled or isinstance(each.outcome, Succeeded))
        ]:
            write_logs(self.using, logged)
        suspects = [(each, each.outcome) for each in open_ if isinstance(each.outcome, Interrupted)]
        if any(outcome.is_suspect for _, outcome in suspects):
            # Some of the interrupted tasks may have ended their sessions themselves.
            times = server_times(self.using)
            for ended, outcome in suspects:
                ended.outcome = judge(ended.claim, outcome, times) if outcome.is_suspect else outcome
        successes = [ended for ended in open_ if isinstance(ended.outcome, Succeeded)]
        others = [ended for ended in open_ if not isinstance(ended.outcome, Succeeded)]
        return self._report(batch, {**self._settle(successes), **self._settle(others)})

    def _write_plain(self, batch: list[EndedClaim]) -> list[EndedClaim]:
        """Write successes without observers: the answer is short if all of them were accepted."""
        try:
            accepted = self._settle_plain(batch)
        except DatabaseError as error:
            return self._report(batch, self._settle_after(error, batch))
        if accepted is not None:
            # Some claims were lost.
            return self._report(batch, dict.fromkeys(accepted))
        self.ended += len(batch)
        self.history.count(batch)
        return batch

    def _settle_plain(self, batch: list[EndedClaim]) -> list[int] | None:
        """Settle these claims together. Returns None if all were accepted, otherwise the accepted ids."""
        return settle_unobserved(self.using, list(map(CLAIM, batch)), list(map(RESULT, map(OUTCOME, batch))))

    def _report(self, batch: list[EndedClaim], accepted: dict[int, Any]) -> list[EndedClaim]:
        """Report a batch. Return it without claims that were set aside. ``accepted``: when each task finished."""
        batch = self._without_locked(batch)
        if observed := [ended for ended in batch if ended.is_settled and ended.result is not None]:
            # Their own transactions have settled them.
            dates = finish_dates(self.using, [ended.claim.id for ended in observed])
            for ended in observed:
                ended.finished_at = dates.get(ended.claim.id)
        # Receivers may use other databases in this thread.
        close_unusable_connections(without=self.using)
        settled = [ended for ended in batch if ended.is_settled or ended.claim.id in accepted]
        with ends_transactions_of("task_finished"):
            for ended in settled:
                if not ended.is_settled:
                    ended.finished_at = accepted[ended.claim.id]
                if ended.finished_at is not None and not isinstance(ended.outcome, FINAL):
                    ended.outcome = CANCEL_REQUESTED
                report(ended)
        if self.is_running and not self.is_connected:
            # That of this thread was among them. Django would open the next one without our settings.
            self.close()
            super().open()
        lost = [ended for ended in batch if not ended.is_settled and ended.claim.id not in accepted]
        for ended in lost:
            report_lost(ended)
        self.ended += len(batch)
        self.lost += len(lost)
        self.history.count(settled)
        if reruns := [ended.claim.queue for ended in settled if not isinstance(ended.outcome, FINAL)]:
            # Other workers and services are notified of tasks that will run again, now or later.
            wake(self.using, reruns)
            self.in_flight.notify_feeder()
            self.in_flight.tell_parent(scheduled=True)
        return batch

    def _without_locked(self, ended_claims: list[EndedClaim]) -> list[EndedClaim]:
        return [ended for ended in ended_claims if ended.claim not in self._locked] if self._locked else ended_claims

    def _release_and_admit(self, ended_claims: list[EndedClaim]) -> None:
        """Release the tasks that waited for the end of these tasks, and admit tasks to their lock keys.

        Call it after the commit. store/admit.py says why.
        """
        keys = {*map(LOCK_KEY, map(CLAIM, ended_claims))}
        finals = ended_claims
        if not are_successes(ended_claims):
            finals = [ended for ended in ended_claims if isinstance(ended.outcome, FINAL)]
        # The release is first: a released task may have been enqueued before other tasks of its key.
        if release(self.using, map(TASK_ID, map(CLAIM, finals))):
            self.in_flight.notify_feeder()
        if keys != {None} and (queues := set(admit_without_wake(self.using, keys))):
            # This worker has just ended a task of the key. Its feeder is the first to be woken, without a NOTIFY.
            for queue in queues:
                self.in_flight.notify_feeder(queue)
            wake_except(self.using, queues, ended_claims[0].claim.worker)

    def _settle(self, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        """Settle successes, or other outcomes, by one statement. Return when each accepted task finished, by id."""
        if not ended_claims:
            return {}
        if len(ended_claims) > 1 and are_successes(ended_claims) and is_too_large(ended_claims):
            return self._settle_halves(ended_claims)
        try:
            outcomes = list(zip(map(CLAIM, ended_claims), map(OUTCOME, ended_claims), strict=True))
            return settle(self.using, outcomes, ended_claims[0].claim.worker)
        except DatabaseError as error:
            return self._settle_after(error, ended_claims)

    def _settle_halves(self, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        middle = len(ended_claims) // 2
        return {**self._settle(ended_claims[:middle]), **self._settle(ended_claims[middle:])}

    def _settle_after(self, error: DatabaseError, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        """Settle these claims after the database has refused to write them together."""
        if isinstance(error.__cause__, LockNotAvailable):
            free = self._set_locked_aside(ended_claims)
            if len(free) < len(ended_claims):
                return self._settle(free)
            # All rows are free by now. They are tried again later, because rows that are locked again and again would
            # make an endless loop here.
            return self._set_aside(ended_claims, BETWEEN_LOCK_CHECKS)
        # A row that the database refuses must not delay the others. So the batch is halved until that row is alone.
        if not is_of_a_row(error):
            raise error
        if len(ended_claims) > 1:
            return self._settle_halves(ended_claims)
        if class_of(error) not in OF_VALUES or ended_claims[0].outcome is UNSTORABLE:
            # An outcome that the table refuses now is kept. It is no failure of the task, whose function has ended.
            if refusals.allows():
                text = "The outcome of %s cannot be written, and is kept: %s"
                logger.warning(text, ended_claims[0].claim, one_line(error))
            return self._set_aside(ended_claims, BETWEEN_REFUSALS)
        return self._settle_as_failed(ended_claims[0], error)

    def _set_aside(self, ended_claims: list[EndedClaim], seconds: float) -> dict[int, Any]:
        for ended in ended_claims:
            self._locked.setdefault(ended.claim, ended)
        self._check_locked_at = time.monotonic() + seconds
        return {}

    def _settle_as_failed(self, ended: EndedClaim, error: DatabaseError) -> dict[int, Any]:
        """Settle a claim whose outcome has a value that cannot be stored."""
        if isinstance(ended.outcome, Failed):
            logger.error("The failure of %s cannot be stored.", ended.claim, exc_info=error)
            ended.outcome, ended.claim.log = UNSTORABLE, None
        else:
            ended.outcome = Failed(Failure.of(error))
        return self._settle([ended])


class History:
    """The counts of the settler since the last write, by minute.

    An error here must not stop the settler. If a write fails, the worker tries again a minute later, and drops the
    counts after ten minutes.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        # By minute, queue and function.
        self._pending: dict[tuple[int, str, str], Counts] = {}
        # The database's clock minus time.monotonic().
        self._clock = time.time() - time.monotonic()
        # Random, so that workers that have started together do not write together.
        self._write_at = time.monotonic() + random.uniform(MINUTE / 2, MINUTE)  # noqa: S311

    def set_clock(self) -> None:
        """Read the database's clock, by which minutes are counted. Call it in each new session."""
        self._clock = clock(self.using) - time.monotonic()

    def count(self, ended_claims: list[EndedClaim]) -> None:
        """Count claims that have just been settled."""
        minute = int((time.monotonic() + self._clock) // MINUTE * MINUTE)
        for (queue, path, kind), alike in _alike(ended_claims).items():
            # A claim that was given back is not an attempt.
            if kind is not GivenBack:
                _count(self._pending.setdefault((minute, queue, path), Counts()), NAMES[kind], alike)

    def due_in(self) -> float:
        """Return the seconds until the next write; infinity: there are no counts."""
        return max(0.0, self._write_at - time.monotonic()) if self._pending else math.inf

    def write(self) -> None:
        """Write the counts since the last write."""
        self._write_at = time.monotonic() + MINUTE
        self._count_steps()
        try:
            self._clock = add_numbers(self.using, self._pending) - time.monotonic()
        except DatabaseFailure:
            logger.warning("The numbers of tasks cannot be written. The worker tries again in a minute.", exc_info=True)
            oldest = max(minute for minute, *_ in self._pending) - MOST_MINUTES * MINUTE
            self._pending = {key: counts for key, counts in self._pending.items() if key[0] > oldest}
        else:
            self._pending.clear()

    def _count_steps(self) -> None:
        minute = int((time.monotonic() + self._clock) // MINUTE * MINUTE)
        for (queue, path, kind), number in take_counted_steps().items():
            counts = self._pending.setdefault((minute, queue, path), Counts())
            setattr(counts, kind, getattr(counts, kind) + number)


def waited(claim: Claim) -> float | None:
    """Return for how many seconds the task was ready until this claim; None: not known.

    A retry by a person sets ``run_after``. If the upkeep has made a task ready again, the date is not stored.
    """
    started_at = claim.started_at
    if claim.attempt > 1 and started_at is not None and claim.due_at < float(started_at):
        return None
    return claim.waited


def _alike(ended_claims: list[EndedClaim]) -> dict[tuple[str, str, type[Any]], list[EndedClaim]]:
    """Return the ended claims by queue, function and outcome. In most batches these are the same for all."""
    claims = list(map(CLAIM, ended_claims))
    parts = {*map(QUEUE, claims)}, {*map(PATH, claims)}, {*map(type, map(OUTCOME, ended_claims))}
    if {*map(len, parts)} == {1}:
        return {(parts[0].pop(), parts[1].pop(), parts[2].pop()): ended_claims}
    alike: dict[tuple[str, str, type[Any]], list[EndedClaim]] = {}
    for ended in ended_claims:
        alike.setdefault((ended.claim.queue, ended.claim.task_path, type(ended.outcome)), []).append(ended)
    return alike


def _count(counts: Counts, name: str, ended_claims: list[EndedClaim]) -> None:
    number = len(ended_claims)
    setattr(counts, name, getattr(counts, name) + number)
    step = max(1, number // MEASURED)
    measured = ended_claims[::step]
    # The first one also counts for the remainder.
    weight = number - step * (len(measured) - 1)
    for ended in measured:
        if ended.seconds is not None:
            counts.run[bucket_of(ended.seconds)] += weight
            counts.run_seconds += ended.seconds * weight
            wait = waited(ended.claim)
            if wait is not None:
                counts.wait[bucket_of(wait)] += weight
                counts.wait_seconds += wait * weight
        weight = step
