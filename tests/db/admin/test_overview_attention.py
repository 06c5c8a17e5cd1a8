"""The sentences of the overview: each says one kind of problem, and leads to the list that shows it."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from inspect import isgeneratorfunction

import pytest
from django.db import connections
from django.db.models.functions import Now

from django_pglock import lock
from django_pglock.admin import overview_attention as sentences
from django_pglock.models import AdvisoryLock, Queue, Schedule, Task, Worker
from tests.conftest import NEVER
from tests.db.admin.visits import add_attempt, make, start_worker
from tests.db.locks.sessions import Somebody

pytestmark = pytest.mark.django_db

HOUR = timedelta(hours=1)
TRACE = """Traceback (most recent call last):
  File "/home/shop/bank.py", line 88, in charge
    connect()
ConnectionError: the bank is away
"""


def texts(found):
    return [each.text for each in found]


def fail(count, path="shop.bank.charge", *, exception="builtins.ConnectionError", at=None, trace=TRACE, fingerprint=7):
    about = {"task_path": path, "fingerprint": fingerprint, "finished_at": at or Now()}
    for row in [make("FAILED", **about) for _ in range(count)]:
        add_attempt(row, exception=exception, traceback=trace)


def test_failures_of_a_function_with_exception_and_place(facts):
    fail(1)
    [sentence] = sentences.failing_functions(facts)
    assert re.fullmatch(r"1 failure of charge, \d+ s ago: ConnectionError in bank.py:88", sentence.text)
    assert sentence.url == "/admin/django_pglock/failuregroup/"
    fail(2)
    [sentence] = sentences.failing_functions(facts)
    assert sentence.text.startswith("3 failures of charge, the first ")


def test_failures_of_another_day_need_no_attention(facts):
    fail(1, at=Now() - timedelta(days=2))
    assert texts(sentences.failing_functions(facts)) == []


def test_most_failures_come_first(facts):
    for number in range(3):
        fail(1 + number % 2, f"shop.f{number}", fingerprint=number, trace="", exception="")
    found = texts(sentences.failing_functions(facts))
    assert found[0].startswith("2 failures of f1, ")
    assert found[0].endswith(": the exception is not known")


def test_no_worker_is_running(facts):
    [sentence] = sentences.no_worker(facts)
    assert sentence.text == "No worker is running. Start one: python manage.py runlockworker"
    assert sentence.url == "/admin/django_pglock/worker/"


def test_the_overview_reports_no_missing_worker_if_one_is_alive(facts):
    start_worker()
    Worker.objects.filter(pk=start_worker()).update(heartbeat_at=Now() - HOUR)
    assert texts(sentences.no_worker(facts)) == []


def test_a_project_without_tasks_needs_no_worker(facts, settings):
    settings.TASKS = {}
    assert texts(sentences.no_worker(facts)) == []


def test_running_tasks_of_a_dead_worker_are_stuck(facts):
    make("RUNNING", worker=start_worker())
    assert texts(sentences.stuck_tasks(facts)) == []
    make("RUNNING")
    [sentence] = sentences.stuck_tasks(facts)
    assert sentence.text == "1 running task is stuck: its worker is dead."
    assert sentence.url == "/admin/django_pglock/task/?attention=stuck"


def test_paused_queues_with_name_time_and_reason(facts):
    Queue.objects.create(name="open")
    Queue.objects.pause("mail", by="anna", reason="The provider is down.")
    Queue.objects.pause("reports")
    Queue.objects.paused().update(paused_at=Now() - HOUR)
    assert texts(sentences.paused_queues(facts)) == [
        "Queue mail has been paused for 1\xa0hour. (anna: The provider is down.)",
        "Queue reports has been paused for 1\xa0hour.",
    ]


def test_a_few_problems_of_a_kind_are_named(facts):
    start_worker()
    for number in range(sentences.FEW + 2):
        Queue.objects.pause(f"q{number}")
    found = list(sentences.attention(facts))
    assert (len(found), found[-1].text) == (sentences.FEW + 1, "There are more problems of this kind.")
    assert found[-1].url == "/admin/django_pglock/queue/?paused=1"


def test_the_oldest_due_task(facts):
    make("SCHEDULED")
    make("SCHEDULED", run_after=Now() + HOUR)
    assert texts(sentences.late_tasks(facts)) == []
    late = make("SCHEDULED", run_after=Now() - HOUR)
    make("SCHEDULED", run_after=Now() - HOUR / 2)
    [sentence] = sentences.late_tasks(facts)
    assert sentence.text.startswith("The oldest due task has been due for 1\xa0hour,")
    assert sentence.text.endswith(f"nothing #{late.pk}.")
    assert sentence.url == f"/admin/django_pglock/task/{late.pk}/change/"


def test_queues_whose_oldest_ready_task_has_waited_for_long(facts):
    Queue.objects.pause("paused")
    for queue, hours in (("mail", 1), ("reports", 2), ("new", 0), ("paused", 3)):
        make(queue=queue, run_after=None, enqueued_at=Now() - hours * HOUR)
    assert texts(sentences.long_waits(facts)) == [
        "The oldest ready task of queue reports has waited for 2\xa0hours.",
        "The oldest ready task of queue mail has waited for 1\xa0hour.",
    ]
    [first, _] = sentences.long_waits(facts)
    assert first.url == "/admin/django_pglock/task/?status__exact=READY&queue=reports"


def test_tasks_that_have_waited_for_their_lock_keys_for_long(facts):
    make("BLOCKED", lock_key="order:1", waits_for=0)
    assert texts(sentences.blocked_tasks(facts)) == []
    Task.objects.update(enqueued_at=Now() - HOUR)
    make("BLOCKED", lock_key="order:2", waits_for=0)
    oldest = Task.objects.earliest("pk").pk
    [sentence] = sentences.blocked_tasks(facts)
    assert sentence.text == (f"Tasks wait for lock keys; the oldest blocked task, #{oldest}, has waited for 1\xa0hour.")
    assert "order" not in sentence.text, "a key may have redacted values"
    assert sentence.url == "/admin/django_pglock/task/?status__exact=BLOCKED"


def test_tasks_that_wait_only_for_other_tasks_need_no_attention(facts):
    make("BLOCKED", enqueued_at=Now() - HOUR)
    assert texts(sentences.blocked_tasks(facts)) == []


def test_ready_tasks_that_no_worker_knows(facts):
    make(enqueued_at=Now() - HOUR)
    start_worker(task_paths=["another.function"])
    [sentence] = sentences.unknown_functions(facts)
    path = "tests.sample.tasks.nothing"
    assert sentence.text == f"No worker knows {path}; the oldest of its ready tasks has waited for 1\xa0hour."
    assert sentence.url == f"/admin/django_pglock/task/?status__exact=READY&task_path={path}"
    start_worker(task_paths=[path])
    assert texts(sentences.unknown_functions(facts)) == []


def test_without_a_worker_no_function_is_called_unknown(facts):
    make()
    assert texts(sentences.unknown_functions(facts)) == []


def test_schedules_that_are_overdue(facts):
    for name, hours, is_enabled in (("a.late", 1, True), ("a.disabled", 1, False), ("a.coming", -1, True)):
        Schedule.objects.create(
            name=name, task_path=name, expression="*", next_at=Now() - hours * HOUR, is_enabled=is_enabled
        )
    [sentence] = sentences.overdue_schedules(facts)
    assert sentence.text == "The schedule of a.late has been overdue for 1\xa0hour: no worker enqueues it."
    assert sentence.url == "/admin/django_pglock/schedule/?is_enabled__exact=1"


@pytest.mark.django_db(transaction=True)
def test_a_lock_with_waiters(facts, monkeypatch, eventually):
    somebody = Somebody()
    waiter = threading.Thread(target=wait_for_lock, args=("report",), daemon=True)
    try:
        somebody.holds("report")
        waiter.start()
        eventually(lambda: AdvisoryLock.objects.all().waiting().filter(since__isnull=False).exists())
        monkeypatch.setattr(sentences, "LONG_FOR_LOCK", sentences.LONG)
        assert texts(sentences.awaited_locks(facts)) == [], "a short wait is no problem"
        monkeypatch.setattr(sentences, "LONG_FOR_LOCK", timedelta(0))
        [sentence] = sentences.awaited_locks(facts)
        assert sentence.text.startswith("1 session waits for the lock report, for ")
        assert sentence.url == "/admin/django_pglock/advisorylock/?is_granted__exact=0"
    finally:
        somebody.leaves()
        waiter.join(NEVER)


def wait_for_lock(name):
    with lock(name):
        pass
    connections.close_all()


def test_the_most_urgent_sentence_comes_first(facts):
    Queue.objects.pause("mail")
    make("RUNNING")
    keys = [each.key for each in sentences.attention(facts)]
    assert keys == ["no-worker", "stuck", "paused:mail"]


def test_every_kind_of_sentence_is_on_the_page():
    named = {find.__name__ for _, find in sentences.SENTENCES}
    assert named == {name for name, each in vars(sentences).items() if isgeneratorfunction(each)} - {"attention"}
