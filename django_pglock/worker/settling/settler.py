"""Writes outcomes in batches that form naturally.

What gathers while one write is on its way is the next batch: no delay when idle, large batches under load.

A row that somebody's open transaction has locked, as to cancel its task, must not hold up the others: its outcome is
held, and looked after now and then until the row is free.
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
from django_pglock.store.outcome import FINAL, NOT_AGAIN, Failed, Failure, Succeeded
from django_pglock.store.release import release
from django_pglock.store.settle import held, settle
from django_pglock.store.sql import rows_of
from django_pglock.store.wake import wake
from django_pglock.worker.in_flight import Ending, Hand
from django_pglock.worker.service import ConnectedService
from django_pglock.worker.settling.progress import Progress
from django_pglock.worker.settling.report import announce, announce_lost

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

logger = logging.getLogger("django_pglock.worker")

# What is asked of each of thousands of endings is asked by functions in C.
CLAIM, OUTCOME, TEXT = attrgetter("claim"), attrgetter("outcome"), attrgetter("outcome.result")
TASK_ID, LOCK_KEY, PROGRESS = attrgetter("claim.id"), attrgetter("claim.lock_key"), attrgetter("claim.progress")
IS_SETTLED, IS_HEARD = attrgetter("is_settled"), attrgetter("result")
#: Outcomes in one statement at most, and characters of their results: PostgreSQL takes a gigabyte, and memory is dear.
LARGEST_BATCH, LARGEST_TEXT = 1500, 20_000_000
#: Seconds for which endings gather that are written already: enough to be spared a statement for each.
LINGER = 0.005
#: Seconds between two looks at rows that somebody has locked.
BETWEEN_LOOKS = 0.1


#: Classes of SQLSTATE that tell of no row: what the statement names is not there, or not as it was when the statement
#: was prepared, or nothing can be written. As while a migration runs, or after a failover.
SCHEMA = ("0A", "25", "26", "42")
#: What is too large or too deep for PostgreSQL. psycopg takes it for an outage.
TOO_LARGE = "54"


def is_plain(batch: list[Ending]) -> bool:
    """Say whether these are all successes that are to be written, of which nobody hears: what most batches are."""
    return (
        {*map(type, map(OUTCOME, batch))} == {Succeeded}
        and not any(map(IS_HEARD, batch))
        and not any(map(IS_SETTLED, batch))
        and not any(map(PROGRESS, batch))
    )


def is_of_a_row(error: DatabaseError) -> bool:
    """Say whether one row may have met this error, so that the others can be written; not all, as in an outage."""
    state = str(getattr(error.__cause__, "sqlstate", None))[:2]
    return state == TOO_LARGE or (state not in SCHEMA and not isinstance(error, OperationalError))


class Settler(ConnectedService):
    """Takes endings from the outbox, settles them in batches, and announces what was accepted.

    An outcome stays in its hands until the database has answered: a lost connection costs time, never an outcome.
    ``scheduled`` is called when a task is to run again later.
    """

    name = "settler"

    def __init__(
        self, hand: Hand, using: str, worker: UUID, *, progress: Progress, scheduled: Callable[[], None]
    ) -> None:
        super().__init__(using)
        self.hand = hand
        self.worker = worker
        self.progress = progress
        self.scheduled = scheduled
        self._batch: list[Ending] = []
        self._followers: list[Ending] = []
        # Endings whose rows somebody has locked, and when to look at them again.
        self._held: dict[Claim, Ending] = {}
        self._look_at = 0.0
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
            self.hand.settling = len(self._batch) + len(self._held)
        if self._batch:
            self._followers, self._batch = self._write(self._batch), []
        if self._followers:
            # In hand until those who waited for them are ready: an empty hand has nothing more to bring about.
            self._let_through(self._followers)
            self.hand.let_go(self._followers)
            self._followers = []
        self.hand.settling = len(self._held)

    def finish(self) -> None:
        for claim in self._held:
            logger.warning("%r has ended, but somebody has locked its row. It will run again.", claim)

    def _gather(self) -> list[Ending]:
        batch: list[Ending | None] = [*self._freed()]
        if not batch:
            self.note_life(math.inf)
            with suppress(Empty):
                batch.append(self.hand.outbox.get(timeout=BETWEEN_LOOKS if self._held else None))
            self.note_life()
        self._gather_more(batch)
        if all(ending is not None and ending.is_settled and ending.claim.lock_key is None for ending in batch):
            # Nothing of this has to be written, and nobody's turn depends on it.
            self.stopping.wait(LINGER)
            self._gather_more(batch)
        # A task that is given up has ended already when its outcome is held.
        return self._without_held([ending for ending in batch if ending is not None])

    def _freed(self) -> list[Ending]:
        """Return the endings whose rows are no longer locked."""
        if not self._held or time.monotonic() < self._look_at:
            return []
        held, self._held = self._held, {}
        try:
            return self._hold(list(held.values()))
        except BaseException:
            self._held = held
            raise

    def _hold(self, endings: list[Ending]) -> list[Ending]:
        """Hold those of these endings whose rows somebody has locked, and return the others."""
        self._look_at = time.monotonic() + BETWEEN_LOOKS
        locked = held(self.using, [ending.claim for ending in endings])
        for ending in endings:
            if ending.claim.id in locked:
                self._held.setdefault(ending.claim, ending)
        return [ending for ending in endings if ending.claim.id not in locked]

    def _gather_more(self, batch: list[Ending | None]) -> None:
        try:
            while len(batch) < LARGEST_BATCH:
                batch.append(self.hand.outbox.get_nowait())
        except Empty:
            pass

    def _write(self, batch: list[Ending]) -> list[Ending]:
        """Write these endings, and return them without those that have to be held."""
        for ending in batch if self._held else ():
            # Held by a try before, which then failed.
            self._held.pop(ending.claim, None)
        if is_plain(batch):
            return self._write_plain(batch)
        open_ = [ending for ending in batch if ending.outcome is not None and not ending.is_settled]
        if unnoted := set(self.progress.note_last(ending.claim for ending in open_)):
            self._hold([ending for ending in open_ if ending.claim in unnoted])
            open_ = self._without_held(open_)
        return self._say(batch, open_, self._settle(open_) if open_ else {})

    def _write_plain(self, batch: list[Ending]) -> list[Ending]:
        """Write successes of which nobody hears."""
        accepted = self._settle_successes(batch)
        if len(accepted) < len(batch) or not is_plain(batch):
            # Lost, held, or refused by the database.
            return self._say(batch, batch, accepted)
        self.counts[Succeeded] += len(batch)
        return batch

    def _say(self, batch: list[Ending], open_: list[Ending], accepted: dict[int, Any]) -> list[Ending]:
        """Say what became of a batch, and return it without what is held. ``open_``: those that were to be settled."""
        batch, open_ = self._without_held(batch), self._without_held(open_)
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
        return batch

    def _without_held(self, endings: list[Ending]) -> list[Ending]:
        return [ending for ending in endings if ending.claim not in self._held] if self._held else endings

    def _note_ends(self, batch: list[Ending], lost: list[Ending]) -> None:
        self.counts.update(type(ending.outcome) for ending in batch)
        if lost:
            self.counts.subtract(type(ending.outcome) for ending in lost)
            self.counts[None] += len(lost)

    def _look_up_dates(self, endings: list[Ending]) -> None:
        """Find out when tasks finished that were settled by their own transactions, for those who hear of them."""
        if endings:
            ids = [ending.claim.id for ending in endings]
            dates = dict(rows_of("Task", self.using).filter(pk__in=ids).values_list("pk", "finished_at"))
            for ending in endings:
                date = dates.get(ending.claim.id)
                ending.finished_at = date and date.timestamp()

    def _let_through(self, endings: list[Ending]) -> None:
        """Let those through that waited for the keys of these tasks, or for their end. After the commit: gates.py."""
        keys = {*map(LOCK_KEY, endings)}
        ended = endings if is_plain(endings) else [ending for ending in endings if isinstance(ending.outcome, FINAL)]
        # Those that waited for an end first: they may have been enqueued before others of their key.
        released = release(self.using, map(TASK_ID, ended))
        admitted = admit(self.using, keys) if keys != {None} else 0
        if admitted or released:
            self.hand.tell_news()

    def _tell(self, endings: list[Ending]) -> None:
        """Let others know of tasks that are to run again, now or later."""
        again = [ending for ending in endings if not isinstance(ending.outcome, FINAL)]
        if again:
            wake(self.using, (ending.claim.queue for ending in again))
            self.hand.tell_news()
            self.scheduled()

    def _settle(self, endings: list[Ending]) -> dict[int, Any]:
        """Settle these and return what was accepted, one kind after the other: of each statement all or none."""
        others = [ending for ending in endings if not isinstance(ending.outcome, Succeeded)]
        successes = [ending for ending in endings if isinstance(ending.outcome, Succeeded)]
        return {**self._settle_successes(successes), **(self._settle_alike(others) if others else {})}

    def _settle_successes(self, endings: list[Ending]) -> dict[int, Any]:
        if len(endings) > 1 and sum(map(len, map(TEXT, endings))) > LARGEST_TEXT:
            middle = len(endings) // 2
            return {**self._settle_successes(endings[:middle]), **self._settle_successes(endings[middle:])}
        return self._settle_alike(endings) if endings else {}

    def _settle_alike(self, endings: list[Ending]) -> dict[int, Any]:
        try:
            outcomes = list(zip(map(CLAIM, endings), map(OUTCOME, endings), strict=True))
            return settle(self.using, outcomes, self.worker)
        except DatabaseError as error:
            if isinstance(error.__cause__, LockNotAvailable):
                return self._settle_unlocked(endings)
            # One row that the database refuses must not hold up the others: halve until it stands alone.
            if not is_of_a_row(error):
                raise
            if len(endings) > 1:
                middle = len(endings) // 2
                return {**self._settle_alike(endings[:middle]), **self._settle_alike(endings[middle:])}
            if isinstance(endings[0].outcome, Failed):
                # Let go, and the comparison of table and hand will run the task again.
                logger.exception("Not even the failure of %r can be stored.", endings[0].claim)
                return {}
            endings[0].outcome = Failed(Failure.of(error))
            return self._settle_alike(endings)

    def _settle_unlocked(self, endings: list[Ending]) -> dict[int, Any]:
        """Settle what nobody has locked, and hold the rest."""
        free = self._hold(endings)
        if len(free) < len(endings):
            return self._settle_alike(free) if free else {}
        # Free again. Later, lest it comes and goes for ever.
        for ending in endings:
            self._held.setdefault(ending.claim, ending)
        return {}
