"""A random walk over the verbs of tasks by several simulated workers, with the two invariants that matter most.

Never two live claims of one task; never a lost task.
"""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from django.db.models.functions import Now
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from django_pglock.models import Attempt, Task, Worker
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.outcome import (
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
from django_pglock.tasks.states import FINISHED, WAITING
from tests.sample import tasks

FAILURE = Failure("builtins.ValueError", "Traceback …")
OUTCOMES = st.sampled_from(
    [
        Succeeded(),
        Succeeded("1"),
        Failed(FAILURE),
        Retried(FAILURE, 0),
        Retried(FAILURE, 60),
        Interrupted(FAILURE),
        Released(),
        Abandoned(60),
        Snoozed(0),
        Snoozed(60),
        Cancelled(FAILURE),
    ]
)
PATH = "tests.sample.tasks.nothing"


class TasksAndWorkers(RuleBasedStateMachine):
    """The model: for each task its status and the claim that may settle it, if there is one."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        Attempt.objects.all().delete()
        Task.objects.all().delete()
        Worker.objects.all().delete()
        self.status: dict[int, str] = {}
        self.live: dict[int, tuple[int, UUID]] = {}
        self.accepted: set[tuple[int, int]] = set()
        self.asked: set[int] = set()

    @rule(later=st.booleans(), priority=st.integers(-100, 100))
    def enqueue(self, later, priority):
        from datetime import timedelta

        task = tasks.nothing.using(priority=priority, run_after=timedelta(hours=1) if later else None)
        self.status[int(task.enqueue().id)] = "SCHEDULED" if later else "READY"

    @rule(target=claims, limit=st.integers(1, 3))
    def claim(self, limit):
        worker = uuid4()
        Worker.objects.all().beat(worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
        rows = Task.objects.all()
        taken = rows.claims_of(
            rows.claim_statement(worker=worker, queue="default", paths=[PATH]).execute(limit), worker
        )
        ready = [id_ for id_, status in self.status.items() if status == "READY"]
        assert len(taken) == min(limit, len(ready)), "a claim takes what is ready, up to its limit"
        for each in taken:
            assert each.id not in self.live, "two live claims of one task"
            assert self.status[each.id] == "READY"
            self.status[each.id] = "RUNNING"
            self.live[each.id] = (each.attempt, worker)
        return multiple(*taken)

    @rule(claim=claims, outcome=OUTCOMES)
    def settle(self, claim: Claim, outcome):
        """Also again, and also long after the claim was lost: claims are not consumed."""
        accepted = Task.objects.all().settle([(claim, outcome)], claim.worker)
        is_mine = self.live.get(claim.id) == (claim.attempt, claim.worker)
        assert (claim.id in accepted) == is_mine, "accepted if and only if the claim is live"
        if is_mine:
            assert (claim.id, claim.attempt) not in self.accepted, "one claim, one accepted outcome"
            self.accepted.add((claim.id, claim.attempt))
            del self.live[claim.id]
            is_due = isinstance(outcome, (Retried, Snoozed)) and outcome.delay <= 0
            status = "READY" if is_due else outcome.status.value
            self.status[claim.id] = "CANCELLED" if claim.id in self.asked and status in WAITING else status
            self.asked.discard(claim.id)

    @rule(claim=consumes(claims))
    def worker_dies_and_its_tasks_are_rescued(self, claim: Claim):
        Worker.objects.filter(pk=claim.worker).delete()
        rescued = {each.id: each for each in Task.objects.all().rescue()}
        owned = {id_ for id_, (_, worker) in self.live.items() if worker == claim.worker}
        assert set(rescued) == owned, "the dead worker's tasks, and no others"
        for id_, each in rescued.items():
            assert (each.status == "CANCELLED") == (id_ in self.asked), "what was asked to end does not run again"
            self.asked.discard(id_)
            self.status[id_] = each.status
            del self.live[id_]

    @rule()
    def promote(self):
        Task.objects.filter(status="SCHEDULED").update(run_after=Now())
        Task.objects.all().promote()
        self._move({"SCHEDULED"}, "READY")

    @rule()
    def cancel(self):
        """What waits is cancelled; what runs keeps its claim."""
        running = {id_ for id_, status in self.status.items() if status == "RUNNING"}
        waiting = [id_ for id_, status in self.status.items() if status in WAITING]
        assert Task.objects.all().cancel() == len(waiting) + len(running - self.asked)
        self.asked |= running
        self._move(WAITING, "CANCELLED")

    @rule()
    def retry(self):
        Task.objects.all().retry()
        self._move(FINISHED - {"SUCCESSFUL"}, "READY")

    def _move(self, sources, target):
        for id_, status in self.status.items():
            if status in sources:
                self.status[id_] = target
                self.live.pop(id_, None)

    @invariant()
    def no_task_is_lost_and_none_is_elsewhere(self):
        assert dict(Task.objects.values_list("pk", "status")) == self.status

    @invariant()
    def only_running_tasks_are_asked_to_end(self):
        asked = Task.objects.filter(status="RUNNING", cancel_requested_at__isnull=False)
        assert set(asked.values_list("pk", flat=True)) == self.asked
        assert not Task.objects.filter(status__in=WAITING, cancel_requested_at__isnull=False).exists()

    @invariant()
    def every_running_task_has_exactly_its_live_claim(self):
        running = Task.objects.filter(status="RUNNING").values_list("pk", "attempts", "worker")
        assert {pk: (attempts, worker) for pk, attempts, worker in running} == self.live


@pytest.mark.django_db(transaction=True)
def test_no_walk_over_the_verbs_loses_a_task_or_claims_one_twice():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        TasksAndWorkers,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
