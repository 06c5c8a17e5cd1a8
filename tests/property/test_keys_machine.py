"""A random walk over all verbs of tasks by simulated workers: exclusion, order, and nothing that waits forever.

``PGLOCK_WALKS=300`` walks as many times, and further.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from django.db.models import Q
from django.db.models.functions import Now
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from django_pglock import enqueue_many
from django_pglock.errors import DuplicateTask
from django_pglock.models import Queue, RateLimit, Task, Worker
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.claim import claim_fair, claim_group
from django_pglock.store.outcome import FINAL, Succeeded
from django_pglock.store.rate import open_rates
from django_pglock.store.ready import promote
from django_pglock.store.release import orphaned_waiters, release
from django_pglock.store.requests_to_worker import requests_to
from django_pglock.store.rescue import rescue
from django_pglock.store.settle import give_back, settle
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.states import FINISHED, TaskStatus
from tests.property.laws import Laws, has_unique_key
from tests.property.simulation import LONG, OUTCOMES, beat_of, claim, clear, walk
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

KEYS = st.sampled_from(["a", "b"])
#: Mostly one, so that unique calls often meet.
NUMBERS = st.sampled_from([1, 1, 1, 2])
#: Waits for a place at its key and can be replaced while it does, also by a call with another key.
amend = keyed.save.using(lock="order:{text}")
FUNCTIONS = (
    *(keyed.step, keyed.call, keyed.refresh, keyed.rebuild, keyed.remind, keyed.save),
    *(keyed.digest, keyed.note, keyed.serve, keyed.trickle, tasks.nothing),
)
GROUPED = (keyed.digest.module_path, keyed.note.module_path)
PATHS = [function.module_path for function in FUNCTIONS]


def known(*statuses):
    """Tasks that there are, in one of these statuses."""

    def ids(walk):
        return [pk for pk, task in walk.now.items() if task.status in statuses]

    return st.runner().flatmap(lambda walk: st.sampled_from(ids(walk))), precondition(ids)


ANY, _ = known(*TaskStatus)
UNFINISHED, is_unfinished = known(*set(TaskStatus) - FINISHED)
ENDED_BADLY, has_ended_badly = known("FAILED", "CANCELLED")
SCHEDULED, is_scheduled = known("SCHEDULED")
_, is_for_later = known("SCHEDULED", "BLOCKED")
_, is_finished = known(*FINISHED)
HELD = st.runner().flatmap(lambda walk: st.sampled_from(list(walk.held.values())))
LOST = st.runner().flatmap(lambda walk: st.sampled_from(walk.lost))
#: More tasks would make the walk slow, and most of them would never be used.
is_small = precondition(lambda walk: sum(task.status not in FINISHED for task in walk.now.values()) < 8)
holds = precondition(lambda walk: walk.held)


class Enqueueing(Laws):
    """Tasks of all kinds."""

    @is_small
    @rule(key=KEYS, later=st.booleans(), priority=st.integers(-5, 5), keep=st.booleans())
    def enqueue(self, key, later, priority, keep):
        task = keyed.step.using(priority=priority, keep_result=3600 if keep else None)
        task.using(run_after=timedelta(hours=1) if later else None).enqueue(key)

    @is_small
    @rule(function=st.sampled_from([keyed.call, keyed.serve, keyed.trickle]), key=KEYS)
    def enqueue_many(self, function, key):
        ids = enqueue_many(function, [key, key, "c"])
        assert list(map(int, ids)) == sorted(set(map(int, ids)))

    @is_small
    @rule(number=NUMBERS)
    def enqueue_for_a_group(self, number):
        keyed.digest.enqueue(user=number, text="")

    @is_small
    @rule(key=KEYS, number=NUMBERS)
    def enqueue_for_a_group_behind_others(self, key, number):
        keyed.note.enqueue(order_id=key, author=number, text="")

    @is_small
    @rule(function=st.sampled_from([keyed.refresh, keyed.rebuild]), number=NUMBERS)
    def enqueue_unique(self, function, number):
        there = self._same(function, number)
        id_ = int(function.using(keep_result=3600).enqueue(number).id)
        assert [id_] == there or not there, "another beside one that is there"

    @is_small
    @rule(number=NUMBERS)
    def enqueue_many_unique(self, number):
        first, second, third = enqueue_many(keyed.rebuild, [number, 3, number])
        assert first == third != second

    @is_small
    @rule(number=NUMBERS)
    def enqueue_for_a_period(self, number):
        there = [pk for pk in self._same(keyed.remind, number) if self.now[pk].unique_until > self._clock()]
        with pytest.raises(DuplicateTask) if there else nullcontext() as refused:
            keyed.remind.enqueue(number)
        assert not there or [int(refused.value.result_id)] == there

    @is_small
    @rule(number=NUMBERS, calls=st.lists(st.tuples(KEYS, st.booleans(), st.booleans()), min_size=1, max_size=3))
    def enqueue_in_place_of_another(self, number, calls):
        """One more task behind each, which must be admitted when the first one leaves the key."""
        there = self._same(keyed.save, number)
        for key, has_lock, is_later in calls:
            task = (amend if has_lock else keyed.save).using(run_after=timedelta(hours=1) if is_later else None)
            id_ = int(task.enqueue(number, text=key).id)
            assert [id_] == there or not there
            assert Task.objects.get(pk=id_).kwargs == {"text": key}
            there = [id_]
            keyed.step.enqueue(key)

    @is_unfinished
    @is_small
    @rule(first=UNFINISHED, second=ANY, key=KEYS, later=st.booleans())
    def enqueue_after(self, first, second, key, later):
        task = keyed.step.using(run_after=timedelta(hours=1) if later else None)
        task.using(after={first, second}).enqueue(key)

    def _same(self, function, number):
        calls = (task for task in self.now.values() if task.task_path == function.module_path)
        return [task.pk for task in calls if task.args == [number] and has_unique_key(task)]

    @staticmethod
    def _clock():
        return Queue.objects.annotate(now=Now()).values_list("now", flat=True)[0]


class Working(Laws):
    """Three workers that claim, settle, also too late, die, and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = [uuid4() for _ in range(3)]
        self.alive: set[UUID] = set()
        self.held: dict[int, Claim] = {}
        #: Claims that were taken back or settled, by which a zombie may still settle.
        self.lost: list[Claim] = []

    @rule(number=st.integers(0, 2), limit=st.integers(1, 4))
    def claim(self, number, limit):
        worker = self._living(number)
        taken = claim(worker, limit, PATHS)
        assert [each.id for each in taken] == self._first(limit, lambda task: task.fair_key is None)
        self._hold(taken)
        for each in taken:
            if each.task_path in GROUPED:
                others = claim_group("default", each, limit=2, gather=0)
                self._hold(others)
                waiting = Task.objects.filter(lock_key=each.lock_key, status="BLOCKED", waits_for=0)
                overtaken = waiting.filter(pk__lt=max((other.id for other in others), default=0))
                assert not overtaken.exclude(unique_key__isnull=False), "a group overtook another task of its key"

    @rule(number=st.integers(0, 2), limit=st.integers(1, 4))
    def claim_in_turns(self, number, limit):
        taken = self._claim_fair(self._living(number), limit)
        ready = self._first(100, lambda task: task.fair_key is not None)
        # Each key gets its share of the limit, so one claim may leave something for the next.
        assert len(taken) <= limit
        assert bool(taken) == bool(ready)
        self._hold(taken)

    @rule(number=st.integers(0, 2), outcomes=st.lists(OUTCOMES, min_size=1, max_size=4))
    def work(self, number, outcomes):
        """Claim and settle in one step, so that many tasks come to their second attempt."""
        self.claim(number, len(outcomes))
        self._settle(list(zip(self.held.values(), outcomes, strict=False)))

    @precondition(lambda walk: walk.lost)
    @rule(claim=LOST, outcome=OUTCOMES)
    def settle_too_late(self, claim, outcome):
        self._settle([(claim, outcome)])

    @holds
    @rule(claim=HELD, outcome=OUTCOMES)
    def settle(self, claim, outcome):
        self._settle([(claim, outcome)])

    @holds
    @rule(claim=HELD, outcomes=st.lists(OUTCOMES, min_size=3, max_size=3))
    def settle_several(self, claim, outcomes):
        own = [each for each in self.held.values() if each.worker == claim.worker]
        self._settle(list(zip(own, outcomes, strict=False)))

    @holds
    @rule(claim=HELD, outcome=OUTCOMES, prunes=st.booleans())
    def settle_and_die(self, claim, outcome, prunes):
        """The worker dies after it has settled a task, and before the following statements."""
        assert self._accepted([(claim, outcome)])
        self.is_owed = True
        if prunes:
            self._prune(0)

    @holds
    @rule(claim=HELD)
    def die(self, claim):
        Worker.objects.filter(pk=claim.worker).delete()
        self.alive.discard(claim.worker)

    @holds
    @rule(claim=HELD)
    def find_a_claim_whose_answer_was_lost(self, claim):
        known = [each.id for each in self.held.values() if each is not claim]
        assert give_back("default", claim.worker, known, older_than=0) == 1
        self._let_go({claim.id})

    @precondition(lambda walk: walk._orphans())
    @rule()
    def rescue(self):
        rescued = {each.id for each in rescue("default")}
        assert rescued == self._orphans(), "the dead workers' tasks, and no others"
        self._let_go(rescued)

    def _living(self, number):
        worker = self.workers[number]
        beat_of(worker)
        self.alive.add(worker)
        return worker

    def _claim_fair(self, worker, limit):
        return claim_fair("default", worker=worker, queue="default", paths=PATHS, after="", limit=limit)[0]

    def _first(self, limit, is_meant):
        ready = [task for task in self.now.values() if task.status == "READY" and is_meant(task)]
        ready.sort(key=lambda task: (-task.priority, task.pk))
        return [task.pk for task in ready[:limit]]

    def _hold(self, taken):
        for each in taken:
            assert each.id not in self.live, "two live claims of one task"
            self.live[each.id] = (each.attempt, each.worker)
            self.held[each.id] = each

    def _let_go(self, ids):
        # In order, so that the same draws make the same walk.
        for id_ in sorted(ids):
            del self.live[id_]
            self.lost.append(self.held.pop(id_))

    def _prune(self, older_than):
        finished = Task.objects.filter(finished_at__isnull=False).exclude(
            unique_key__isnull=False, unique_until__gt=Now()
        )
        is_old = Q(expires_at__lte=Now()) | Q(expires_at__isnull=True, pk__gt=0 if older_than == 0 else 2**62)
        self.pruned = set(finished.filter(is_old).values_list("pk", flat=True)) - {pk for _, pk in self.waiters}
        statuses = FINISHED if older_than == 0 else ()
        assert Task.objects.all().prune(older_than=older_than, statuses=statuses) == len(self.pruned)

    def _orphans(self):
        return {id_ for id_, (_, worker) in self.live.items() if worker not in self.alive}

    def _accepted(self, pairs):
        accepted = settle("default", pairs, pairs[0][0].worker)
        mine = {each.id for each, _ in pairs if self.live.get(each.id) == (each.attempt, each.worker)}
        assert accepted.keys() == mine, "accepted if and only if the claim is live"
        self._let_go(mine)
        return accepted

    def _settle(self, pairs):
        """Do what the settler does."""
        accepted = self._accepted(pairs) if pairs else {}
        release("default", [each.id for each, outcome in pairs if isinstance(outcome, FINAL) or accepted.get(each.id)])
        admit("default", [each.lock_key for each, _ in pairs])


class Asking(Working):
    """Verbs of users."""

    @is_unfinished
    @rule(task=UNFINISHED)
    def cancel(self, task):
        assert Task.objects.filter(pk=task).cancel() == (self.now[task].cancel_requested_at is None)
        asked = {(id_, attempt) for worker in self.workers for id_, attempt in requests_to("default", worker).cancels}
        assert {id_ for id_, _ in asked} <= self.live.keys()
        assert task not in self.live or (task, self.live[task][0]) in asked

    @has_ended_badly
    @rule(task=ENDED_BADLY)
    def retry(self, task):
        retried = Task.objects.filter(pk=task).retry()
        self.retried = {task} if retried else set()

    @has_ended_badly
    @rule()
    def retry_all(self):
        finished = set(Task.objects.filter(status__in=["FAILED", "CANCELLED"]).values_list("pk", flat=True))
        Task.objects.all().retry()
        self.retried = finished & set(Task.objects.exclude(status__in=FINISHED).values_list("pk", flat=True))

    @is_scheduled
    @rule(task=SCHEDULED)
    def run_now(self, task):
        assert Task.objects.filter(pk=task).run_now() == 1

    @precondition(lambda walk: walk._orphans())
    @rule()
    def reset_stuck(self):
        orphans = self._orphans()
        assert Task.objects.all().reset_stuck() == len(orphans)
        self._let_go(orphans)

    @rule(number=st.integers(0, 2))
    def pause_and_resume(self, number):
        assert Queue.objects.pause("default")
        worker = self._living(number)
        assert not claim(worker, 10, PATHS)
        assert not self._claim_fair(worker, 10)
        assert Queue.objects.resume("default")


class Upkeeping(Working):
    """Upkeep, and the passage of time."""

    @is_for_later
    @rule()
    def time_passes(self):
        Task.objects.filter(run_after__gt=Now()).update(run_after=Now())
        Task.objects.filter(unique_until__gt=Now()).update(unique_until=Now())
        Task.objects.filter(expires_at__gt=Now()).update(expires_at=Now())
        RateLimit.objects.update(arrives_at=Now())
        RateLimit.objects.filter(opens_at__isnull=False).update(opens_at=Now())
        promote("default")
        admit("default", open_rates("default"))
        self.sweep()

    @precondition(lambda walk: walk.is_owed)
    @rule()
    def sweep(self):
        """Do what a crash has left undone."""
        release("default", (awaited for _, awaited in orphaned_waiters("default", 0) if awaited is not None))
        admit("default", blocked_keys("default", ""))
        self.is_owed = False

    @is_finished
    @rule(older_than=st.sampled_from([None, 0]))
    def prune(self, older_than):
        self._prune(older_than)


class KeyedTasks(Enqueueing, Asking, Upkeeping, RuleBasedStateMachine):
    """The rules are the verbs; what has to be true is asked of the table itself after each."""

    def __init__(self) -> None:
        clear()
        Queue.objects.create(name="other")
        super().__init__()

    @invariant()
    def all_laws_hold(self):
        self.obey()

    def teardown(self):
        if sys.exc_info()[0] is None:
            self.everything_finishes()

    def everything_finishes(self):
        """After all workers have settled and upkeep has run, no task waits, and no key is held."""
        self.sweep()
        for _ in range(len(self.now) + 1):
            self._settle([(each, Succeeded()) for each in list(self.held.values())])
            self.time_passes()
            self._hold(claim(self._living(0), 1000, PATHS))
            self._hold(self._claim_fair(self.workers[0], 1000))
            if not self.held:
                break
        self.obey()
        unfinished = [task for task in self.now.values() if task.status not in FINISHED]
        assert not unfinished, f"they wait forever: {unfinished}"


@pytest.mark.timeout(0 if LONG else 600)
@pytest.mark.django_db(transaction=True)
def test_a_random_walk_over_keyed_tasks_violates_no_invariant(slow_beats):
    walk(KeyedTasks, examples=7, steps=35)
