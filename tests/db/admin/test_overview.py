"""The overview: its permissions and sections, and the links to it."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from functools import partial
from inspect import isgeneratorfunction

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection, connections
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_pglock import lock, task
from django_pglock.admin import overview
from django_pglock.admin.charts import duration
from django_pglock.admin.failures import FailureGroup
from django_pglock.admin.overview import VIEWED, Overview, queue_table
from django_pglock.models import AdvisoryLock, Queue, Task, Worker
from django_pglock.store.numbers import Counts, add_numbers, count_depths
from tests.conftest import NEVER
from tests.db.admin.visits import add_attempt, make, person, start_worker, url
from tests.db.locks.sessions import Somebody
from tests.db.store.schedules import of_code
from tests.sample import scheduled

pytestmark = pytest.mark.django_db


PAGE = url("overview")


def sections(response):
    return re.findall(r'<h2 id="pglock-(\w+)"', response.content.decode())


def test_the_overview_asks_for_permission(client):
    client.logout()
    assert client.get(PAGE).status_code == 302
    person(client)
    assert client.get(PAGE).status_code == 403
    person(client, "view_task")
    assert client.get(PAGE).status_code == 200
    assert client.post(PAGE).status_code == 405


@pytest.mark.parametrize("model", ["overview", "failuregroup"])
def test_a_page_without_a_table_names_its_app(admin_client, model):
    """Themes such as django-unfold show the name of ``opts.app_config``, as our own breadcrumbs do."""
    page = admin_client.get(url(model))
    assert page.context["opts"].app_config is apps.get_app_config("django_pglock")
    assert page.content.decode().count(">Background tasks and locks</a>") >= 2, (
        "in the navigation and in the breadcrumbs"
    )


@pytest.mark.parametrize("name", ["index", "app_list"])
def test_the_indexes_lead_to_the_overview(client, name):
    address = reverse(f"admin:{name}", args=["django_pglock"] if name == "app_list" else [])
    person(client, "view_worker")
    assert f'href="{PAGE}"' in client.get(address).content.decode()
    User.objects.filter(is_staff=True).delete()
    person(client, "view_user")
    page = client.get(reverse("admin:index")).content.decode()
    assert "/auth/user/" in page
    assert PAGE not in page


def test_each_view_permission_allows_the_overview(client):
    for model in VIEWED:
        person(client, f"view_{model._meta.model_name}")
        assert client.get(PAGE).status_code == 200, model
    ours = {model for model in admin.site._registry if model._meta.app_label == "django_pglock"}
    # Failures are viewed with the permission to view tasks.
    assert ours == {Overview, FailureGroup, *VIEWED}, "a new page of this package is in the list, too"


@pytest.mark.parametrize(
    ("permissions", "shown"),
    [
        (["view_schedule"], ["attention"]),
        (["view_worker"], ["attention", "workers"]),
        (["view_task"], ["attention", "queues", "history"]),
        (["view_task", "view_worker"], ["attention", "queues", "workers", "history"]),
    ],
)
def test_the_overview_shows_only_sections_that_the_user_may_view(client, permissions, shown):
    Queue.objects.pause("mail")
    person(client, *permissions)
    page = client.get(PAGE)
    assert sections(page) == shown
    assert "has been paused" not in page.content.decode()


def test_a_quiet_system_needs_no_attention(client):
    start_worker()
    person(client, "view_task", "view_worker")
    page = client.get(PAGE).content.decode()
    assert "Nothing needs attention." in page


# What it reads, and the tables of queues and workers
#: The most statements of the page, with those that log the user in.
MOST_STATEMENTS = 24


def test_the_page_sends_the_same_number_of_statements_however_much_there_is(client):
    def cost():
        with CaptureQueriesContext(connection) as queries:
            assert client.get(PAGE).status_code == 200
        return len(queries)

    person(client, *(f"view_{model._meta.model_name}" for model in VIEWED))
    worker = start_worker()
    count_depths("default")
    first = cost()
    for number in range(5):
        make(queue=f"q{number}")
        make("RUNNING", queue=f"q{number}", worker=worker)
        make("FAILED", queue=f"q{number}")
        Queue.objects.pause(f"q{number}")
    count_depths("default", 0.0)
    assert first <= cost() <= MOST_STATEMENTS


def test_running_tasks_are_read_up_to_a_limit(facts, monkeypatch):
    monkeypatch.setattr(overview, "MOST_RUNNING", 3)
    worker = start_worker()
    for queue in ("mail", "mail", "other", "other"):
        make("RUNNING", queue=queue, worker=worker)
    [(_worker, tasks, more)] = overview.worker_table(facts)["rows"]
    assert ([task.queue for task, _since in tasks], more) == (["mail", "mail", "other"], 0)


def test_a_user_with_the_right_to_view_workers_sees_no_tasks(client):
    make("RUNNING", worker=start_worker())
    person(client, "view_worker")
    assert "nothing #" not in client.get(PAGE).content.decode()
    person(client, "view_worker", "view_task")
    assert "nothing #" in client.get(PAGE).content.decode()


def test_a_queue_shows_its_depth_and_its_failures_with_links(client, monkeypatch):
    monkeypatch.setattr("django_pglock.store.count.MOST_COUNTED", 4)
    worker = start_worker()
    for status, count in (("READY", 4), ("RUNNING", 2), ("FAILED", 3)):
        for _ in range(count):
            make(status, queue="mail", run_after=None, worker=worker)
    Queue.objects.pause("quiet")
    person(client, "view_task", "view_queue")
    table = client.get(PAGE).context["queues"]
    rows = {row["name"]: (str(row["ready"]), row["running"], row["failed"], row["is_paused"]) for row in table["rows"]}
    assert rows == {"mail": ("4+", 2, 3, False), "quiet": ("0", 0, 0, True)}
    [mail, _] = table["rows"]
    assert mail["ready_url"] == "/admin/django_pglock/task/?status__exact=READY&queue=mail"
    assert client.get(mail["failed_url"]).status_code == 200


def test_a_worker_shows_what_it_runs_and_since_when(client):
    worker = start_worker()
    start_worker("idle")
    tasks = [make("RUNNING", worker=worker) for _ in range(5)]
    person(client, "view_task", "view_worker")
    table = client.get(PAGE).context["workers"]
    [(busy, oldest, more), (idle, nothing, _)] = table["rows"]
    assert (busy.name, more, idle.name, nothing) == ("worker-1", 2, "idle", [])
    task, time = oldest[0]
    assert task == tasks[0]
    assert re.fullmatch(r"\d+ s", time)
    page = client.get(PAGE).content.decode()
    assert f'<a href="{url("task", "change", task.pk)}">nothing #{task.pk} for ' in page
    assert "and 2 more" in page


def test_long_tables_of_the_overview_are_cut_with_the_number_of_missing_rows(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.overview.MOST_SHOWN", 2)
    for number in range(5):
        start_worker(f"w{number}")
        make(queue=f"q{number}")
    person(client, "view_task", "view_worker")
    page = client.get(PAGE).content.decode()
    assert "3 more queues are not shown." in page
    assert "3 more workers are not shown." in page


def test_the_queues_that_need_attention_come_first(facts, settings):
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["configured", "busy", "old"]}}
    for name, hours in (("young", 1), ("old", 2)):
        make(queue=name, enqueued_at=Now() - timedelta(hours=hours), run_after=None)
    Queue.objects.pause("paused")
    make("RUNNING", queue="busy")
    assert [row["name"] for row in queue_table(facts)["rows"]] == ["old", "young", "paused", "busy", "configured"]


# The charts of the overview: which numbers they show, and what one may choose.


PATH = "tests.sample.tasks.nothing"


def note(minutes_ago, queue="mail", path=PATH, **numbers):
    counts = Counts(**numbers)
    counts.wait[10] = counts.run[20] = counts.attempts
    add_numbers("default", {(int(timezone.now().timestamp() // 60 - minutes_ago) * 60, queue, path): counts})


def drawn(client, **query):
    charts = client.get(PAGE, query).context["charts"]
    return {chart.name: {line.label: line.values for line in chart.lines} for chart in charts}


@pytest.fixture
def history(client):
    note(5, succeeded=30, failed=2, retried=1)
    note(5, queue="reports", path="another.function", succeeded=7)
    note(60 * 30, succeeded=100)


@pytest.mark.parametrize(
    ("query", "steps", "succeeded"),
    [
        ({}, 61, 37), ({"span": "hour", "queue": "mail"}, 61, 30), ({"task_path": "another.function"}, 61, 7),
        ({"span": "day"}, 25, 37), ({"span": "week"}, 169, 137), ({"span": "month"}, 61, 37),
        ({"queue": "nobody"}, 61, 0),
    ],
)  # fmt: skip
def test_the_charts_count_the_chosen_tasks(client, history, query, steps, succeeded):
    values = drawn(client, **query)["finished"]["succeeded"]
    assert len(values) in (steps - 1, steps)
    assert sum(values) == succeeded


def test_failures_and_times_have_charts_of_their_own(client, history):
    found = drawn(client, queue="mail")
    assert sum(found["failures"]["the last of their task"]) == 2
    assert sum(found["failures"]["retried"]) == 1
    for name in ("wait", "run"):
        known = [value for value in found[name]["p50"] if value is not None]
        assert len(known) == 1, "a minute in which nothing ended has no median"
        assert known[0] <= max(value for value in found[name]["p95"] if value is not None)


def test_the_selected_filters_of_the_charts_are_in_the_form_and_the_link_that_refreshes(client, history):
    page = client.get(PAGE, {"span": "week", "queue": "mail", "task_path": "gone.function"}).content.decode()
    for text in ('<option value="week" selected>', "<option selected>mail</option>", "<option selected>gone.function"):
        assert text in page
    assert '<a href="?span=week&amp;queue=mail&amp;task_path=gone.function">Refresh</a>' in page


def test_a_queue_shows_how_many_tasks_finish_in_a_minute(client, history):
    Queue.objects.pause("default")
    note(4, queue="default", succeeded=40, failed=5, cancelled=5, retried=100)
    note(0, queue="default", succeeded=1000)
    note(50, queue="default", succeeded=1000)
    rows = {row["name"]: row["rate"] for row in client.get(PAGE).context["queues"]["rows"]}
    assert rows["default"] == "10", "of the last five minutes that are complete"


def test_without_a_history_the_charts_are_empty(client):
    assert len(drawn(client)) == 4
    person(client, "view_worker")
    assert "charts" not in client.get(PAGE).context


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0014, "1 ms"), (0.25, "250 ms"), (1.5, "1.5 s"), (119, "119.0 s"), (150, "2.5 min"), (9000, "2.5 h")],
)
def test_durations_have_units(seconds, text):
    assert duration(seconds) == text


# The sentences of the overview: each says one kind of problem, and leads to the list that shows it.


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


def test_failures_of_a_function_with_exception_and_place(facts, monkeypatch):
    fail(1)
    [sentence] = overview.failing_functions(facts)
    assert re.fullmatch(r"1 failure of charge, \d+ s ago: ConnectionError in bank.py:88", sentence.text)
    assert sentence.url == "/admin/django_pglock/failuregroup/"
    fail(2)
    [sentence] = overview.failing_functions(facts)
    assert sentence.text.startswith("3 failures of charge, the first ")
    monkeypatch.setattr(overview, "failures", partial(overview.failures, most=2))
    [sentence] = overview.failing_functions(facts)
    assert sentence.text.startswith("2+ failures of charge, the first ")


def test_failures_of_another_day_need_no_attention(facts):
    fail(1, at=Now() - timedelta(days=2))
    assert texts(overview.failing_functions(facts)) == []


def test_most_failures_come_first(facts):
    for number in range(3):
        fail(1 + number % 2, f"shop.f{number}", fingerprint=number, trace="", exception="")
    found = texts(overview.failing_functions(facts))
    assert found[0].startswith("2 failures of f1, ")
    assert found[0].endswith(": the exception is not known")


def test_no_worker_is_running(facts):
    [sentence] = overview.no_worker(facts)
    assert sentence.text == "No worker is running. Start one: python manage.py runlockworker"
    assert sentence.url == "/admin/django_pglock/worker/"


def test_the_overview_reports_no_missing_worker_if_one_is_alive(facts):
    start_worker()
    Worker.objects.filter(pk=start_worker()).update(heartbeat_at=Now() - HOUR)
    assert texts(overview.no_worker(facts)) == []


def test_a_project_without_tasks_needs_no_worker(facts, settings):
    settings.TASKS = {}
    assert texts(overview.no_worker(facts)) == []


def test_running_tasks_of_a_dead_worker_are_stuck(facts):
    make("RUNNING", worker=start_worker())
    assert texts(overview.stuck_tasks(facts)) == []
    make("RUNNING")
    [sentence] = overview.stuck_tasks(facts)
    assert sentence.text == "1 running task is stuck: its worker is dead."
    assert sentence.url == "/admin/django_pglock/task/?attention=stuck"


def test_paused_queues_with_name_time_and_reason(facts):
    Queue.objects.create(name="open")
    Queue.objects.pause("mail", by="anna", reason="The provider is down.")
    Queue.objects.pause("reports")
    Queue.objects.paused().update(paused_at=Now() - HOUR)
    assert texts(overview.paused_queues(facts)) == [
        "Queue mail has been paused for 1\xa0hour. (anna: The provider is down.)",
        "Queue reports has been paused for 1\xa0hour.",
    ]


def test_a_few_problems_of_a_kind_are_named(facts):
    start_worker()
    for number in range(overview.FEW + 2):
        Queue.objects.pause(f"q{number}")
    found = list(overview.attention(facts))
    assert (len(found), found[-1].text) == (overview.FEW + 1, "There are more problems of this kind.")
    assert found[-1].url == "/admin/django_pglock/queue/?paused=1"


def test_queues_whose_oldest_ready_task_has_waited_for_long(facts):
    Queue.objects.pause("paused")
    for queue, hours in (("mail", 1), ("reports", 2), ("new", 0), ("paused", 3)):
        make(queue=queue, run_after=None, enqueued_at=Now() - hours * HOUR)
    assert texts(overview.long_waits(facts)) == [
        "The oldest ready task of queue reports has waited for 2\xa0hours.",
        "The oldest ready task of queue mail has waited for 1\xa0hour.",
    ]
    [first, _] = overview.long_waits(facts)
    assert first.url == "/admin/django_pglock/task/?status__exact=READY&queue=reports"


def test_tasks_that_have_waited_for_their_lock_keys_for_long(facts):
    make("BLOCKED", lock_key="order:1", waits_for=0)
    assert texts(overview.blocked_tasks(facts)) == []
    Task.objects.update(enqueued_at=Now() - HOUR)
    make("BLOCKED", lock_key="order:2", waits_for=0)
    oldest = Task.objects.earliest("pk").pk
    [sentence] = overview.blocked_tasks(facts)
    assert sentence.text == (f"Tasks wait for lock keys; the oldest blocked task, #{oldest}, has waited for 1\xa0hour.")
    assert "order" not in sentence.text, "a key may have redacted values"
    assert sentence.url == "/admin/django_pglock/task/?status__exact=BLOCKED"


def test_tasks_that_wait_only_for_other_tasks_need_no_attention(facts):
    make("BLOCKED", enqueued_at=Now() - HOUR)
    assert texts(overview.blocked_tasks(facts)) == []


def test_ready_tasks_that_no_worker_knows(facts):
    make(enqueued_at=Now() - HOUR)
    start_worker(task_paths=["another.function"])
    [sentence] = overview.unknown_functions(facts)
    path = "tests.sample.tasks.nothing"
    assert sentence.text == f"No worker knows {path}; the oldest of its ready tasks has waited for 1\xa0hour."
    assert sentence.url == f"/admin/django_pglock/task/?status__exact=READY&task_path={path}"
    start_worker(task_paths=[path])
    assert texts(overview.unknown_functions(facts)) == []


def test_without_a_worker_no_function_is_called_unknown(facts):
    make()
    assert texts(overview.unknown_functions(facts)) == []


def test_schedules_that_are_overdue(facts):
    for name, hours, is_enabled in (("a.late", 1, True), ("a.disabled", 1, False), ("a.coming", -1, True)):
        of_code(name, next_at=Now() - hours * HOUR, is_enabled=is_enabled)
    [sentence] = overview.overdue_schedules(facts)
    assert sentence.text == "The schedule of a.late has been overdue for 1\xa0hour: no worker enqueues it."
    assert sentence.url == "/admin/django_pglock/schedule/?is_enabled__exact=1"


def test_schedules_that_stand_in_modules_of_web_processes_alone(facts, own_registry):
    """A worker that had the code would have written their rows."""
    task(every=60)(scheduled.nightly), task(every=60)(scheduled.hourly)
    assert texts(overview.unknown_schedules(facts)) == [], "there is no worker at all"
    start_worker()
    of_code("tests.sample.scheduled.hourly")
    del facts.workers
    [sentence] = overview.unknown_schedules(facts)
    assert sentence.text == (
        "No worker knows the schedule of tests.sample.scheduled.nightly. Import its module in tasks.py of its app."
    )
    assert sentence.url == "/admin/django_pglock/schedule/"


@pytest.mark.django_db(transaction=True)
def test_a_lock_with_waiters(facts, monkeypatch, eventually):
    somebody = Somebody()
    waiter = threading.Thread(target=wait_for_lock, args=("report",), daemon=True)
    try:
        somebody.holds("report")
        waiter.start()
        eventually(lambda: AdvisoryLock.objects.all().waiting().filter(since__isnull=False).exists())
        monkeypatch.setattr(overview, "LONG_FOR_LOCK", overview.LONG)
        assert texts(overview.awaited_locks(facts)) == [], "a short wait is no problem"
        monkeypatch.setattr(overview, "LONG_FOR_LOCK", timedelta(0))
        [sentence] = overview.awaited_locks(facts)
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
    keys = [each.key for each in overview.attention(facts)]
    assert keys == ["no-worker", "stuck", "paused:mail"]


def test_every_kind_of_sentence_is_on_the_page():
    named = {find.__name__ for _, find in overview.SENTENCES}
    assert named == {name for name, each in vars(overview).items() if isgeneratorfunction(each)} - {"attention"}
