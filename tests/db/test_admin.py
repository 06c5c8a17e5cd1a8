"""The admin: pages, permissions, guarded buttons, ten million rows in mind."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock import Lease, LockLost, lock
from django_pglock.admin import actions, pages
from django_pglock.keys import make_key
from django_pglock.models import Attempt, Task
from django_pglock.models import Lease as LeaseRow
from django_pglock.store import cancel as cancel_module
from django_pglock.store import move
from django_pglock.store.liveness import beat
from tests.db.locks.test_api import Somebody
from tests.plans.reading import nodes
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db

LIST = reverse("admin:django_pglock_task_changelist")
LOCKS = reverse("admin:django_pglock_advisorylock_changelist")


def person(client, *permissions):
    """Log in somebody of the staff with just these permissions."""
    user = User.objects.create_user(f"user{uuid4().hex}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    client.force_login(user)
    return user


def make(status="READY", **fields):
    dates = {"last_attempted_at": Now(), "run_after": Now(), "worker": uuid4()}
    finished = Now() if status in ("SUCCESSFUL", "FAILED", "CANCELLED") else None
    defaults = {"queue": "default", "backend": "default", "task_path": "tests.sample.tasks.nothing"}
    defaults["waits_for"] = status == "BLOCKED"
    return Task.objects.create(**{**defaults, **dates, "status": status, "finished_at": finished, **fields})


def act(client, action, *rows, url=LIST):
    data = {"action": action, "_selected_action": [row.pk for row in rows]}
    return client.post(url, data, follow=True)


def said(response):
    return [str(message) for message in response.context["messages"]]


@pytest.mark.parametrize("status", ["READY", "SCHEDULED", "RUNNING", "SUCCESSFUL", "FAILED", "CANCELLED"])
def test_list_and_page_of_each_status_can_be_looked_at(client, status):
    person(client, "view_task")
    row = make(status)
    assert f"#{row.pk}" in client.get(LIST).content.decode()
    page = client.get(reverse("admin:django_pglock_task_change", args=[row.pk]))
    assert page.status_code == 200
    assert "_save" not in page.content.decode(), "nothing is edited by hand"


@pytest.mark.parametrize(
    "query",
    ["?status__exact=READY", "?queue=mail", "?task_path=x", "?attention=stuck", "?q=nothing", "?q=1",
     "?q=%00", "?queue=%00", "?task_path=%00", "?status__exact=%00", "?status__exact=NO", "?attention=x",
     "?p=abc", "?p=-1", "?id__lt=abc", "?id__lt=" + "9" * 30, "?_facets=True", "?all=",
     "?o=99", "?q=" + "9" * 30, "?q=%27%3B--", "?o=1", "?p=999", "?id__lt=5"],
)  # fmt: skip
def test_filters_and_searches_answer_whatever_is_typed(client, query):
    person(client, "view_task")
    make()
    assert client.get(LIST + query, follow=True).status_code == 200


def test_search_finds_by_id_and_by_function(client):
    person(client, "view_task")
    mine, other = make(), make(task_path="tests.sample.tasks.echo")
    for term in (str(mine.pk), "tests.sample.tasks.nothing", "nothing"):
        found = client.get(LIST, {"q": term}).content.decode()
        assert f"#{mine.pk}<" in found
        assert f"#{other.pk}<" not in found


def test_what_tasks_carry_is_escaped(client):
    person(client, "view_task")
    evil = "<script>alert('x')</script>"
    row = make("FAILED", args=[evil], queue=evil, task_path=f"x.{evil}")
    Attempt.objects.create(
        task=row, number=1, worker=uuid4(), started_at=Now(), finished_at=Now(), outcome="FAILED",
        exception_path=evil, traceback=evil,
    )  # fmt: skip
    for url in (LIST, reverse("admin:django_pglock_task_change", args=[row.pk])):
        assert evil not in client.get(url).content.decode()


def test_pages_have_no_inline_style_or_script_of_ours(client):
    """For a strict Content-Security-Policy."""
    person(client, "view_task")
    row = make("FAILED")
    for url in (LIST, reverse("admin:django_pglock_task_change", args=[row.pk])):
        page = client.get(url).content.decode()
        assert " style=" not in page
        assert "<style" not in page
        assert "onclick" not in page
        assert "django_pglock/admin.css" in page


@pytest.mark.parametrize(
    ("action", "permission", "before", "after"),
    [
        ("retry", "retry_task", "FAILED", "READY"),
        ("retry", "retry_task", "CANCELLED", "READY"),
        ("run_now", "retry_task", "SCHEDULED", "READY"),
        ("cancel", "cancel_task", "READY", "CANCELLED"),
        ("cancel", "cancel_task", "BLOCKED", "CANCELLED"),
        ("reset_stuck", "reset_task", "RUNNING", "READY"),
    ],
)
def test_an_action_does_its_one_thing_with_its_own_permission(client, action, permission, before, after):
    row = make(before)
    person(client, "view_task")
    act(client, action, row)
    client.post(reverse("admin:django_pglock_task_verb", args=[row.pk, action]))
    row.refresh_from_db()
    assert row.status == before, "to look is not to touch"

    person(client, "view_task", permission)
    response = act(client, action, row)
    row.refresh_from_db()
    assert row.status == after
    assert any(text.startswith("1 ") for text in said(response))
    assert LogEntry.objects.count() == 1


def test_what_runs_is_asked_to_end_and_the_pages_say_so(client):
    person(client, "view_task", "cancel_task")
    row = make("RUNNING", progress={"done": 3, "total": 12})
    response = act(client, "cancel", row)
    assert said(response) == ["1 task was cancelled, or asked to end if it runs."]
    row.refresh_from_db()
    assert row.status == "RUNNING"
    for url in (LIST, reverse("admin:django_pglock_task_change", args=[row.pk])):
        assert "cancel requested" in client.get(url).content.decode()
    assert "&quot;total&quot;: 12" in client.get(url).content.decode()


def test_an_action_says_what_it_left_alone(client):
    person(client, "view_task", "retry_task")
    response = act(client, "retry", make("FAILED"), make("SUCCESSFUL"), make("READY"))
    assert said(response)[0] == "1 task will run again."
    assert said(response)[1].startswith("2 of the chosen tasks were left alone")


def test_one_that_was_left_alone_is_spoken_of_as_one(client):
    person(client, "view_task", "retry_task", "reset_task")
    [text] = said(act(client, "retry", make("READY")))
    assert text.startswith("1 of the chosen tasks was left alone: it is")
    [text] = said(act(client, "reset_stuck", make("FAILED")))
    assert text.startswith("1 of the chosen tasks was left alone: its worker is alive")


def test_what_is_beyond_the_count_is_not_said_to_be_known(client, monkeypatch):
    monkeypatch.setattr(pages, "MOST_COUNTED", 3)
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 2)
    person(client, "view_task", "retry_task")
    rows = [*(make("FAILED") for _ in range(4)), *(make() for _ in range(4))]
    data = {"action": "retry", "_selected_action": [rows[0].pk], "select_across": "1"}
    texts = said(client.post(LIST, data, follow=True))
    assert texts == [
        "4 tasks will run again.",
        "More than 3 tasks were chosen; those in another state were left alone.",
    ]


def test_all_of_nothing_is_nothing(client):
    """Nothing matches any more by the time the action arrives: the verbs are not asked."""
    person(client, "view_task", "cancel_task")
    row = make()
    data = {"action": "cancel", "_selected_action": [row.pk], "select_across": "1"}
    response = client.post(f"{LIST}?q={'9' * 30}", data, follow=True)
    assert response.status_code == 200
    row.refresh_from_db()
    assert row.status == "READY"


def test_the_audit_entry_names_up_to_a_hundred_tasks(client):
    user = person(client, "view_task", "retry_task")
    one = make("FAILED")
    act(client, "retry", one)
    entry = LogEntry.objects.get(user=user)
    assert (entry.object_id, entry.change_message) == (str(one.pk), "retry: 1")
    history = client.get(reverse("admin:django_pglock_task_history", args=[one.pk])).content.decode()
    assert "retry: 1" in history

    two = [make("FAILED"), make("FAILED")]
    act(client, "retry", *two)
    entry = LogEntry.objects.exclude(pk=entry.pk).get()
    assert entry.object_id is None
    assert entry.change_message == f"retry: 2 of #{two[0].pk}, #{two[1].pk}"

    LogEntry.objects.all().delete()
    rows = [make("FAILED") for _ in range(101)]
    client.post(LIST, {"action": "retry", "_selected_action": [rows[0].pk], "select_across": "1"})
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message) == (None, "retry: 101")


@pytest.mark.django_db(transaction=True)
def test_a_crowd_is_no_single_transaction_and_audited_from_its_beginning(client, monkeypatch):
    """The process may die on the way: what has been done then stays done, and somebody has asked for it."""
    for module in (actions, move):
        monkeypatch.setattr(module, "WINDOW", 2)
    person(client, "view_task", "cancel_task")
    rows = [make("READY") for _ in range(5)]
    act(client, "cancel", *rows[:3])
    texts = list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))
    assert texts == ["cancel: begun with more than 2", f"cancel: 3 of #{rows[0].pk}, #{rows[1].pk}, #{rows[2].pk}"]

    cancel = cancel_module._cancel
    monkeypatch.setattr(cancel_module, "_cancel", lambda chosen: cancel(chosen) and 1 // 0)
    rows += [make("READY")]
    with pytest.raises(ZeroDivisionError):
        act(client, "cancel", *rows[3:])
    assert list(Task.objects.filter(status="READY")) == [rows[3]], "the newest first"
    assert LogEntry.objects.count() == 3


def test_what_cannot_be_audited_is_not_done(client, monkeypatch):
    person(client, "view_task", "retry_task")
    row = make("FAILED")

    def refuse(*args, **kwargs):
        raise RuntimeError("no room for the audit")

    monkeypatch.setattr("django_pglock.admin.actions.record", refuse)
    with pytest.raises(RuntimeError, match="no room"):
        act(client, "retry", row)
    row.refresh_from_db()
    assert row.status == "FAILED"


def test_only_what_is_stuck_is_reset(client, slow_beats):
    """The worker of one of two running tasks lives."""
    person(client, "view_task", "reset_task")
    living = uuid4()
    beat("default", living, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    safe, stuck = make("RUNNING", worker=living), make("RUNNING")
    assert f"#{safe.pk}<" not in client.get(LIST + "?attention=stuck").content.decode()
    act(client, "reset_stuck", safe, stuck)
    assert list(Task.objects.order_by("pk").values_list("status", flat=True)) == ["RUNNING", "READY"]


def test_all_that_match_are_one_statement_and_one_audit_entry(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 5)
    person(client, "view_task", "cancel_task")
    rows = [make() for _ in range(20)]
    data = {"action": "cancel", "_selected_action": [rows[0].pk], "select_across": "1"}
    with CaptureQueriesContext(connection) as queries:
        client.post(LIST, data)
    assert Task.objects.filter(status="CANCELLED").count() == 20
    assert sum('UPDATE "django_pglock_task"' in query["sql"] for query in queries) == 1
    assert LogEntry.objects.count() == 1


def test_buttons_need_post_and_csrf_and_a_verb_that_exists(client):
    from django.test import Client

    user = person(client, "view_task", "retry_task")
    row = make("FAILED")
    url = reverse("admin:django_pglock_task_verb", args=[row.pk, "retry"])
    assert client.get(url).status_code == 405
    assert client.post(reverse("admin:django_pglock_task_verb", args=[row.pk, "explode"])).status_code == 403
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(user)
    assert strict.post(url).status_code == 403
    assert url in client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).content.decode()
    assert client.post(url).status_code == 302
    row.refresh_from_db()
    assert row.status == "READY"
    client.logout()
    assert "login" in client.post(url)["Location"]


@pytest.mark.parametrize("verb", ["reset_stuck", "retry", "run_now", "cancel"])
@pytest.mark.parametrize("key", [2**63 - 1, 10**30])
def test_a_button_of_no_task_is_not_found(client, verb, key):
    person(client, "view_task", "retry_task", "cancel_task", "reset_task")
    assert client.post(reverse("admin:django_pglock_task_verb", args=[key, verb])).status_code == 404
    assert not LogEntry.objects.exists()


def test_neither_buttons_nor_actions_are_shown_to_who_may_only_look(client):
    person(client, "view_task")
    row = make("FAILED")
    assert 'name="action"' not in client.get(LIST).content.decode()
    page = reverse("admin:django_pglock_task_change", args=[row.pk])
    assert "pglock-verb" not in client.get(page).content.decode()
    assert client.post(page, {"status": "READY"}).status_code == 403


@pytest.mark.parametrize(
    ("paths", "status", "text"),
    [
        (None, "READY", "No worker knows this task: none is running."),
        ([[], ["shop.other"]], "READY", "No worker knows this task. Is its module imported"),
        ([["shop.other"], ["shop.other", "tests.sample.tasks.nothing"]], "READY", None),
        (None, "SUCCESSFUL", None),
    ],
)
def test_a_waiting_task_that_no_worker_knows_says_so(client, paths, status, text):
    for known in paths or ():
        beat(
            "default", uuid4(), name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False, task_paths=known
        )
    person(client, "view_task")
    with CaptureQueriesContext(connection) as queries:
        page = client.get(reverse("admin:django_pglock_task_change", args=[make(status).pk])).content.decode()
    assert ("No worker knows" in page) is (text is not None)
    assert (text or "") in page
    assert len([each for each in queries if "task_paths" in each["sql"]]) == (status == "READY")


def test_who_may_not_look_may_not_press(client):
    person(client, "retry_task")
    row = make("FAILED")
    assert client.post(reverse("admin:django_pglock_task_verb", args=[row.pk, "retry"])).status_code == 403
    row.refresh_from_db()
    assert row.status == "FAILED"


def test_a_task_that_was_started_again_is_not_deleted(client, monkeypatch):
    """Between the check of the permission and the deletion somebody presses Retry."""
    from django_pglock.admin.tasks import TaskAdmin

    person(client, "view_task", "delete_task")
    row = make("FAILED")
    Attempt.objects.create(
        task=row, number=1, worker=uuid4(), started_at=Now(), finished_at=Now(), outcome="FAILED",
        exception_path="x", traceback="x",
    )  # fmt: skip
    log = TaskAdmin.log_deletions

    def retry_first(self, request, queryset):
        Task.objects.filter(pk=row.pk).retry()
        return log(self, request, queryset)

    url = reverse("admin:django_pglock_task_delete", args=[row.pk])
    monkeypatch.setattr(TaskAdmin, "log_deletions", retry_first)
    assert client.post(url, {"post": "yes"}).status_code == 403
    assert Task.objects.filter(pk=row.pk).exists()
    monkeypatch.undo()
    Task.objects.filter(pk=row.pk).update(status="FAILED", finished_at=Now())
    assert client.post(url, {"post": "yes"}).status_code == 302
    assert not Task.objects.exists()


def test_nothing_is_added_and_only_what_is_finished_is_deleted(client):
    person(client, "view_task", "add_task", "change_task", "delete_task")
    assert client.get(reverse("admin:django_pglock_task_add")).status_code == 403
    running, finished = make("RUNNING"), make("SUCCESSFUL")
    for row, status in ((running, 403), (finished, 302)):
        url = reverse("admin:django_pglock_task_delete", args=[row.pk])
        assert client.post(url, {"post": "yes"}).status_code == status
    assert list(Task.objects.all()) == [running]


# Ten million rows


def test_the_list_is_counted_only_so_far_and_older_ones_are_a_key_away(client, monkeypatch):
    monkeypatch.setattr(pages, "MOST_COUNTED", 7)
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 5)
    person(client, "view_task")
    rows = [make() for _ in range(12)]
    page = client.get(LIST)
    assert page.context["cl"].result_count == 7
    assert f"id__lt={rows[7].pk}" in page.content.decode()
    older = client.get(LIST + f"?id__lt={rows[7].pk}").content.decode()
    assert f"#{rows[6].pk}<" in older
    assert f"#{rows[7].pk}<" not in older


def test_older_ones_are_offered_only_where_there_are_any(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 3)
    person(client, "view_task")
    rows = [make() for _ in range(5)]

    def older(**query):
        return client.get(LIST, query).context["cl"].older_query

    assert f"id__lt={rows[2].pk}" in older()
    assert older(p=2) == ""
    assert older(o="-0") == "", "the oldest come first here"


@pytest.mark.parametrize(("grouped", "text"), [(False, "10000+"), (True, "&gt;10,000")])
def test_a_count_that_stopped_says_so(settings, grouped, text):
    from django.template import Context, Template

    settings.USE_THOUSAND_SEPARATOR = grouped
    count = pages.AtLeast(10_000)
    assert count == 10_000
    assert Template("{{ count }}").render(Context({"count": count})) == text


@pytest.fixture
def many():
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_task (queue, task_path, backend, status, finished_at, args)
               SELECT 'q' || n % 3, 'tests.sample.tasks.nothing', 'default',
                      CASE WHEN n % 50 = 0 THEN 'FAILED' WHEN n > 19900 THEN 'READY' ELSE 'SUCCESSFUL' END,
                      CASE WHEN n % 50 = 0 OR n <= 19900 THEN now() END, to_jsonb(ARRAY[repeat('x', 100)])
               FROM generate_series(1, 20000) AS n"""
        )
        cursor.execute("ANALYZE django_pglock_task")


@pytest.mark.parametrize(
    "query", ["", "?status__exact=FAILED", "?status__exact=READY", "?id__lt=10000", "?q=15000", "?attention=stuck"]
)
def test_no_list_reads_the_whole_table(client, many, query):
    """Each statement that the page sends about tasks is explained: nothing may be read and sorted as a whole."""
    person(client, "view_task")
    with CaptureQueriesContext(connection) as queries:
        assert client.get(LIST + query).status_code == 200
    about_tasks = [each["sql"] for each in queries if '"django_pglock_task"' in each["sql"] and "SELECT" in each["sql"]]
    assert about_tasks
    assert len(queries) <= 8
    for sql in about_tasks:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}")
            plan = cursor.fetchone()[0]
        plan = plan if isinstance(plan, list) else json.loads(plan)
        found = list(nodes(plan))
        limited = any(node["Node Type"] == "Limit" for node in found)
        whole = {node["Relation Name"] for node in found if node["Node Type"] == "Seq Scan"}
        assert limited or "django_pglock_task" not in whole, sql
        assert not [node for node in found if node["Node Type"] == "Sort" and node["Plan Rows"] > 1000], sql
        if "COUNT" not in sql:
            assert '"args"' not in sql, "a list does not load what it does not show"


# Workers and locks


def test_workers_are_listed_with_what_they_run_in_one_query(client):
    person(client, "view_worker")
    worker = uuid4()
    beat("default", worker, name="web1:42", hostname="h", pid=42, queues=["mail"], threads=3, is_stopping=False)
    make("RUNNING", worker=worker)
    url = reverse("admin:django_pglock_worker_changelist")
    with CaptureQueriesContext(connection) as queries:
        page = client.get(url).content.decode()
    assert "web1:42" in page
    assert "mail" in page
    assert (
        sum('FROM "django_pglock_worker"' in each["sql"] and "COUNT" not in each["sql"][:20] for each in queries) == 1
    )
    assert client.get(reverse("admin:django_pglock_worker_change", args=[worker])).status_code == 200


@pytest.mark.django_db(transaction=True)
def test_locks_are_listed_by_name_and_ended_only_with_permission(client, eventually):
    somebody = Somebody()
    try:
        somebody.holds("somebodys lock")
        with lock("order:5", timeout=5):
            person(client, "view_advisorylock")
            page = client.get(LOCKS).content.decode()
            assert str(make_key("order:5").number) in page
            assert str(make_key("somebodys lock").number) in page
            found = client.get(LOCKS, {"q": "somebodys lock"})
            [row] = found.context["cl"].result_list
            assert client.get(reverse("admin:django_pglock_advisorylock_change", args=[row.pk])).status_code == 200
            act(client, "terminate", row, url=LOCKS)
            assert not somebody.can_have("order:5"), "the session still lives"

            person(client, "view_advisorylock", "terminate_advisorylock")
            assert said(act(client, "terminate", row, url=LOCKS)) == ["1 session was ended."]
            eventually(lambda: not client.get(LOCKS, {"q": "somebodys lock"}).context["cl"].result_list)
            assert LogEntry.objects.filter(change_message__startswith="terminate").exists()
    finally:
        somebody.leaves()


@pytest.mark.django_db(transaction=True)
def test_leases_are_listed_and_taken_away_only_with_permission(client):
    url = reverse("admin:django_pglock_lease_changelist")
    with Lease("early", ttl=60, min_hold=30):
        pass
    with pytest.raises(LockLost), Lease("nightly", ttl=60) as held, Lease("mutex"):
        row = LeaseRow.objects.get(name="nightly")
        person(client, "view_lease")
        page = client.get(url).content.decode()
        for text in ("nightly", held.owner, "mutex", "never", "kept from others"):
            assert text in page
        assert [each.name for each in client.get(url, {"held": "1"}).context["cl"].result_list] == ["mutex", "nightly"]
        assert [each.name for each in client.get(url, {"q": "night"}).context["cl"].result_list] == ["nightly"]
        assert client.get(reverse("admin:django_pglock_lease_change", args=[row.pk])).status_code == 200
        act(client, "free", row, url=url)
        held.extend()
        person(client, "view_lease", "free_lease", "delete_lease")
        assert client.post(reverse("admin:django_pglock_lease_delete", args=[row.pk])).status_code == 403
        assert said(act(client, "free", row, url=url)) == ["1 lease was taken away."]
        assert said(act(client, "free", row, url=url)) == ["0 leases were taken away."]
    assert LogEntry.objects.filter(change_message="free: 1 of nightly").count() == 1
    page = client.get(url).content.decode()
    assert "delete_selected" not in page
    client.post(reverse("admin:django_pglock_lease_delete", args=[row.pk]), {"post": "yes"})
    assert not LeaseRow.objects.filter(name="nightly").exists()


@pytest.mark.django_db
def test_the_list_of_leases_walks_an_index():
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_pglock_lease (key, name, owner, holder, token, acquired_at, renewed_at, released_at)"
            " SELECT n, 'lease ' || n, 'host', gen_random_uuid(), 1, now() - n * interval '1 s', now(),"
            " CASE WHEN n % 1000 > 0 THEN now() END FROM generate_series(1, 20000) AS n"
        )
        cursor.execute("ANALYZE django_pglock_lease")
    for rows in (LeaseRow.objects.all(), LeaseRow.objects.all().held()):
        plan = rows.order_by("-acquired_at")[:100].explain()
        assert "django_pglock_lease_" in plan
        assert "Seq Scan" not in plan


@pytest.mark.django_db(transaction=True)
def test_a_blocked_task_says_what_it_waits_for(client):
    first, second = (keyed.step.enqueue("7") for _ in range(2))
    child = tasks.nothing.using(after=[first, second]).enqueue()
    person(client, "view_task")

    def page(result):
        return client.get(reverse("admin:django_pglock_task_change", args=[result.id])).content.decode()

    key = Task.objects.get(pk=second.id).lock_key
    assert f"It waits for its key, {key}, which is with #{first.id}." in page(second)
    assert "It waits" not in page(first)
    assert f"It waits for the end of #{first.id}, #{second.id}." in page(child)
    Task.objects.filter(pk=first.id).update(status="SCHEDULED", run_after=Now(), started_at=Now())
    assert f"which is with #{first.id}." in page(second), "it will be tried again"
    Task.objects.filter(pk=first.id).update(started_at=None)
    assert "which is with nobody at this moment" in page(second), "it has never begun"
    Task.objects.filter(pk=first.id).update(status="SUCCESSFUL", finished_at=Now())
    assert "which is with nobody at this moment" in page(second)
