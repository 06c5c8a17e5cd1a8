"""Helpers for tests of the admin: log in with permissions, make tasks and workers, apply an action, read the answer."""

from __future__ import annotations

from uuid import uuid4

from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.models import Attempt, Task
from tests.db.store.workers import beat


def url(model, page="changelist", *args):
    return reverse(f"admin:django_pglock_{model}_{page}", args=args)


LIST = url("task")


def person(client, *permissions):
    """Log in a new staff user who has exactly these permissions."""
    user = User.objects.create_user(f"user{uuid4().hex}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    client.force_login(user)
    return user


def with_csrf_checks(user):
    """Return a client of the user that sends no CSRF token."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


def make(status="READY", **fields):
    dates = {"last_attempted_at": Now(), "run_after": Now(), "worker": uuid4()}
    finished = Now() if status in ("SUCCESSFUL", "FAILED", "CANCELLED") else None
    defaults = {"queue": "default", "backend": "default", "task_path": "tests.sample.tasks.nothing"}
    defaults["waits_for"] = status == "BLOCKED"
    return Task.objects.create(**{**defaults, **dates, "status": status, "finished_at": finished, **fields})


def add_attempt(task, number=1, exception="builtins.ValueError", **fields):
    """Add a failed attempt of a task."""
    defaults = {"started_at": Now(), "finished_at": Now(), "outcome": "FAILED", "traceback": "Traceback"}
    Attempt.objects.create(task=task, number=number, **{**defaults, "exception_path": exception, **fields})


def start_worker(name="worker-1", **fields):
    worker = uuid4()
    about = {"hostname": "h", "pid": 1, "threads": 1, "is_stopping": False, "queues": ["mail"]}
    about["task_paths"] = ["tests.sample.tasks.nothing"]
    beat("default", worker, name=name, **{**about, **fields})
    return worker


def act(client, action, *rows, url=LIST):
    data = {"action": action, "_selected_action": [row.pk for row in rows]}
    return client.post(url, data, follow=True)


def said(response):
    return [str(message) for message in response.context["messages"]]


def logged():
    """Return the messages of the admin log, the oldest first."""
    return list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))


def page_of(client, row):
    """Return the text of the page of a row."""
    return client.get(url(row._meta.model_name, "change", row.pk)).content.decode()


def ids(client, **query):
    """Return the ids in the list of tasks, the newest first."""
    response = client.get(LIST, query)
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]


def visit(client, address, query=None):
    """Return the text of a page, and the statements that it sent."""
    with CaptureQueriesContext(connection) as queries:
        response = client.get(address, query)
    assert response.status_code == 200
    return response.content.decode(), [each["sql"] for each in queries]
