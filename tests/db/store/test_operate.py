"""The verbs of the admin and of ``locktasks``: each changes the tasks that its question has counted."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pglock.models import Attempt, Task, Waiter
from django_pglock.store.operate import MOVE, VERBS
from django_pglock.tasks.states import MOVES, TaskStatus
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db


@pytest.fixture(params=VERBS)
def verb(request):
    return VERBS[request.param]


def apply(verb):
    return verb.apply(Task.objects.all(), "other" if verb.takes_queue else "")


@pytest.mark.parametrize("block", [nullcontext, transaction.atomic], ids=["alone", "in the caller's transaction"])
def test_a_verb_changes_the_tasks_in_its_statuses_and_counts_them_before(verb, block):
    """There is one task of each status. The running one is stuck."""
    others = [make(status).pk for status in TaskStatus.values if status not in verb.statuses]
    before = list(Task.objects.order_by("pk").values())
    for status in verb.statuses:
        make(status)
    assert set(verb.movable(Task.objects.all(), "other").values_list("status", flat=True)) == verb.statuses
    with block():
        assert apply(verb) == len(verb.statuses)
    assert list(Task.objects.filter(pk__in=others).order_by("pk").values()) == before


@pytest.mark.django_db(transaction=True)
def test_a_verb_leaves_out_a_locked_row(verb, locked):
    """A worker claims the task at this moment, or another person retries it. The verb does not wait."""
    rows = [make(sorted(verb.statuses)[0]) for _ in range(2)]
    before = Task.objects.values().get(pk=rows[0].pk)
    with locked(rows[0].pk):
        assert apply(verb) == 1
    assert Task.objects.values().get(pk=rows[0].pk) == before


def add_tasks_that_no_verb_changes():
    """Each has a status from which a verb moves tasks, and a reason why it stays."""
    for _ in range(2):
        make("FAILED", unique_key="again", unique_scope="UNFINISHED")
    make("FAILED", unique_key="taken", unique_scope="UNFINISHED")
    make("READY", unique_key="taken", unique_scope="UNFINISHED", queue="other")
    make("RUNNING", cancel_requested_at=Now())
    make("SUCCESSFUL", unique_key="x", unique_scope="PERIOD", unique_until=Now() + timedelta(hours=1))
    awaited = make("SUCCESSFUL")
    Waiter.objects.create(awaited=awaited.pk, task=make("BLOCKED", queue="other"))


def test_a_verb_counts_no_task_that_it_does_not_change(verb):
    """The admin and ``locktasks`` show the count before they ask, and the task of a large change has the ids."""
    add_tasks_that_no_verb_changes()
    for status in TaskStatus.values:
        make(status)
    before = {row["id"]: row for row in Task.objects.values()}
    counted = set(verb.movable(Task.objects.all(), "other").values_list("pk", flat=True))
    assert apply(verb) == len(counted)
    after = {row["id"]: row for row in Task.objects.values()}
    assert {id_ for id_, row in before.items() if after.get(id_) != row} == counted


def test_a_verb_moves_tasks_only_as_the_table_of_moves_allows():
    """A cancel of a running task is a request, which moves nothing."""
    for name, verb in VERBS.items():
        Task.objects.all().delete()
        before = {make(status).pk: status for status in TaskStatus.values}
        apply(verb)
        moved = {(before[pk], now) for pk, now in Task.objects.values_list("pk", "status") if before[pk] != now}
        assert {now for _, now in moved} <= {"READY", "CANCELLED"}, name
        assert all(now in MOVES[TaskStatus(old)] for old, now in moved), name


def test_the_number_of_the_question_is_that_of_the_tasks_to_be_moved():
    """The admin asks for the queue on the page that shows the count, so that count has all waiting tasks."""
    for queue in ("default", "default", "other"):
        make(queue=queue)
    assert [MOVE.movable(Task.objects.all(), queue).count() for queue in ("", "other")] == [3, 2]


def test_each_verb_is_a_method_of_querysets_with_its_documentation():
    for name, verb in VERBS.items():
        method = getattr(Task.objects.all(), name)
        assert method.__doc__.startswith(str(verb.help))
        assert getattr(Task.objects, name).__name__ == name
    with pytest.raises(TypeError, match="queue"):
        Task.objects.move_to_queue()
    with pytest.raises(TypeError):
        Task.objects.retry("other")


def test_a_discarded_task_leaves_the_failures_and_keeps_its_attempts():
    task, other = fail(fingerprint=7), fail(fingerprint=8)
    ended_at = Task.objects.get(pk=task.pk).finished_at
    assert Task.objects.filter(fingerprint=7).discard() == 1
    task.refresh_from_db()
    assert (task.status, task.fingerprint, task.finished_at) == ("CANCELLED", None, ended_at)
    assert Attempt.objects.filter(task=task).count() == 1
    assert [group.fingerprint for group in Task.objects.failures()] == [8]
    assert Task.objects.filter(pk=task.pk).retry() == 1, "who has discarded too much can retry"
    other.refresh_from_db()
    assert other.status == "FAILED"


def test_deleted_tasks_go_with_their_attempts():
    fail(fingerprint=7)
    assert Task.objects.all().delete_finished() == 1
    assert not Attempt.objects.exists()
