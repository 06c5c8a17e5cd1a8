"""The security of the admin: hostile values in rows, missing permissions, forged requests."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import cycle
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse

from django_pglock import lock
from django_pglock.models import AdvisoryLock, Attempt, Lease, Queue, Schedule, Task, Worker
from django_pglock.store.liveness import beat
from tests.db.admin.visits import make, person

pytestmark = pytest.mark.django_db(transaction=True)

EVIL = '<script>alert(1)</script><img src=x onerror=y>\'" onmouseover="z'
#: Tags and attributes that a browser would execute or load.
ACTIVE = ("<script>alert", "<img src=x", '" onmouseover="z', "'\" onmouse")
LISTS = ("task", "worker", "queue", "lease", "schedule", "advisorylock")


def url(model, page="changelist", *args):
    return reverse(f"admin:django_pglock_{model}_{page}", args=args)


def refuse_activity(response):
    """Fails if a page contains inline code, whether from the package or from EVIL."""
    assert response.status_code == 200
    page = response.content.decode()
    for text in ACTIVE:
        assert text not in page
    policy = Policy()
    policy.feed(page)
    assert policy.broken == []
    return page


class Policy(HTMLParser):
    """As a strict Content Security Policy: no inline script, no event handler, no inline style."""

    def __init__(self):
        super().__init__()
        self.broken = []

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        is_code = tag == "script" and "src" not in names and names.get("type") != "application/json"
        handlers = [name for name in names if name.startswith("on") or name == "style"]
        links = [name for name, value in attrs if (value or "").strip().lower().startswith("javascript:")]
        if is_code or tag == "style" or handlers or links:
            self.broken.append((tag, attrs))


def make_lease(name):
    dates = {"acquired_at": Now(), "renewed_at": Now()}
    return Lease.objects.create(key=1, name=name, owner=name, holder=uuid4(), token=1, **dates)


@pytest.fixture
def evil_rows(admin_user):
    """One row of each model. Every text in it is EVIL."""
    User.objects.filter(pk=admin_user.pk).update(username=EVIL)
    worker = uuid4()
    values = {"name": EVIL, "hostname": EVIL, "pid": 1, "queues": [EVIL], "threads": 1, "is_stopping": False}
    beat("default", worker, **values, task_paths=[EVIL])
    texts = {"queue": EVIL, "task_path": EVIL, "args": [EVIL], "kwargs": {EVIL: EVIL}, "result": EVIL}
    texts |= {"meta": {EVIL: EVIL}, "progress": {"done": EVIL, "total": EVIL, EVIL: EVIL}, "backend": EVIL}
    task = make("FAILED", fingerprint=7, **texts)
    make("READY", **texts)
    running = make("RUNNING", **{**texts, "worker": worker})
    dates = {"started_at": Now(), "finished_at": Now()}
    Attempt.objects.create(
        task=task, number=1, worker=worker, outcome="FAILED", exception_path=EVIL, traceback=EVIL, **dates
    )
    Queue.objects.pause(EVIL, by=EVIL, reason=EVIL)
    schedule = Schedule.objects.create(name=EVIL, task_path=EVIL, expression=EVIL, timezone=EVIL[:64], next_at=Now())
    lease = make_lease(EVIL)
    with lock(EVIL):
        locks = list(AdvisoryLock.objects.all())
        yield {
            "task": [task, running], "worker": [Worker.objects.get()], "queue": [Queue.objects.get()],
            "schedule": [schedule], "lease": [lease], "advisorylock": locks,
        }  # fmt: skip


def test_every_page_escapes_what_it_shows(admin_client, evil_rows):
    for model in LISTS:
        page = refuse_activity(admin_client.get(url(model)))
        assert "&lt;script&gt;alert" in page, f"{model}: nothing of it is shown, so nothing is proved"
        refuse_activity(admin_client.get(url(model), {"q": EVIL}))
        for row in evil_rows[model]:
            page = refuse_activity(admin_client.get(url(model, "change", quote(row.pk))))
            assert "&lt;script&gt;alert" in page
    # A group of failures is shown with its exception and its message.
    for page in (url("failuregroup"), url("failuregroup", "verb", 7, "retry")):
        assert "&lt;script&gt;alert" in refuse_activity(admin_client.get(page))
    for page in (url("task", "attempts", evil_rows["task"][0].pk), url("task", "attempt", evil_rows["task"][0].pk, 1)):
        assert "&lt;script&gt;alert" in refuse_activity(admin_client.get(page))
    # The lists share the code that reads these, so each name is sent to two of them, and each list gets some.
    for name, model in zip(("p", "o", "e", "all", "_popup", "_facets", "_changelist_filters"), cycle(LISTS[1:])):
        for each in ("task", model):
            assert refuse_activity(admin_client.get(url(each), {name: EVIL}, follow=True))
    for model, name in (
        ("task", "queue"), ("task", "task_path"), ("task", "attention"), ("task", "status__exact"), ("lease", "held"),
        ("queue", "paused"), ("advisorylock", "mode"), ("advisorylock", "is_granted__exact"),
        ("schedule", "is_enabled__exact"), ("task", "id__lt"),
    ):  # fmt: skip
        refuse_activity(admin_client.get(url(model), {name: EVIL}, follow=True))
    for model in LISTS:
        assert EVIL not in admin_client.get(url(model), {EVIL: EVIL}).content.decode()


def test_questions_messages_and_the_history_escape_it_too(admin_client, evil_rows):
    task, running = evil_rows["task"]
    [queue], [schedule] = evil_rows["queue"], evil_rows["schedule"]
    actions = [
        ("task", "cancel", running), ("task", "retry", task), ("queue", "resume", queue), ("queue", "pause", queue),
        ("schedule", "run_now", schedule), ("schedule", "disable", schedule),
    ]  # fmt: skip
    for model, action, row in actions:
        data = {"action": action, "_selected_action": [row.pk]}
        refuse_activity(admin_client.post(url(model), data, follow=True))
        refuse_activity(admin_client.get(url(model, "history", quote(row.pk))))
    pause = url("queue", "verb", quote(queue.pk), "resume")
    refuse_activity(admin_client.post(pause, {"reason": EVIL}, follow=True))
    refuse_activity(admin_client.post(url("queue", "add"), {"name": f"{EVIL}2", "reason": EVIL}, follow=True))
    Queue.objects.resume(queue.pk)
    finished = make("SUCCESSFUL", queue=EVIL, task_path=EVIL)
    for model, row in (("task", finished), ("queue", queue), ("schedule", schedule)):
        refuse_activity(admin_client.get(url(model, "delete", quote(row.pk))))
        refuse_activity(admin_client.post(url(model, "delete", quote(row.pk)), {"post": "yes"}, follow=True))
    assert LogEntry.objects.count() >= 8
    refuse_activity(admin_client.post(url("failuregroup", "verb", 7, "retry"), follow=True))
    refuse_activity(admin_client.get(reverse("admin:index")))
    refuse_activity(admin_client.get(reverse("admin:app_list", args=["django_pglock"])))


@pytest.mark.parametrize("model", LISTS)
def test_an_invalid_key_finds_nothing(admin_client, model):
    actions = {"task": "cancel", "queue": "pause", "schedule": "disable", "lease": "free", "advisorylock": "terminate"}
    for key in ("\x00", "_00", "a\x00b", "abc", "9" * 30, ""):
        for page in ("change", "delete", "history"):
            address = f"{url(model)}{key.replace(chr(0), '%00') or '_'}/{page}/"
            response = admin_client.get(address)
            is_index = response.status_code == 302 and response["Location"] == reverse("admin:index")
            assert is_index or response.status_code in (403, 404), address
        data = {"action": actions.get(model, "x"), "_selected_action": [key]}
        assert admin_client.post(url(model), data).status_code in (200, 302), key
    assert admin_client.get(url(model)).status_code == 200
    # Since Django 6.1 the pages of rows have actions, too.
    assert admin_client.post(f"{url(model)}%00/change/", data).status_code in (302, 403)
    # The index shows the messages of all of these redirects.
    assert admin_client.get(reverse("admin:index")).status_code == 200


VERBS = [
    # model, verb on the list, its permission, all others
    ("task", "retry", "retry_task"),
    ("task", "run_now", "retry_task"),
    ("task", "cancel", "cancel_task"),
    ("task", "reset_stuck", "reset_task"),
    ("queue", "pause", "pause_queue"),
    ("queue", "resume", "pause_queue"),
    ("schedule", "enable", "change_schedule"),
    ("schedule", "disable", "change_schedule"),
    ("schedule", "run_now", "change_schedule"),
    ("lease", "free", "free_lease"),
    ("advisorylock", "terminate", "terminate_advisorylock"),
]


@pytest.mark.parametrize(("model", "verb", "permission"), VERBS)
def test_each_verb_of_the_admin_needs_its_own_permission(client, model, verb, permission):
    """Each verb needs its own permission, POST and a CSRF token. Viewing needs a permission of its own, too."""
    with lock("a"):
        row = {
            "task": lambda: make("FAILED"),
            "queue": lambda: Queue.objects.pause("mail") and Queue.objects.get(),
            "schedule": lambda: Schedule.objects.create(
                name="a.b", task_path="a.b", expression="* * * * *", timezone="UTC", next_at=Now()
            ),
            "lease": lambda: make_lease("a"),
            "advisorylock": lambda: AdvisoryLock.objects.get(),
        }[model]()
        others = {each for _, _, each in VERBS} - {permission}
        data = {"action": verb, "_selected_action": [row.pk]}
        person(client, f"view_{model}", *others)
        page = client.get(url(model)).content.decode()
        assert f'value="{verb}"' not in page
        client.post(url(model), data)
        if not permission.startswith("change"):  # in Django the permission to change includes the permission to view
            person(client, permission)
            assert client.post(url(model), data).status_code == 403, "what one does not see"
        user = person(client, f"view_{model}", permission)
        assert f'value="{verb}"' in client.get(url(model)).content.decode()
        assert client.get(url(model), data).status_code == 400, "a link does nothing"
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(user)
        assert strict.post(url(model), data).status_code == 403
        assert not LogEntry.objects.exists(), "nothing has been done"
        if verb != "terminate":  # this verb would end the session of the test
            client.post(url(model), data)
            assert LogEntry.objects.filter(user=user).exists(), "so the refusals above were none for want of a row"


@pytest.mark.parametrize("verb", ["retry", "run_now", "cancel", "reset_stuck", "explode"])
def test_buttons_of_a_task_need_post_a_token_and_the_permission(client, verb):
    permission = {"run_now": "retry_task", "reset_stuck": "reset_task"}.get(verb, f"{verb}_task")
    row = make("FAILED")
    address = url("task", "verb", row.pk, verb)
    person(client, "view_task", *{"retry_task", "cancel_task", "reset_task"} - {permission})
    assert client.post(address).status_code == 403
    if verb != "explode":
        user = person(client, "view_task", permission)
        assert client.get(address).status_code == 405
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(user)
        assert strict.post(address).status_code == 403
        person(client, permission)
        assert client.post(address).status_code == 403, "what one does not see"
    client.logout()
    assert "login" in client.post(address)["Location"]
    assert not LogEntry.objects.exists()
    assert Task.objects.get().status == "FAILED"


def test_no_user_can_add_or_change_rows_by_hand(client):
    """This also holds for a user with all permissions."""
    person(client, *(f"{verb}_task" for verb in ("add", "change", "view", "delete")))
    row = make("READY")
    assert client.get(url("task", "add")).status_code == 403
    assert client.post(url("task", "add"), {"task_path": "os.system"}).status_code == 403
    assert client.post(url("task", "change", row.pk), {"task_path": "os.system"}).status_code == 403
    assert client.post(url("task", "delete", row.pk), {"post": "yes"}).status_code == 403
    assert Task.objects.get().task_path == row.task_path
