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
from django.urls import reverse

from django_pglock import lock
from django_pglock.models import AdvisoryLock, Lease, Queue, Task, Worker
from django_pglock.testing import hold
from tests.db.admin.visits import add_attempt, make, person, start_worker, url, with_csrf_checks
from tests.db.store.schedules import of_code

pytestmark = pytest.mark.django_db(transaction=True)

EVIL = '<script>alert(1)</script><img src=x onerror=y>\'" onmouseover="z'
#: Tags and attributes that a browser would execute or load.
ACTIVE = ("<script>alert", "<img src=x", '" onmouseover="z', "'\" onmouse")
LISTS = ("task", "worker", "queue", "lease", "schedule", "advisorylock")


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
    worker = start_worker(EVIL, hostname=EVIL, queues=[EVIL], task_paths=[EVIL])
    texts = {"queue": EVIL, "task_path": EVIL, "args": [EVIL], "kwargs": {EVIL: EVIL}, "result": EVIL}
    texts |= {"meta": {EVIL: EVIL}, "progress": {"done": EVIL, "total": EVIL, EVIL: EVIL}, "backend": EVIL}
    task = make("FAILED", fingerprint=7, **texts)
    make("READY", **texts)
    running = make("RUNNING", **{**texts, "worker": worker})
    add_attempt(task, exception=EVIL, traceback=EVIL, worker=worker)
    Queue.objects.pause(EVIL, by=EVIL, reason=EVIL)
    schedule = of_code(EVIL, EVIL, timezone=EVIL[:64], args=[EVIL], kwargs={EVIL: EVIL}, note=EVIL)
    lease = make_lease(EVIL)
    with hold(EVIL):
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
    for page in (url("overview"), url("failuregroup"), url("task", "attempt", evil_rows["task"][0].pk, 1)):
        assert "&lt;script&gt;alert" in refuse_activity(admin_client.get(page))
    question = admin_client.post(url("failuregroup", "verb", 7, "retry"))
    assert "&lt;script&gt;alert" in refuse_activity(question)
    # The lists share the code that reads these, so each name is sent to two of them, and each list gets some.
    for name, model in zip(("p", "o", "e", "all", "_popup", "_facets"), cycle(LISTS[1:])):
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
    refuse_activity(admin_client.post(pause, {"value": EVIL}, follow=True))
    Queue.objects.resume(queue.pk)
    finished = make("SUCCESSFUL", queue=EVIL, task_path=EVIL)
    delete = url("task", "verb", finished.pk, "delete_finished")
    for data in ({}, {"confirmed": "1"}):
        refuse_activity(admin_client.post(delete, data, follow=True))
    for model, row in (("queue", queue), ("schedule", schedule)):
        refuse_activity(admin_client.get(url(model, "delete", quote(row.pk))))
        refuse_activity(admin_client.post(url(model, "delete", quote(row.pk)), {"post": "yes"}, follow=True))
    assert LogEntry.objects.count() >= 8
    refuse_activity(admin_client.post(url("failuregroup", "verb", 7, "retry"), {"confirmed": "1"}, follow=True))
    refuse_activity(admin_client.get(reverse("admin:index")))
    refuse_activity(admin_client.get(reverse("admin:app_list", args=["django_pglock"])))


@pytest.mark.parametrize("model", LISTS)
def test_an_invalid_key_finds_nothing(admin_client, model):
    for key in ("abc", "9" * 30):
        for page in ("change", "delete", "history"):
            response = admin_client.get(url(model, page, key))
            is_index = response.status_code == 302 and response["Location"] == reverse("admin:index")
            assert is_index or response.status_code in (403, 404), page
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


def make_row(model):
    """Make a row that each verb of the model can change. Returns its key."""
    return {
        "task": lambda: make("FAILED", fingerprint=7).pk,
        "failuregroup": lambda: make("FAILED", fingerprint=7).fingerprint,
        "queue": lambda: Queue.objects.pause("mail") and "mail",
        "schedule": lambda: of_code("a.b").pk,
        "lease": lambda: make_lease("a").pk,
        "advisorylock": lambda: AdvisoryLock.objects.get().pk,
    }[model]()


@pytest.mark.parametrize(("model", "verb", "permission"), VERBS)
def test_each_verb_of_the_admin_needs_its_own_permission(client, model, verb, permission):
    """Each verb needs its own permission, POST and a CSRF token. Viewing needs a permission of its own, too."""
    with lock("a"):
        data = {"action": verb, "_selected_action": [make_row(model)]}
        others = {each for _, _, each in VERBS} - {permission}
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
        assert with_csrf_checks(user).post(url(model), data).status_code == 403
        assert not LogEntry.objects.exists(), "nothing has been done"
        if verb != "terminate":  # this verb would end the session of the test
            client.post(url(model), data)
            assert LogEntry.objects.filter(user=user).exists(), "so the refusals above were none for want of a row"


BUTTONS = [
    *(each for each in VERBS if each[0] in ("task", "queue", "schedule")),
    ("task", "delete_finished", "delete_task"),
    ("task", "explode", ""),
    ("queue", "explode", ""),
    ("failuregroup", "retry", "retry_task"),
    ("failuregroup", "discard", "cancel_task"),
    ("failuregroup", "explode", ""),
]


@pytest.mark.parametrize(("model", "verb", "permission"), BUTTONS)
def test_buttons_need_post_a_token_and_the_permission(client, model, verb, permission):
    key = make_row(model)
    address = url(model, "verb", key, verb)
    view = "view_task" if model == "failuregroup" else f"view_{model}"
    person(client, view, *{each for _, _, each in BUTTONS} - {permission, ""})
    shown = url(model) if model == "failuregroup" else url(model, "change", key)
    assert address not in client.get(shown).content.decode()
    assert client.post(address, {"confirmed": "1"}).status_code == 403
    if permission:
        user = person(client, view, permission)
        assert client.get(address).status_code == client.put(address).status_code == 405
        assert with_csrf_checks(user).post(address, {"confirmed": "1"}).status_code == 403
        if model != "failuregroup":
            assert client.post(url(model, "verb", "123", verb)).status_code == 404
        person(client, permission)
        if not permission.startswith("change"):
            assert client.post(address, {"confirmed": "1"}).status_code == 403, "what one does not see"
    client.logout()
    assert "login" in client.post(address)["Location"]
    assert not LogEntry.objects.exists()


def test_no_user_can_add_change_or_delete_rows_by_hand(client):
    """This also holds for a user with all permissions."""
    person(client, *(f"{verb}_task" for verb in ("add", "change", "view", "delete")))
    row = make("SUCCESSFUL")
    assert client.get(url("task", "add")).status_code == 403
    assert client.post(url("task", "add"), {"task_path": "os.system"}).status_code == 403
    assert client.post(url("task", "change", row.pk), {"task_path": "os.system"}).status_code == 403
    assert client.post(url("task", "delete", row.pk), {"post": "yes"}).status_code == 403
    assert Task.objects.get().task_path == row.task_path
