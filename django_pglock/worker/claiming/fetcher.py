"""Claims tasks: as many as the threads can use soon, when there is something, and else sleeps until there is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from django_pglock.conf import get_settings
from django_pglock.store.admit import admit
from django_pglock.store.give_back import give_back, server_time
from django_pglock.store.lock_keys import blocked_keys
from django_pglock.store.plans import keep_plans_in
from django_pglock.store.promote import next_due_in, promote
from django_pglock.store.wake import NEGATIVE_TTL, note_sleep
from django_pglock.tasks import registry
from django_pglock.worker.claiming.discovery import Discovery
from django_pglock.worker.claiming.drain import Drain
from django_pglock.worker.claiming.exclusive_run import LastChance
from django_pglock.worker.claiming.function_kinds import ASYNC, BOTH, PAUSE, SYNC, Kind, Looks
from django_pglock.worker.claiming.queue_cursor import WorkerClaims
from django_pglock.worker.claiming.queues import Queues
from django_pglock.worker.claiming.ready_queues import ReadyQueues
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import Hand
from django_pglock.worker.service import ConnectedService, logger

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

#: Seconds without any progress after which claims that no thread has begun are given back.
HOARDING = 0.2
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
        using: str,
        identity: Identity,
        queues: Queues,
        *,
        listens: bool,
        backend: str | None = None,
        drain: Drain | None = None,
        spent: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(using)
        self.spent = spent
        self.drain = drain
        self.hand = hand
        self.identity = identity
        self.queues = queues
        self.listens = listens
        self.backend = backend
        # Queues of which a notification told while the worker slept.
        self._told: set[str] = set()
        self._ready = ReadyQueues(using)
        self._discovery = Discovery(using, queues)
        # Whether the last claim was tried because of a notification, and whether anything was ready then.
        self._was_told = self._was_ready = False
        self._paths: list[str] = []
        self._claims: dict[Kind, WorkerClaims] = {}
        # The last claim of both kinds took as many as it could, so more is there than the smaller room lets in.
        self._was_full = False
        self._looks = Looks()
        # Kinds that have room, and for which it is not the time to look yet.
        self._put_off: list[Kind] = []
        self._sleeping_since: float | None = None
        # Our row does not say that we sleep, although we have asked for news: it was removed, and made anew by a beat.
        self._is_forgotten = False
        self._busy_since: float | None = None
        # When it looked what there is room for, and when it has found something, the last time.
        self._looked_at = self._found_at = 0.0
        # Who is to end when nothing is left runs also what would be put off, and then it would be left.
        self._last_chance = LastChance(hand, puts_off=drain is None)
        self._ended = -1
        self._got_on_at = 0.0
        #: Whether it has looked for tasks in its present session.
        self.is_claiming = False

    def wake(self) -> None:
        self.hand.hungry.set()

    def hear(self, queue: str) -> None:
        """Take note that something is ready in ``queue``, and look there at once."""
        if self.queues.serves(queue):
            self._told.add(queue)
            self.hand.tell_news()

    def ask_again(self) -> None:
        """Ask for news once more, if we have: nobody would send us any."""
        if self._sleeping_since is not None:
            self._is_forgotten = True
            self.hand.tell_news()

    def finish(self) -> None:
        self._last_chance.end()

    def connected(self) -> None:
        # The answer to the last claim may have been lost with the session before. What is ours in the table and not
        # in our hands would be kept alive by our heartbeat for ever.
        self._sleeping_since = None
        if self.listens:
            # Not behind a pooler, where the session is others' as well.
            keep_plans_in(self.using)
        # A thread may be claiming for its group at this moment. The order counts: what is claimed from now on is not
        # lost; what was claimed before is under way until it is in hand.
        before, under_way = server_time(self.using), self.hand.groups_under_way()
        lost = give_back(self.using, self.identity.id, self.hand.task_ids(), before=before, except_keys=under_way)
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
        rooms = self._look_around(is_last_look=is_last_look)
        if not rooms:
            self._pause(HOARDING)
        elif claims := self._claim(rooms):
            # The threads have waited for these, not these for the threads: the answer may have been long on its way.
            self._got_on_at = self._found_at = time.monotonic()
            self.hand.take(self._last_chance.sift(claims))
            self._note_busy()
            if self.hand.left == 0:
                self.spent()
        elif self._has_learned():
            # Something was ready that this process did not know, and now does: claim it in the next turn.
            self._ready.forget()
            self._looks.note_news()
        elif self.drain is not None:
            if is_last_look:
                self.drain.finish()
            self._pause(DRAINING)
        elif self._leaves_out_a_kind(rooms) and time.monotonic() - self._found_at < BUSY:
            # The other kind of functions keeps the worker busy, so nobody is asked for news of this one.
            self._pause(PAUSE)
        else:
            self._busy_since = None
            self._sleep()

    def _look_around(self, *, is_last_look: bool) -> list[tuple[Kind, int]]:
        """Return what there is room for, after a look at what is new."""
        if self._discovery.is_due:
            self._discovery.look()
        self._was_told = bool(self._told)
        if self.hand.has_news:
            self.hand.has_news = False
            self._looks.note_news()
        # The last look leaves out no kind: nothing is in hand, so all have room.
        self._was_full = self._was_full and not is_last_look
        self._looked_at = time.monotonic()
        return self._rooms()

    def _has_learned(self) -> bool:
        return self._was_ready and self._discovery.look(is_urgent=self._was_told or self.drain is not None)

    def _give_back_what_only_waits(self) -> None:
        """Give back claims that wait while no thread gets on: quick tasks were expected, and long ones came."""
        now, threads = time.monotonic(), self.hand.threads
        if (ended := threads.ended) != self._ended or threads.waiting == 0:
            self._ended, self._got_on_at = ended, now
        elif now - self._got_on_at >= HOARDING:
            # What has run for so long is expected to run for as long again.
            threads.expect_cost(2 * (now - self._got_on_at))
            self.hand.give_back()

    def _has_nothing_to_come(self) -> bool:
        """Say whether nothing is in hand, and nothing due; and make ready what is. Only for a look at the end."""
        assert self.drain is not None  # noqa: S101 - for the type checker
        if self.hand.claims or self.drain.waits_for_rescue():
            return False
        due_in = next_due_in(self.using)
        if due_in is not None and due_in <= 0:
            promote(self.using)
            return False
        # Somebody may have promoted them and be about to let the first of each key through.
        admit(self.using, blocked_keys(self.using, ""))
        return True

    def _pause(self, seconds: float) -> None:
        """Sleep until there is news, or a thread is nearly free, but look after claims that wait."""
        seconds = min(seconds, HOARDING) if self.hand.waiting else seconds
        seconds = min(
            seconds, self.hand.threads.next_change_in(self._looked_at), *map(self._looks.next_in, self._put_off)
        )
        self.note_life(seconds)
        self.hand.hungry.wait(seconds)

    # Claim

    def _rooms(self) -> list[tuple[Kind, int]]:
        """Return of which kinds of functions to claim now, and how many of each."""
        if not self.hand.may_claim():
            return []
        left = self.hand.left
        room_of = {SYNC: self.hand.threads.room, ASYNC: self.hand.coroutines.room}
        rooms = [(kind, room_of[kind]()) for kind in self._kinds()]
        if left is not None:
            rooms = [(kind, min(left, room)) for kind, room in rooms]
        self._put_off = []
        if len(rooms) == 1:
            return [(kind, room) for kind, room in rooms if room]
        smaller = min(room for _, room in rooms)
        if smaller and not (self._was_full and left is None):
            # One statement for both: as long as that lets in all there is, nobody need ask twice.
            return [(BOTH, smaller)]
        self._put_off = [kind for kind, room in rooms if room and self._looks.next_in(kind) > 0]
        return [(kind, room) for kind, room in rooms if room and kind not in self._put_off]

    def _leaves_out_a_kind(self, rooms: list[tuple[Kind, int]]) -> bool:
        return len(rooms) == 1 and rooms[0][0] != BOTH and len(self._kinds()) > 1

    def _claim(self, rooms: list[tuple[Kind, int]]) -> list[Claim]:
        claims = self._claim_in_turn(rooms)
        if not claims and self._ready.is_from_memory:
            self._ready.forget()
            claims = self._claim_in_turn(rooms)
        self._was_full = len(claims) >= min(room for _, room in rooms)
        if len(claims) < sum(room for _, room in rooms):
            self._ready.forget()
        self.is_claiming = True
        return claims

    def _claim_in_turn(self, rooms: list[tuple[Kind, int]]) -> list[Claim]:
        ready, claims = self._ready_queues(), []
        self._was_ready = bool(ready)
        for kind, room in rooms:
            began = time.monotonic()
            queues = self._in_turn(ready, kind)
            of_kind = self._claim_from(queues, self._claims[kind], room)
            claims += of_kind
            if kind != BOTH:
                self._looks.note(kind, took=time.monotonic() - began, found=len(of_kind))
        return claims

    def _claim_from(self, queues: list[str], of_worker: WorkerClaims, room: int) -> list[Claim]:
        claims: list[Claim] = []
        of_worker.forget_others(queues)
        for queue in queues:
            claims += of_worker.of(queue).claim(room - len(claims))
            if len(claims) >= room:
                break
        return claims

    def _ready_queues(self) -> list[str]:
        """Return the queues to look into. Where there is only one, or one was told of, nobody need ask for them."""
        told, self._told = self._told, set()
        if self.queues.only is not None:
            return [self.queues.only]
        is_asleep = self._sleeping_since is not None and self._busy_since is None
        return sorted(told) if told and is_asleep else self._ready.names()

    def _in_turn(self, ready: list[str], kind: Kind) -> list[str]:
        if self.queues.only is not None:
            return ready
        return self.queues.in_turn(ready, whose=ASYNC if kind == ASYNC else SYNC)

    def _kinds(self) -> list[Kind]:
        """Return the kinds of functions that are known by now, and have their claims ready."""
        known = registry.known_paths()
        if self._paths != known or not self._claims:
            coroutines = [path for path in known if registry.is_async(path)]
            functions = [path for path in known if not registry.is_async(path)]
            paths: dict[Kind, list[str]] = {SYNC: functions, ASYNC: coroutines, BOTH: known}
            is_fair = registry.has_fair()
            self._paths = known
            self._claims = {
                kind: WorkerClaims(
                    self.using, worker=self.identity.id, paths=paths[kind], is_fair=is_fair, backend=self.backend
                )
                for kind in paths
            }
        # Where nothing is known at all, the claim says that there is nothing.
        return [kind for kind in (SYNC, ASYNC) if self._claims[kind].paths] or [SYNC]

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
        note_sleep(self.using, self.identity.id, is_sleeping=is_sleeping)
