"""The settler: writes outcomes to the database in batches, then has them reported.

The ended claims that gather while one write is in progress are the next batch: no delay when idle, large batches under
load.

Another transaction may have locked a task's row, for example to cancel the task. That must not delay the other outcomes
of the batch: the outcome of a locked row is set aside, and tried again from time to time until the row is free.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from queue import Empty
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import DatabaseError, OperationalError
from psycopg.errors import LockNotAvailable

from django_pglock.store.admit import admit
from django_pglock.store.logs import note_logs
from django_pglock.store.outcome import FINAL, NOT_AGAIN, Failed, Failure, Succeeded
from django_pglock.store.release import release
from django_pglock.store.settle import finish_dates, held, settle, settle_unobserved
from django_pglock.store.wake import wake
from django_pglock.worker.ended_claim import EndedClaim
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.service import ConnectedService
from django_pglock.worker.settling.history import History
from django_pglock.worker.settling.progress import Progress
from django_pglock.worker.settling.report import report, report_lost

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim
    from django_pglock.worker.shared_sessions import SharedSessions

logger = logging.getLogger("django_pglock.worker")

# Read of thousands of ended claims, so by functions in C. One name each: a name with a dot takes twice as long.
CLAIM, OUTCOME, TEXT = attrgetter("claim"), attrgetter("outcome"), attrgetter("result")
TASK_ID, LOCK_KEY, PROGRESS = attrgetter("id"), attrgetter("lock_key"), attrgetter("progress")
IS_SETTLED, RESULT = attrgetter("is_settled"), attrgetter("result")
#: The most outcomes in one statement, and the most characters of their results: PostgreSQL would take a gigabyte.
LARGEST_BATCH, LARGEST_TEXT = 1500, 20_000_000
#: Seconds for which ended claims gather that are written already, so that not each needs a statement of its own.
LINGER = 0.005
#: Seconds between two checks of rows that other transactions have locked.
BETWEEN_LOCK_CHECKS = 0.1
#: Classes of SQLSTATE that no single row causes: a table or column is missing, or has changed since the statement was
#: prepared, or nothing can be written. They occur while a migration runs, or after a failover.
SCHEMA = ("0A", "25", "26", "42")
#: The class of values that are too large or too deep for PostgreSQL. psycopg raises an OperationalError for it.
TOO_LARGE = "54"


def is_plain(batch: list[EndedClaim]) -> bool:
    """Say whether all of these are successes to write that nobody observes, as most batches are."""
    return (
        are_successes(batch)
        and not any(map(RESULT, batch))
        and not any(map(IS_SETTLED, batch))
        and not any(map(PROGRESS, map(CLAIM, batch)))
    )


def are_successes(batch: list[EndedClaim]) -> bool:
    """Say whether all of these have succeeded."""
    return {*map(type, map(OUTCOME, batch))} == {Succeeded}


def is_of_a_row(error: DatabaseError) -> bool:
    """Say whether a single row may have caused this error, so that the others can be written. Not in an outage."""
    state = str(getattr(error.__cause__, "sqlstate", None))[:2]
    return state == TOO_LARGE or (state not in SCHEMA and not isinstance(error, OperationalError))


class Settler(ConnectedService):
    """Takes ended claims from the outbox, settles them in batches, and reports what was accepted.

    It keeps an outcome until the database has answered: a lost connection costs time, never an outcome. ``scheduled``
    is called when a task will run again later.
    """

    name = "settler"

    def __init__(
        self,
        in_flight: InFlight,
        using: str,
        worker: UUID,
        *,
        progress: Progress,
        scheduled: Callable[[], None],
        sessions: SharedSessions | None = None,
    ) -> None:
        super().__init__(using, sessions)
        self.in_flight = in_flight
        self.worker = worker
        self.progress = progress
        self.scheduled = scheduled
        self._batch: list[EndedClaim] = []
        self._written: list[EndedClaim] = []
        # Ended claims whose rows another transaction has locked, and when to try them again.
        self._locked: dict[Claim, EndedClaim] = {}
        self._check_locked_at = 0.0
        #: How many claims have ended, by the class of the outcome; None: how many were lost.
        self.counts: Counter[type[Any] | None] = Counter()
        self.history = History(using)

    def connected(self) -> None:
        self.history.set_clock()

    def wake(self) -> None:
        self.in_flight.outbox.put(None)

    def drain(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until every claim in flight is settled, and say whether that came."""
        deadline = time.monotonic() + timeout
        while self.in_flight.claims and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.in_flight.claims

    def turn(self) -> None:
        if not self._batch and not self._written:
            self._batch = self._gather()
            self.in_flight.settling = len(self._batch) + len(self._locked)
            # Only now: no outcome is lost if this fails.
            self.retake_session()
        if self._batch:
            self._written, self._batch = self._write(self._batch), []
        if self._written:
            # They stay in flight until the tasks that waited for them are ready: a draining worker waits for that.
            self._release_and_admit(self._written)
            self.in_flight.remove(self._written)
            self._written = []
        self.in_flight.settling = len(self._locked)
        if self.history.due_in() == 0:
            self.history.write()

    def last_turn(self) -> None:
        if self.is_connected:
            self.history.write()

    def finish(self) -> None:
        for claim in self._locked:
            logger.warning("%s has ended, but another transaction has locked its row. The task will run again.", claim)

    def _gather(self) -> list[EndedClaim]:
        batch: list[EndedClaim | None] = [*self._freed()]
        # Under load there is always something to take: the session is kept, because to take one again has a cost.
        self._take_more(batch)
        if not batch:
            timeout = BETWEEN_LOCK_CHECKS if self._locked else self.history.due_in()
            self.note_life(math.inf)
            self.release_session()
            with suppress(Empty):
                batch.append(self.in_flight.outbox.get(timeout=timeout))
            self.note_life()
            self._take_more(batch)
        if all(ended is not None and ended.is_settled and ended.claim.lock_key is None for ended in batch):
            # Nothing of this has to be written, and no other task waits for it.
            self.stopping.wait(LINGER)
            self._take_more(batch)
        # A claim that is abandoned may have ended already, with its outcome set aside.
        return self._without_locked([ended for ended in batch if ended is not None])

    def _freed(self) -> list[EndedClaim]:
        """Return the ended claims whose rows are no longer locked."""
        if not self._locked or time.monotonic() < self._check_locked_at:
            return []
        held, self._locked = self._locked, {}
        try:
            return self._set_locked_aside(list(held.values()))
        except BaseException:
            self._locked = held
            raise

    def _set_locked_aside(self, ended_claims: list[EndedClaim]) -> list[EndedClaim]:
        """Set aside the ended claims whose rows another transaction has locked, and return the others."""
        self._check_locked_at = time.monotonic() + BETWEEN_LOCK_CHECKS
        locked = held(self.using, [ended.claim for ended in ended_claims])
        for ended in ended_claims:
            if ended.claim.id in locked:
                self._locked.setdefault(ended.claim, ended)
        return [ended for ended in ended_claims if ended.claim.id not in locked]

    def _take_more(self, batch: list[EndedClaim | None]) -> None:
        try:
            while len(batch) < LARGEST_BATCH:
                batch.append(self.in_flight.outbox.get_nowait())
        except Empty:
            pass

    def _write(self, batch: list[EndedClaim]) -> list[EndedClaim]:
        """Write these outcomes, and return the ended claims without those that were set aside."""
        for ended in batch if self._locked else ():
            # Set aside by an earlier try of this batch, which then failed.
            self._locked.pop(ended.claim, None)
        if is_plain(batch):
            return self._write_plain(batch)
        open_ = [ended for ended in batch if ended.outcome is not None and not ended.is_settled]
        if unnoted := set(self.progress.note_last(ended.claim for ended in open_)):
            self._set_locked_aside([ended for ended in open_ if ended.claim in unnoted])
            open_ = self._without_locked(open_)
        captured = [ended for ended in batch if ended.claim.log is not None]
        if logged := [ended.claim for ended in captured if isinstance(ended.outcome, Succeeded)]:
            note_logs(self.using, logged)
        return self._report(batch, open_, self._settle(open_) if open_ else {})

    def _write_plain(self, batch: list[EndedClaim]) -> list[EndedClaim]:
        """Write successes that nobody observes."""
        if sum(map(len, map(TEXT, map(OUTCOME, batch)))) > LARGEST_TEXT:
            return self._report(batch, batch, self._settle_successes(batch))
        try:
            accepted = self._settle_plain(batch)
        except DatabaseError as error:
            return self._report(batch, batch, self._settle_after(error, batch))
        if accepted is not None:
            # Some were lost.
            return self._report(batch, batch, dict.fromkeys(accepted))
        self.counts[Succeeded] += len(batch)
        self.history.count(batch)
        return batch

    def _settle_plain(self, batch: list[EndedClaim]) -> list[int] | None:
        """Settle these at once. Returns None if all were accepted, else the ids that were."""
        return settle_unobserved(self.using, list(map(CLAIM, batch)), list(map(TEXT, map(OUTCOME, batch))))

    def _report(self, batch: list[EndedClaim], open_: list[EndedClaim], accepted: dict[int, Any]) -> list[EndedClaim]:
        """Report a batch, and return it without what was set aside. ``open_``: the part that was to be settled."""
        batch, open_ = self._without_locked(batch), self._without_locked(open_)
        self._read_finish_dates([ended for ended in batch if ended.is_settled and ended.result is not None])
        lost = []
        for ended in batch:
            if ended.is_settled:
                report(ended)
            elif ended.claim.id in accepted:
                ended.finished_at = accepted[ended.claim.id]
                if ended.finished_at is not None and not isinstance(ended.outcome, FINAL):
                    ended.outcome = NOT_AGAIN
                report(ended)
            else:
                lost.append(ended)
                report_lost(ended)
        self._note_ends(batch, lost)
        self._announce_reruns([ended for ended in open_ if ended.claim.id in accepted])
        return batch

    def _without_locked(self, ended_claims: list[EndedClaim]) -> list[EndedClaim]:
        return [ended for ended in ended_claims if ended.claim not in self._locked] if self._locked else ended_claims

    def _note_ends(self, batch: list[EndedClaim], lost: list[EndedClaim]) -> None:
        self.counts.update(type(ended.outcome) for ended in batch)
        if lost:
            self.counts.subtract(type(ended.outcome) for ended in lost)
            self.counts[None] += len(lost)
            batch = list(set(batch).difference(lost))
        self.history.count(batch)

    def _read_finish_dates(self, ended_claims: list[EndedClaim]) -> None:
        """Read when tasks finished that their own transactions have settled, for the observers."""
        if ended_claims:
            dates = finish_dates(self.using, [ended.claim.id for ended in ended_claims])
            for ended in ended_claims:
                ended.finished_at = dates.get(ended.claim.id)

    def _release_and_admit(self, ended_claims: list[EndedClaim]) -> None:
        """Make ready the tasks that waited for the lock keys or for the end of these.

        Call it after the commit; store/admit.py says why.
        """
        keys = {*map(LOCK_KEY, map(CLAIM, ended_claims))}
        finals = ended_claims
        if not are_successes(ended_claims):
            finals = [ended for ended in ended_claims if isinstance(ended.outcome, FINAL)]
        # First those that waited for an end: they may have been enqueued before others of their key.
        released = release(self.using, map(TASK_ID, map(CLAIM, finals)))
        admitted = admit(self.using, keys) if keys != {None} else 0
        if admitted or released:
            self.in_flight.notify_fetcher()

    def _announce_reruns(self, ended_claims: list[EndedClaim]) -> None:
        """Tell other workers and services of tasks that will run again, now or later."""
        again = [ended for ended in ended_claims if not isinstance(ended.outcome, FINAL)]
        if again:
            wake(self.using, (ended.claim.queue for ended in again))
            self.in_flight.notify_fetcher()
            self.scheduled()

    def _settle(self, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        """Settle these and return when each accepted task finished, by id. Each statement writes all or nothing."""
        others = [ended for ended in ended_claims if not isinstance(ended.outcome, Succeeded)]
        successes = [ended for ended in ended_claims if isinstance(ended.outcome, Succeeded)]
        return {**self._settle_successes(successes), **(self._settle_alike(others) if others else {})}

    def _settle_successes(self, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        if len(ended_claims) > 1 and sum(map(len, map(TEXT, map(OUTCOME, ended_claims)))) > LARGEST_TEXT:
            middle = len(ended_claims) // 2
            return {**self._settle_successes(ended_claims[:middle]), **self._settle_successes(ended_claims[middle:])}
        return self._settle_alike(ended_claims) if ended_claims else {}

    def _settle_alike(self, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        try:
            return settle(
                self.using, list(zip(map(CLAIM, ended_claims), map(OUTCOME, ended_claims), strict=True)), self.worker
            )
        except DatabaseError as error:
            return self._settle_after(error, ended_claims)

    def _settle_after(self, error: DatabaseError, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        """Settle these after the database has refused to write them together."""
        if isinstance(error.__cause__, LockNotAvailable):
            return self._settle_unlocked(ended_claims)
        # A row that the database refuses must not delay the others: halve the batch until that row is alone.
        if not is_of_a_row(error):
            raise error
        if len(ended_claims) > 1:
            middle = len(ended_claims) // 2
            return {**self._settle_alike(ended_claims[:middle]), **self._settle_alike(ended_claims[middle:])}
        if isinstance(ended_claims[0].outcome, Failed):
            # Dropped. The heartbeat compares the table with what is in flight, and the task will run again.
            logger.exception("The failure of %s cannot be stored. The task will run again.", ended_claims[0].claim)
            return {}
        ended_claims[0].outcome = Failed(Failure.of(error))
        return self._settle_alike(ended_claims)

    def _settle_unlocked(self, ended_claims: list[EndedClaim]) -> dict[int, Any]:
        """Settle the rows that are not locked, and set the others aside."""
        free = self._set_locked_aside(ended_claims)
        if len(free) < len(ended_claims):
            return self._settle_alike(free) if free else {}
        # All are free by now. Tried again later, because the lock might come and go forever.
        for ended in ended_claims:
            self._locked.setdefault(ended.claim, ended)
        return {}
