"""The verbs of the admin and of ``locktasks``: each changes the tasks that its question has counted."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pglock.keys import reserved
from django_pglock.models import Attempt, Task, Waiter
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import operate
from django_pglock.store.count import queue_counts
from django_pglock.store.operate import MOVE, VERBS
from django_pglock.tasks.states import MOVES, TaskStatus
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail
from tests.db.store.workers import NUMBER, register
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


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


# Running tasks whose worker is gone, reset by a person.
def test_stuck_returns_the_tasks_that_reset_stuck_resets(claim, slow_beats):
    living = uuid4()
    register(living)
    for _ in range(2):
        tasks.nothing.enqueue()
    claim(worker=living)
    [orphan] = claim()
    for status in set(TaskStatus.values) - {"RUNNING"}:
        make(status)
    assert [row.pk for row in Task.objects.all().stuck()] == [orphan.id]
    assert Task.objects.all().reset_stuck() == 1
    assert Task.objects.filter(status="RUNNING").count() == 1
    assert Task.objects.get(pk=orphan.id).status == "READY"
    assert Task.objects.values("status").distinct().count() == len(TaskStatus.values), "the others are as before"


def test_a_task_whose_worker_cannot_beat_but_has_a_session_that_works_is_not_stuck(claim, settings, eventually):
    """A person has locked the row of the worker for longer than the limit."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    register(worker := uuid4(), silent_for=600.0)
    tasks.nothing.enqueue()
    claim(worker=worker)
    session = dedicated_connection("default")
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s, %s)", (reserved.WORKER, NUMBER))
        assert not Task.objects.all().stuck().exists()
    finally:
        session.close()
    eventually(lambda: Task.objects.all().stuck().count() == 1)


# Scheduled tasks that a person runs now; and what follows a change, whatever the verb is.
def test_what_follows_a_change_follows_for_the_tasks_that_it_concerns(monkeypatch):
    """The task of a key that still runs, whose cancel is only requested, keeps its key."""
    woken, admitted, released = [], [], []
    monkeypatch.setattr(operate, "wake", lambda using, queues: woken.extend(queues))
    monkeypatch.setattr(operate, "admit_on_commit", lambda using, keys: admitted.extend(keys))
    monkeypatch.setattr(operate, "release_on_commit", lambda using, ids: released.extend(ids))
    make("SCHEDULED", queue="q")
    make("SCHEDULED", queue="r", lock_key="key 0")
    assert Task.objects.all().run_now() == 2
    assert (woken, set(admitted)) == (["q"], {None, "key 0"})
    Task.objects.all().delete()
    make("RUNNING", lock_key="key 1")
    waits = make("BLOCKED", lock_key="key 2")
    admitted.clear()
    assert Task.objects.all().cancel() == 2
    assert (woken, admitted, released) == (["q"], ["key 2"], [waits.pk])


def test_run_now_makes_the_time_since_ready_begin_anew():
    tasks.nothing.using(run_after=timedelta(days=1)).enqueue()
    Task.objects.update(enqueued_at=Now() - timedelta(days=1))
    assert Task.objects.all().run_now() == 1
    [counted] = queue_counts("default")
    assert counted.oldest_ready is not None
    assert counted.oldest_ready < 3600


# Moving waiting tasks to another queue.


@pytest.mark.parametrize("queue", ["", "x" * 129])
def test_a_name_that_no_queue_can_have_is_refused(queue):
    row = make()
    with pytest.raises(ValueError, match="queue"):
        Task.objects.all().move_to_queue(queue)
    row.refresh_from_db()
    assert row.queue == "default"


def test_a_queue_that_the_settings_do_not_list_is_refused(settings):
    name = "django_pglock.backend.PostgresBackend"
    settings.TASKS = {"default": {"BACKEND": name, "QUEUES": ["default", "other"]}}
    row = make()
    with pytest.raises(ValueError, match="lists the queue 'third'"):
        Task.objects.all().move_to_queue("third")
    assert Task.objects.filter(pk=row.pk).move_to_queue("other") == 1


def test_backends_of_another_database_do_not_count(settings):
    name = "django_pglock.backend.PostgresBackend"
    settings.TASKS = {
        "default": {"BACKEND": name, "QUEUES": ["default"]},
        "other": {"BACKEND": name, "QUEUES": ["other"], "OPTIONS": {"database": "replica"}},
    }
    with pytest.raises(ValueError, match="lists the queue 'other'"):
        Task.objects.all().move_to_queue("other")


@pytest.mark.parametrize(("status", "woken"), [("READY", ["other"]), ("SCHEDULED", []), ("BLOCKED", [])])
def test_workers_of_the_queue_are_woken_for_ready_tasks(monkeypatch, status, woken):
    made = []
    monkeypatch.setattr("django_pglock.store.operate.wake", lambda using, queues: made.extend(queues))
    make(status)
    assert Task.objects.all().move_to_queue("other") == 1
    assert made == woken


# Verbs change many tasks in windows, and in a transaction of the caller all at once.


@pytest.fixture
def windows(monkeypatch):
    """The ids of each window of two tasks that a verb changes. There is an interrupt before a third window."""
    seen, change = [], operate._change_window

    def change_and_note(tasks, ids, *values):
        if len(seen) == 2:
            seen.clear()
            raise KeyboardInterrupt
        seen.append(ids)
        return change(tasks, ids, *values)

    monkeypatch.setattr(operate, "WINDOW", 2)
    monkeypatch.setattr(operate, "_change_window", change_and_note)
    return seen


def test_an_interrupt_keeps_the_changes_of_finished_windows(windows):
    """With one transaction for all tasks, workers would wait for the locked rows until its end."""
    for _ in range(5):
        tasks.nothing.enqueue()
    with pytest.raises(KeyboardInterrupt):
        Task.objects.cancel()
    statuses = Task.objects.order_by("id").values_list("status", flat=True)
    assert list(statuses) == ["READY", *["CANCELLED"] * 4], "the newest first"
    Task.objects.all().cancel()
    windows.clear()
    with pytest.raises(KeyboardInterrupt):
        Task.objects.retry()
    assert list(statuses.all()) == [*["READY"] * 4, "CANCELLED"], "the oldest first"


def test_a_transaction_of_the_caller_changes_all_tasks_or_none(windows):
    ids = [int(tasks.nothing.enqueue().id) for _ in range(3)]
    with pytest.raises(KeyError), transaction.atomic():
        assert Task.objects.cancel() == 3
        raise KeyError
    assert windows == [[ids[2], ids[1]], [ids[0]]]
    assert set(Task.objects.values_list("status", flat=True)) == {"READY"}


def test_a_window_counts_dependents_that_an_earlier_window_cancelled(monkeypatch):
    """The end of one task cancels the other. That one was requested, too, so it is counted."""
    monkeypatch.setattr(operate, "WINDOW", 1)
    tasks.nothing.using(after=[tasks.nothing.enqueue()]).enqueue()
    assert Task.objects.cancel() == 2
