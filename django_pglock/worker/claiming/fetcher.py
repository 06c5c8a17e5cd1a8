"""The fetcher: claims as many tasks as the threads can use soon, and sleeps while there are none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from django_pglock.conf import get_settings
from django_pglock.store.admit import admit
from django_pglock.store.give_back import give_back, server_time
from django_pglock.store.lock_keys import blocked_keys
from django_pglock.store.promote import next_due_in, promote
from django_pglock.store.wake import NEGATIVE_TTL, note_sleep, wake_others
from django_pglock.worker.claiming.claimer import Claimer
from django_pglock.worker.claiming.discovery import Discovery
from django_pglock.worker.claiming.drain import Drain
from django_pglock.worker.claiming.exclusive_run import ExclusiveRun
from django_pglock.worker.claiming.function_kinds import EMPTY_PAUSE, FunctionKind
from django_pglock.worker.claiming.queues import Queues
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.service import ConnectedService, logger

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim
    from django_pglock.worker.shared_sessions import SharedSessions

#: Seconds for which the fetcher of an idle worker waits after a claim. Python runs one thread at a time, so otherwise
#: the task would begin only when the fetcher has prepared its next look.
HEAD_START = 0.00005
#: Seconds without any progress after which claims that no thread has begun are given back.
HOARDING = 0.2
#: Seconds between two looks of a draining worker that waits for what is in flight.
DRAINING = 0.1
#: Seconds of uninterrupted work after which the worker no longer asks for notifications.
BUSY = 0.1
#: Seconds between two looks at whether a task that has to run alone is alone, and whether it has ended.
BETWEEN_LOOKS = 0.05
#: While notifications are sure to come, a worker polls so many times more rarely.
RARELY = 6
#: So many times more rarely still, while it also beats rarely: enough elder workers look, and the eldest one for all.
RESTING = 3


class Fetcher(ConnectedService):
    """Keeps the inboxes filled from the queues it serves, with tasks of one ``backend`` or, if that is None, of all.

    ``drain`` is finished when nothing is in flight and nothing is left that could be claimed; None: the worker does not
    drain. ``spent`` is called when the process has claimed as many tasks as it may.
    """

    name = "fetcher"

    def __init__(
        self,
        in_flight: InFlight,
        using: str,
        identity: Identity,
        queues: Queues,
        *,
        listens: bool,
        backend: str | None = None,
        drain: Drain | None = None,
        spent: Callable[[], None] = lambda: None,
        sessions: SharedSessions | None = None,
    ) -> None:
        super().__init__(using, sessions)
        self.spent = spent
        #: Whether other workers may take this one for dead, because its heartbeats do not reach the database.
        self.is_unheard: Callable[[], bool] = lambda: False
        #: Whether notifications are sure to reach this worker.
        self.is_listening: Callable[[], bool] = lambda: False
        #: Whether enough other workers look at once.
        self.is_resting: Callable[[], bool] = lambda: False
        self.drain = drain
        self.in_flight = in_flight
        self.identity = identity
        self.queues = queues
        self.listens = listens
        self.claimer = Claimer(in_flight, using, identity.id, queues, backend=backend)
        # Queues that notifications have named since the last claim.
        self._told: set[str] = set()
        self._discovery = Discovery(using, queues)
        # Whether the present look follows a notification.
        self._was_told = False
        #: Whether other workers that sleep rely on this one to look at once.
        self.has_followers = False
        # Queues that notifications have named to this worker and few others, in which it may have left something.
        self._left: set[str] = set()
        self._sleeping_since: float | None = None
        # Our row does not say that we sleep, although we have asked for news: it was removed, and a beat made it anew.
        self._is_forgotten = False
        self._busy_since: float | None = None
        # When the fetcher last looked how much room there is, and when it last claimed anything.
        self._looked_at = self._found_at = 0.0
        # A draining worker must not postpone a task that has to run alone: it would leave the task behind.
        self._exclusive_run = ExclusiveRun(in_flight, puts_off=drain is None)
        # How many claims had ended, and when that number last changed.
        self._ended = -1
        self._got_on_at = 0.0
        #: Whether it has looked for tasks in its present session.
        self.is_claiming = False

    def wake(self) -> None:
        self.in_flight.fetcher_wakeup.set()

    def hear(self, queue: str, is_prompt: bool = False) -> None:
        """Take note that something is ready in ``queue``, and look there at once.

        ``is_prompt``: others look a moment later only, or when this worker calls them.
        """
        if self.queues.serves(queue):
            self._told.add(queue)
            if is_prompt and self.has_followers:
                self._left.add(queue)
            self.in_flight.tell_news()

    def ask_again(self) -> None:
        """Ask for notifications once more, if we have asked: our row says that we are awake, so none would come."""
        if self._sleeping_since is not None:
            self._is_forgotten = True
            self.in_flight.tell_news()

    def finish(self) -> None:
        self._exclusive_run.end()

    def connected(self) -> None:
        # The answer to the last claim may have been lost with the session before. Such a task is ours in the table, but
        # not in flight here, and our heartbeat would keep it forever.
        self._sleeping_since = None
        if self.reconnects:
            self.in_flight.note_lost_answer()
        # A thread may be claiming for its group at this moment. The order matters: what is claimed from now on is not
        # lost; a claim from before is being made until it is in flight.
        before, under_way = server_time(self.using), self.in_flight.group_keys_being_claimed()
        known = self.in_flight.task_ids()
        lost = give_back(self.using, self.identity.id, known, before=before, except_keys=under_way)
        if lost:
            logger.warning("Gave back %d tasks because the answer to their claim was late.", lost)

    def close(self) -> None:
        self.is_claiming = False
        super().close()

    def turn(self) -> None:
        # Cleared before the look: what sets it from now on is news.
        self.in_flight.fetcher_wakeup.clear()
        if self._is_forgotten:
            self._is_forgotten, self._sleeping_since = False, None
        self._give_back_if_blocked()
        if self._exclusive_run.is_on():
            self._pause(BETWEEN_LOOKS)
            return
        # Before the claim: a task that becomes ready after this check is not part of the drain.
        is_last_look = self.drain is not None and self._has_nothing_to_come()
        rooms = self._look_around(is_last_look=is_last_look)
        if not rooms:
            self._note_full()
            self._pause(HOARDING)
        elif self._claim_and_begin(rooms):
            self._note_busy()
            self._note_taken(rooms)
            if self.in_flight.claims_left == 0:
                self.spent()
        elif self._has_learned():
            # Something was ready that this process did not know, and now does: claim it in the next turn.
            self.claimer.note_learned()
        elif self.drain is not None:
            # A thread whose outcome is settled may not be free yet. Then this look has left out functions of threads.
            if is_last_look and not self.claimer.leaves_out_a_kind(rooms):
                self.drain.finish()
            self._pause(DRAINING)
        elif self._leaves_tasks_to_others(rooms) and time.monotonic() - self._found_at < BUSY:
            # The other kind of functions keeps the worker busy, so it does not ask for notifications about this one.
            self._pause(EMPTY_PAUSE)
        else:
            self._busy_since = None
            self._sleep()

    def _look_around(self, *, is_last_look: bool) -> list[tuple[FunctionKind, int]]:
        """Take note of what is new, and return what there is room for."""
        if self._discovery.is_due:
            self._discovery.look()
        self._was_told = bool(self._told)
        if self.in_flight.has_news:
            self.in_flight.has_news = False
            self.claimer.pauses.note_news()
        if is_last_look:
            # It leaves out no kind that has room, as if nothing had been found full.
            self.claimer.was_full = False
        self._looked_at = time.monotonic()
        # Other workers would rescue what an unheard one claims, while it runs here.
        return [] if self.is_unheard() else self.claimer.rooms()

    def _claim_and_begin(self, rooms: list[tuple[FunctionKind, int]]) -> bool:
        """Claim tasks and have them begun; say whether there were any."""
        self.in_flight.is_claiming = True
        try:
            if claims := self._claim(rooms):
                # The threads have waited for these claims, and not the claims for the threads: the answer may have been
                # slow.
                self._got_on_at = self._found_at = time.monotonic()
                self.in_flight.begin_all(self._exclusive_run.sift(claims))
                if self._busy_since is None:
                    time.sleep(HEAD_START)
        finally:
            self.in_flight.is_claiming = False
        return bool(claims)

    def _claim(self, rooms: list[tuple[FunctionKind, int]]) -> list[Claim]:
        told, self._told = self._told, set()
        # A worker that is awake reads all queues: not every one sends it a notification.
        is_asleep = self._sleeping_since is not None and self._busy_since is None
        claims = self.claimer.claim(rooms, told=told if is_asleep else ())
        self.is_claiming = True
        return claims

    def _note_taken(self, rooms: list[tuple[FunctionKind, int]]) -> None:
        """Note that this worker has claimed something after a notification; call the others if there may be more."""
        if self.claimer.was_full or self.claimer.leaves_out_a_kind(rooms):
            self._call_others()
        else:
            self._left = set()

    def _leaves_tasks_to_others(self, rooms: list[tuple[FunctionKind, int]]) -> bool:
        """Say whether a look that found nothing has left out a kind of functions; then call the others."""
        if self.claimer.leaves_out_a_kind(rooms):
            self._call_others()
            return True
        # Another worker has taken it. If that is not so, the others find it a moment later.
        self._left = set()
        return False

    def _note_full(self) -> None:
        """Call the others if a notification has come and there is no room, and let nobody rely on this worker."""
        if self._left:
            self._call_others()
            if self._sleeping_since is not None:
                self._ask_for_news(is_sleeping=False)
                self._sleeping_since = None

    def _call_others(self) -> None:
        """Call the workers that wait for a moment, if something is left in the queues that notifications have named."""
        if self._left:
            # Another thread adds to the set.
            left, self._left = self._left, set()
            wake_others(self.using, left)

    def _has_learned(self) -> bool:
        is_urgent = self._was_told or self.drain is not None
        return self.claimer.was_ready and self._discovery.look(is_urgent=is_urgent)

    def _give_back_if_blocked(self) -> None:
        """Give back waiting claims while no thread gets on: quick tasks were expected, and long ones came."""
        now, threads = time.monotonic(), self.in_flight.threads
        if (ended := threads.ended) != self._ended or threads.waiting == 0:
            self._ended, self._got_on_at = ended, now
        elif now - self._got_on_at >= HOARDING:
            # A task that has run for so long is expected to run for as long again.
            threads.expect_cost(2 * (now - self._got_on_at))
            self.in_flight.give_back_waiting()

    def _has_nothing_to_come(self) -> bool:
        """Say whether nothing is in flight and nothing is due; make ready what is due. For a draining worker only."""
        assert self.drain is not None  # noqa: S101 - for the type checker
        if self.in_flight.claims or self.drain.waits_for_rescue():
            return False
        due_in = next_due_in(self.using)
        if due_in is not None and due_in <= 0:
            promote(self.using)
            return False
        # Another worker may have promoted tasks and not yet admitted the first of each key.
        admit(self.using, blocked_keys(self.using, ""))
        return True

    def _pause(self, seconds: float) -> None:
        """Sleep until there is news or a thread is nearly free; shorter while claims wait, to check them."""
        seconds = min(seconds, HOARDING) if self.in_flight.waiting else seconds
        seconds = min(
            seconds,
            self.in_flight.threads.next_change_in(self._looked_at),
            *map(self.claimer.pauses.next_in, self.claimer.put_off),
        )
        self.note_life(seconds)
        self.release_session()
        self.in_flight.fetcher_wakeup.wait(seconds)

    # Sleep

    def _sleep(self) -> None:
        """Ask for notifications, then look again twice (``store/wake.py`` says why), then sleep until the poll."""
        if self.listens and self._sleeping_since is None:
            self._ask_for_news(is_sleeping=True)
            self._sleeping_since = time.monotonic()
            # The look that follows must leave out no kind: nobody was notified of what came before.
            self.claimer.pauses.note_news()
            return
        slept = time.monotonic() - (self._sleeping_since or 0)
        if slept < NEGATIVE_TTL * 1.2:
            self._pause(NEGATIVE_TTL * 1.2)
        else:
            self._sleep_until_poll()

    def _sleep_until_poll(self) -> None:
        """Sleep for one poll interval, or for several while notifications are sure to come.

        The eldest worker looks for tasks whose notification was lost (``upkeep.py``), so they wait no longer.
        """
        poll = random.uniform(0.8, 1.2) * get_settings().POLL_INTERVAL  # noqa: S311
        for number in range(1, RARELY * RESTING + 1):
            until = time.monotonic() + poll
            # No notification comes again for a function that this turn has seen and, so soon after a look, not looked
            # up.
            self._pause(min(poll, self._discovery.next_in) if self.claimer.was_ready else poll)
            if time.monotonic() < until or self.in_flight.claims or not self.is_listening():
                return
            if number >= RARELY and not self.is_resting():
                return

    def _note_busy(self) -> None:
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        if self._sleeping_since is not None and now - self._busy_since > BUSY:
            self._ask_for_news(is_sleeping=False)
            self._sleeping_since = None

    def _ask_for_news(self, *, is_sleeping: bool) -> None:
        note_sleep(self.using, self.identity.id, is_sleeping=is_sleeping)
