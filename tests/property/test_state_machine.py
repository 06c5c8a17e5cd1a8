"""A random walk over the verbs of tasks by several simulated workers, with the two invariants that matter most.

Never two live claims of one task; never a lost task.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from django.db.models.functions import Now
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from django_pglock.models import Queue, Task, Worker
from django_pglock.store.outcome import Interrupted, Retried, Snoozed
from django_pglock.store.ready import promote
from django_pglock.store.rescue import rescue
from django_pglock.store.settle import settle
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.states import FINISHED, WAITING
from tests.property.simulation import LONG, OUTCOMES, beat_of, claim, clear, walk
from tests.sample import tasks

PATH = "tests.sample.tasks.nothing"


class TasksAndWorkers(RuleBasedStateMachine):
    """The model: for each task its status and the claim that may settle it, if there is one."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        clear()
        self.status: dict[int, str] = {}
        self.live: dict[int, tuple[int, UUID]] = {}
        self.accepted: set[tuple[int, int]] = set()
        self.asked: set[int] = set()
        self.is_paused = False

    @rule(later=st.booleans(), priority=st.integers(-100, 100))
    def enqueue(self, later, priority):
        task = tasks.nothing.using(priority=priority, run_after=timedelta(hours=1) if later else None)
        self.status[int(task.enqueue().id)] = "SCHEDULED" if later else "READY"

    @rule(target=claims, limit=st.integers(1, 3))
    def claim(self, limit):
        worker = uuid4()
        beat_of(worker)
        taken = claim(worker, limit, [PATH])
        ready = [id_ for id_, status in self.status.items() if status == "READY" and not self.is_paused]
        assert len(taken) == min(limit, len(ready)), "a claim takes what is ready, up to its limit"
        for each in taken:
            assert each.id not in self.live, "two live claims of one task"
            assert self.status[each.id] == "READY"
            self.status[each.id] = "RUNNING"
            self.live[each.id] = (each.attempt, worker)
        return multiple(*taken)

    @rule(claim=claims, outcome=OUTCOMES)
    def settle(self, claim: Claim, outcome):
        """A claim may settle repeatedly, and long after it was lost."""
        accepted = settle("default", [(claim, outcome)], claim.worker)
        is_mine = self.live.get(claim.id) == (claim.attempt, claim.worker)
        assert (claim.id in accepted) == is_mine, "accepted if and only if the claim is live"
        if is_mine:
            assert (claim.id, claim.attempt) not in self.accepted, "one claim, one accepted outcome"
            self.accepted.add((claim.id, claim.attempt))
            del self.live[claim.id]
            is_due = isinstance(outcome, (Interrupted, Retried, Snoozed)) and outcome.delay <= 0
            status = "READY" if is_due else outcome.status.value
            self.status[claim.id] = "CANCELLED" if claim.id in self.asked and status in WAITING else status
            self.asked.discard(claim.id)

    @rule(claim=consumes(claims))
    def worker_dies_and_its_tasks_are_rescued(self, claim: Claim):
        Worker.objects.filter(pk=claim.worker).delete()
        rescued = {each.id: each for each in rescue("default")}
        owned = {id_ for id_, (_, worker) in self.live.items() if worker == claim.worker}
        assert set(rescued) == owned, "the dead worker's tasks, and no others"
        for id_, each in rescued.items():
            assert (each.status == "CANCELLED") == (id_ in self.asked), "what was asked to end does not run again"
            self.asked.discard(id_)
            self.status[id_] = each.status
            del self.live[id_]

    @rule(claim=consumes(claims))
    def worker_dies_and_its_tasks_are_reset(self, claim: Claim):
        Worker.objects.filter(pk=claim.worker).delete()
        owned = {id_ for id_, (_, worker) in self.live.items() if worker == claim.worker}
        assert Task.objects.all().reset_stuck() == len(owned)
        for id_ in owned:
            self.status[id_] = "CANCELLED" if id_ in self.asked else "READY"
            self.asked.discard(id_)
            del self.live[id_]

    @rule()
    def run_now(self):
        Task.objects.all().run_now()
        self._move({"SCHEDULED"}, "READY")

    @rule()
    def pause_or_resume(self):
        verb = Queue.objects.resume if self.is_paused else Queue.objects.pause
        assert verb("default")
        self.is_paused = not self.is_paused

    @rule()
    def prune(self):
        finished = [id_ for id_, status in self.status.items() if status in FINISHED]
        assert Task.objects.all().prune() == 0, "all are young"
        assert Task.objects.all().prune(older_than=0, statuses=FINISHED) == len(finished)
        for id_ in finished:
            del self.status[id_]

    @rule()
    def promote(self):
        Task.objects.filter(status="SCHEDULED").update(run_after=Now())
        promote("default")
        self._move({"SCHEDULED"}, "READY")

    @rule()
    def cancel(self):
        """Waiting tasks are cancelled; running tasks keep their claims."""
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


@pytest.mark.timeout(0 if LONG else 600)
@pytest.mark.django_db(transaction=True)
def test_no_walk_over_the_verbs_loses_a_task_or_claims_one_twice(slow_beats):
    walk(TasksAndWorkers, examples=7, steps=35)
