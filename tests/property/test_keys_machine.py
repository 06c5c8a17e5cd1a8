"""A random walk over tasks with keys by simulated workers: exclusion, order, and nothing that waits for ever."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models import Count
from django.db.models.functions import Now
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from django_pglock.models import Attempt, Task, Waiter, Worker
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.outcome import (
    FINAL,
    Abandoned,
    Cancelled,
    Failed,
    Failure,
    Interrupted,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

FAILURE = Failure("builtins.ValueError", "Traceback …")
OUTCOMES = st.sampled_from(
    [
        *(Succeeded(), Succeeded(), Failed(FAILURE), Retried(FAILURE, 0), Retried(FAILURE, 60)),
        *(Interrupted(FAILURE), Released(), Abandoned(60), Snoozed(0), Snoozed(60), Cancelled(FAILURE)),
    ]
)
KEYS = st.sampled_from(["a", "b"])
PATHS = ["tests.sample.keyed_tasks.call", "tests.sample.keyed_tasks.refresh", "tests.sample.keyed_tasks.step"]
PATHS.append("tests.sample.tasks.nothing")
#: A task of such a key that will be tried again keeps it; of the others, it leaves its place.
ONE, THREE = "order:", "api:"


class KeyedTasks(RuleBasedStateMachine):
    """The rules are the verbs; what has to be true is asked of the table itself after each."""

    claims = Bundle("claims")
    enqueued = Bundle("enqueued")

    def __init__(self) -> None:
        super().__init__()
        for model in (Attempt, Waiter, Task, Worker):
            model.objects.all().delete()
        self.count = 0
        self.admitted: set[int] = set()

    def _new(self, result):
        self.count = Task.objects.count()
        return result.id

    @rule(target=enqueued, key=KEYS, later=st.booleans(), priority=st.integers(-5, 5))
    def enqueue_locked(self, key, later, priority):
        task = keyed.step.using(priority=priority, run_after=timedelta(hours=1) if later else None)
        return self._new(task.enqueue(key))

    @rule(target=enqueued, key=KEYS)
    def enqueue_three_at_once(self, key):
        return self._new(keyed.call.enqueue(key))

    @rule(target=enqueued, number=st.integers(1, 2))
    def enqueue_unique(self, number):
        return self._new(keyed.refresh.enqueue(number))

    @rule(target=enqueued, first=enqueued, second=enqueued, key=KEYS)
    def enqueue_after(self, first, second, key):
        existing = {str(pk) for pk in Task.objects.values_list("pk", flat=True)}
        return self._new(keyed.step.using(after={first, second} & existing).enqueue(key))

    @rule(target=claims, limit=st.integers(1, 4))
    def claim(self, limit):
        worker = uuid4()
        Worker.objects.all().beat(worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
        rows = Task.objects.all()
        taken = rows.claims_of(rows.claim_statement(worker=worker, queue="default", paths=PATHS).execute(limit), worker)
        return multiple(*taken)

    @rule(claim=claims, outcome=OUTCOMES)
    def settle(self, claim: Claim, outcome):
        """Also again, and long after the claim was lost. What follows is what the settler does."""
        rows = Task.objects.all()
        rows.settle([(claim, outcome)], claim.worker)
        rows.admit([claim.lock_key])
        rows.release([claim.id] if isinstance(outcome, FINAL) else [])

    @rule(claim=consumes(claims))
    def its_worker_dies(self, claim: Claim):
        Worker.objects.filter(pk=claim.worker).delete()
        Task.objects.all().rescue()

    @rule()
    def time_passes(self):
        Task.objects.filter(status="SCHEDULED").update(run_after=Now())
        Task.objects.all().promote()

    @rule(task=enqueued)
    def cancel(self, task):
        Task.objects.filter(pk=task).exclude(status="RUNNING").cancel()

    @rule()
    def retry_all(self):
        Task.objects.all().retry()

    @rule()
    def run_all_now(self):
        Task.objects.all().run_now()

    @invariant()
    def no_task_vanishes(self):
        assert Task.objects.count() == self.count

    @invariant()
    def no_more_than_allowed_have_a_key(self):
        admitted = Task.objects.filter(status__in=["READY", "RUNNING"], lock_key__isnull=False)
        for row in admitted.values("lock_key").annotate(number=Count("pk")):
            assert row["number"] <= (1 if row["lock_key"].startswith(ONE) else 3), row

    @invariant()
    def nobody_is_let_through_before_one_of_its_key_that_waited_longer(self):
        before, self.admitted = self.admitted, set()
        for task in Task.objects.filter(lock_key__startswith=ONE, status__in=["READY", "RUNNING"]):
            self.admitted.add(task.pk)
            if task.pk not in before:
                waiting = Task.objects.filter(lock_key=task.lock_key, status="BLOCKED", waits_for=0, pk__lt=task.pk)
                assert not waiting.exists(), "it overtook another of its key"

    @invariant()
    def whoever_waits_for_a_key_waits_for_somebody(self):
        waiting = Task.objects.filter(status="BLOCKED", waits_for=0).values_list("lock_key", flat=True)
        for key in set(waiting):
            of_key = Task.objects.filter(lock_key=key)
            admitted = of_key.filter(status__in=["READY", "RUNNING"]).count()
            held = of_key.filter(status="SCHEDULED", started_at__isnull=False).exists() and key.startswith(ONE)
            assert held or admitted == (1 if key.startswith(ONE) else 3), f"nobody has {key}, and somebody waits"

    @invariant()
    def whoever_waits_for_others_is_counted(self):
        noted = Counter(Waiter.objects.values_list("task_id", flat=True))
        for task in Task.objects.filter(status="BLOCKED", waits_for__gt=0):
            assert task.waits_for == noted[task.pk]
            awaited = Waiter.objects.filter(task=task).values("awaited")
            assert not Task.objects.filter(pk__in=awaited, finished_at__isnull=False).exists(), "it waits in vain"

    @invariant()
    def of_what_is_unique_one_waits(self):
        waiting = Task.objects.filter(unique_key__isnull=False, finished_at__isnull=True, attempts=0)
        assert all(number == 1 for number in Counter(waiting.values_list("unique_key", flat=True)).values())


@pytest.mark.django_db(transaction=True)
def test_no_walk_over_keyed_tasks_breaks_exclusion_or_order_or_leaves_one_waiting():
    from hypothesis.stateful import run_state_machine_as_test

    assert tasks
    run_state_machine_as_test(
        KeyedTasks,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
