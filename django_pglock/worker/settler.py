"""Writes outcomes in batches that form naturally.

What gathers while one write is on its way is the next batch: no delay when idle, large batches under load.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import DatabaseError, InterfaceError, OperationalError

from django_pglock.tasks.arguments import describe_exception
from django_pglock.tasks.outcome import FINAL, NOT_AGAIN, Failed, Failure
from django_pglock.worker.announcing import announce, announce_lost
from django_pglock.worker.hand import Ending, Hand
from django_pglock.worker.progress import Progress
from django_pglock.worker.service import ConnectedService

if TYPE_CHECKING:
    from django_pglock.tasks.queryset import TaskQuerySet

logger = logging.getLogger("django_pglock.worker")

#: Outcomes in one statement at most.
LARGEST_BATCH = 1500
#: Seconds for which endings gather that are written already: enough to be spared a statement for each.
LINGER = 0.005


#: Classes of SQLSTATE that tell of no row: what the statement names is not there, or not as it was when the statement
#: was prepared, or nothing can be written. As while a migration runs, or after a failover.
SCHEMA = ("0A", "25", "26", "42")


def is_of_the_schema(error: DatabaseError) -> bool:
    """Say whether every row would have met this error, and none will once the database is as it should be."""
    return str(getattr(error.__cause__, "sqlstate", None))[:2] in SCHEMA


class Settler(ConnectedService):
    """Takes endings from the outbox, settles them in batches, and announces what was accepted.

    An outcome stays in its hands until the database has answered: a lost connection costs time, never an outcome.
    ``scheduled`` is called when a task is to run again later.
    """

    name = "settler"

    def __init__(
        self, hand: Hand, rows: TaskQuerySet, worker: UUID, *, progress: Progress, scheduled: Callable[[], None]
    ) -> None:
        super().__init__(rows.db)
        self.hand = hand
        self.rows = rows
        self.worker = worker
        self.progress = progress
        self.scheduled = scheduled
        self._batch: list[Ending] = []
        self._followers: list[Ending] = []
        #: How many claims have ended in which way, by the class of the outcome; None: how many were lost.
        self.counts: Counter[type[Any] | None] = Counter()

    def wake(self) -> None:
        self.hand.outbox.put(None)

    def drain(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until every claim in hand is settled, and say whether that came."""
        deadline = time.monotonic() + timeout
        while self.hand.claims and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.hand.claims

    def turn(self) -> None:
        if not self._batch and not self._followers:
            self._batch = self._gather()
            self.hand.settling = len(self._batch)
        if self._batch:
            self._write(self._batch)
            self._followers, self._batch = self._batch, []
        if self._followers:
            # In hand until those who waited for them are ready: an empty hand has nothing more to bring about.
            self._let_through(self._followers)
            self.hand.let_go(self._followers)
            self._followers = []
            self.hand.settling = 0

    def _gather(self) -> list[Ending]:
        self.note_life(math.inf)
        batch = [self.hand.outbox.get()]
        self.note_life()
        self._gather_more(batch)
        if all(ending is not None and ending.is_settled and ending.claim.lock_key is None for ending in batch):
            # Nothing of this has to be written, and nobody's turn depends on it.
            self.stopping.wait(LINGER)
            self._gather_more(batch)
        return [ending for ending in batch if ending is not None]

    def _gather_more(self, batch: list[Ending | None]) -> None:
        try:
            while len(batch) < LARGEST_BATCH:
                batch.append(self.hand.outbox.get_nowait())
        except Empty:
            pass

    def _write(self, batch: list[Ending]) -> None:
        open_ = [ending for ending in batch if ending.outcome is not None and not ending.is_settled]
        self.progress.note_last(ending.claim for ending in open_)
        accepted = self._settle(open_) if open_ else {}
        self._look_up_dates([ending for ending in batch if ending.is_settled and ending.result is not None])
        lost = []
        for ending in batch:
            if ending.is_settled:
                announce(ending)
            elif ending.claim.id in accepted:
                ending.finished_at = accepted[ending.claim.id]
                if ending.finished_at is not None and not isinstance(ending.outcome, FINAL):
                    ending.outcome = NOT_AGAIN
                announce(ending)
            else:
                lost.append(ending)
                announce_lost(ending)
        self._note_ends(batch, lost)
        self._tell([ending for ending in open_ if ending.claim.id in accepted])

    def _note_ends(self, batch: list[Ending], lost: list[Ending]) -> None:
        self.counts.update(type(ending.outcome) for ending in batch)
        if lost:
            self.counts.subtract(type(ending.outcome) for ending in lost)
            self.counts[None] += len(lost)

    def _look_up_dates(self, endings: list[Ending]) -> None:
        """Find out when tasks finished that were settled by their own transactions, for those who hear of them."""
        if endings:
            ids = [ending.claim.id for ending in endings]
            dates = dict(self.rows.filter(pk__in=ids).values_list("pk", "finished_at"))
            for ending in endings:
                date = dates.get(ending.claim.id)
                ending.finished_at = date and date.timestamp()

    def _let_through(self, endings: list[Ending]) -> None:
        """Let those through that waited for the keys of these tasks, or for their end. After the commit: gates.py."""
        keys = {ending.claim.lock_key for ending in endings}
        # Those that waited for an end first: they may have been enqueued before others of their key.
        released = self.rows.release(ending.claim.id for ending in endings if isinstance(ending.outcome, FINAL))
        admitted = self.rows.admit(keys) if keys != {None} else 0
        if admitted or released:
            self.hand.hungry.set()

    def _tell(self, endings: list[Ending]) -> None:
        """Let others know of tasks that are to run again, now or later."""
        again = [ending for ending in endings if not isinstance(ending.outcome, FINAL)]
        if again:
            self.rows.wake(ending.claim.queue for ending in again)
            self.hand.hungry.set()
            self.scheduled()

    def _settle(self, endings: list[Ending]) -> dict[int, Any]:
        try:
            return self.rows.settle([(each.claim, each.outcome) for each in endings if each.outcome], self.worker)
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError as error:
            # One row that the database refuses must not hold up the others: halve until it stands alone.
            if is_of_the_schema(error):
                raise
            if len(endings) > 1:
                middle = len(endings) // 2
                return {**self._settle(endings[:middle]), **self._settle(endings[middle:])}
            logger.exception("The outcome of %r cannot be stored as it is.", endings[0].claim)
            if isinstance(endings[0].outcome, Failed):
                # Not even the failure can be: let go, and the comparison of table and hand will run the task again.
                return {}
            endings[0].outcome = Failed(Failure(*describe_exception(error)))
            return self._settle(endings)
