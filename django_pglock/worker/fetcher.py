"""Claims tasks: as many as the threads can use soon, when there is something, and else sleeps until there is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from django.apps import apps

from django_pglock.conf import get_settings
from django_pglock.tasks import registry
from django_pglock.tasks.wakeup import NEGATIVE_TTL
from django_pglock.worker.draining import Drain
from django_pglock.worker.hand import Hand
from django_pglock.worker.identity import Identity
from django_pglock.worker.last_chance import LastChance
from django_pglock.worker.queue_claims import WorkerClaims
from django_pglock.worker.queues import Queues
from django_pglock.worker.ready_queues import ReadyQueues
from django_pglock.worker.service import ConnectedService, logger

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim
    from django_pglock.tasks.queryset import TaskQuerySet

#: Seconds without any progress after which claims that no thread has begun are given back.
HOARDING = 0.5
#: Seconds between two looks while a worker that is to end when nothing is left waits for what is in hand.
DRAINING = 0.1
#: Seconds of uninterrupted work after which the worker no longer asks to be notified.
BUSY = 0.1
#: Seconds between two looks whether a task that has to be alone is, and whether it has ended.
BETWEEN_LOOKS = 0.05


class Fetcher(ConnectedService):
    """Keeps the inbox filled from the queues it serves, with tasks of one ``backend`` or, if that is None, of all.

    ``drain`` is finished when nothing is in hand and nothing is left that could be claimed; None: nobody asks.
    ``spent`` is called when the process has claimed as many tasks as it may.
    """

    name = "fetcher"

    def __init__(
        self,
        hand: Hand,
        rows: TaskQuerySet,
        identity: Identity,
        queues: Queues,
        *,
        listens: bool,
        backend: str | None = None,
        drain: Drain | None = None,
        spent: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rows.db)
        self.spent = spent
        self.drain = drain
        self.hand = hand
        self.rows = rows
        self.identity = identity
        self.queues = queues
        self.listens = listens
        self.backend = backend
        # Queues of which a notification told while the worker slept.
        self._told: set[str] = set()
        self._ready = ReadyQueues(rows)
        self._claims: WorkerClaims | None = None
        self._sleeping_since: float | None = None
        # Our row does not say that we sleep, although we have asked for news: it was removed, and made anew by a beat.
        self._is_forgotten = False
        self._busy_since: float | None = None
        # Who is to end when nothing is left runs also what would be put off, and then it would be left.
        self._last_chance = LastChance(hand, puts_off=drain is None)
        self._done = -1
        self._got_on_at = 0.0
        #: Whether it has looked for tasks in its present session.
        self.is_claiming = False

    def wake(self) -> None:
        self.hand.hungry.set()

    def hear(self, queue: str) -> None:
        """Take note that something is ready in ``queue``, and look there at once."""
        if self.queues.serves(queue):
            self._told.add(queue)
            self.hand.hungry.set()

    def ask_again(self) -> None:
        """Ask for news once more, if we have: nobody would send us any."""
        if self._sleeping_since is not None:
            self._is_forgotten = True
            self.hand.hungry.set()

    def finish(self) -> None:
        self._last_chance.end()

    def connected(self) -> None:
        # The answer to the last claim may have been lost with the session before. What is ours in the table and not
        # in our hands would be kept alive by our heartbeat for ever.
        self._sleeping_since = None
        if self.listens:
            # Not behind a pooler, where the session is others' as well.
            self.rows.prepare_session()
        # A thread may be claiming for its group at this moment. The order counts: what is claimed from now on is not
        # lost; what was claimed before is under way until it is in hand.
        before, under_way = self.rows.server_time(), self.hand.groups_under_way()
        lost = self.rows.release_unknown(self.identity.id, self.hand.task_ids(), before=before, except_keys=under_way)
        if lost:
            logger.warning("Gave back %d tasks whose claim was answered too late.", lost)

    def close(self) -> None:
        self.is_claiming = False
        super().close()

    def turn(self) -> None:
        # Cleared before the look: what sets it from now on is news.
        self.hand.hungry.clear()
        if self._is_forgotten:
            self._is_forgotten, self._sleeping_since = False, None
        self._give_back_what_only_waits()
        if self._last_chance.is_on():
            self._pause(BETWEEN_LOOKS)
            return
        # Before the claim: what makes a task ready afterwards is not ours, and not due yet.
        is_last_look = self.drain is not None and self._has_nothing_to_come()
        room = self.hand.room()
        if room == 0:
            self._pause(HOARDING)
        elif claims := self._claim(room):
            # The threads have waited for these, not these for the threads: the answer may have been long on its way.
            self._got_on_at = time.monotonic()
            self.hand.take(self._last_chance.sift(claims))
            self._note_busy()
            if self.hand.left == 0:
                self.spent()
        elif self.drain is not None:
            if is_last_look:
                self.drain.finish()
            self._pause(DRAINING)
        else:
            self._busy_since = None
            self._sleep()

    def _give_back_what_only_waits(self) -> None:
        """Give back claims that wait while no thread gets on: quick tasks were expected, and long ones came."""
        now = time.monotonic()
        if self.hand.done != self._done or self.hand.inbox.qsize() == 0:
            self._done, self._got_on_at = self.hand.done, now
        elif now - self._got_on_at >= HOARDING:
            self.hand.expect_cost(now - self._got_on_at)
            self.hand.give_back()

    def _has_nothing_to_come(self) -> bool:
        """Say whether nothing is in hand, and nothing due; and make ready what is. Only for a look at the end."""
        assert self.drain is not None  # noqa: S101 - for the type checker
        if self.hand.claims or self.drain.waits_for_rescue():
            return False
        due_in = self.rows.next_due_in()
        if due_in is not None and due_in <= 0:
            self.rows.promote()
            return False
        # Somebody may have promoted them and be about to let the first of each key through.
        self.rows.admit(self.rows.blocked_keys(""))
        return True

    def _pause(self, seconds: float) -> None:
        """Sleep until there is news, but look after claims that wait."""
        seconds = min(seconds, HOARDING) if self.hand.inbox.qsize() else seconds
        self.note_life(seconds)
        self.hand.hungry.wait(seconds)

    # Claim

    def _claim(self, room: int) -> list[Claim]:
        claims = self._claim_in_turn(room)
        if not claims and self._ready.is_from_memory:
            self._ready.forget()
            claims = self._claim_in_turn(room)
        if len(claims) < room:
            self._ready.forget()
        self.is_claiming = True
        return claims

    def _claim_in_turn(self, room: int) -> list[Claim]:
        claims: list[Claim] = []
        queues, of_worker = self._in_turn(), self._claims_of_known()
        of_worker.forget_others(queues)
        for queue in queues:
            claims += of_worker.of(queue).claim(room - len(claims))
            if len(claims) >= room:
                break
        return claims

    def _in_turn(self) -> list[str]:
        """Return the queues to look into. Where there is only one, or one was told of, nobody need ask for them."""
        told, self._told = self._told, set()
        if self.queues.only is not None:
            return [self.queues.only]
        is_asleep = self._sleeping_since is not None and self._busy_since is None
        return self.queues.in_turn(sorted(told) if told and is_asleep else self._ready.names())

    def _claims_of_known(self) -> WorkerClaims:
        """Return the claims of the functions that are known by now."""
        known = registry.known_paths()
        if self._claims is None or self._claims.paths != known:
            self._claims = WorkerClaims(
                self.rows,
                worker=self.identity.id,
                paths=known,
                is_fair=registry.has_fair(),
                backend=self.backend,
            )
        return self._claims

    # Sleep

    def _sleep(self) -> None:
        """Wait for news: first ask for it, then look again twice (wakeup.py says why), then until the poll."""
        if self.listens and self._sleeping_since is None:
            self._ask_for_news(is_sleeping=True)
            self._sleeping_since = time.monotonic()
            return
        slept = time.monotonic() - (self._sleeping_since or 0)
        poll = get_settings().POLL_INTERVAL
        pause = NEGATIVE_TTL * 1.2 if slept < NEGATIVE_TTL * 1.2 else random.uniform(0.8, 1.2) * poll  # noqa: S311
        self._pause(pause)

    def _note_busy(self) -> None:
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        if self._sleeping_since is not None and now - self._busy_since > BUSY:
            self._ask_for_news(is_sleeping=False)
            self._sleeping_since = None

    def _ask_for_news(self, *, is_sleeping: bool) -> None:
        workers = apps.get_model("django_pglock", "Worker").objects.using(self.using)
        workers.note_sleep(self.identity.id, is_sleeping=is_sleeping)
