"""Helpers for tests of the admin: log in with permissions, make tasks and workers, apply an action, read the answer."""

from __future__ import annotations

from uuid import uuid4

from django.contrib.auth.models import Permission, User
from django.db.models.functions import Now
from django.urls import reverse

from django_pglock.models import Task
from django_pglock.store.liveness import beat

LIST = reverse("admin:django_pglock_task_changelist")


def person(client, *permissions):
    """Log in a new staff user who has exactly these permissions."""
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


def ids(client, **query):
    """Return the ids in the list of tasks, the newest first."""
    response = client.get(LIST, query)
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]


def start_worker(name="worker-1"):
    worker = uuid4()
    about = {
        "hostname": "h",
        "pid": 1,
        "threads": 1,
        "is_stopping": False,
        "task_paths": ["tests.sample.tasks.nothing"],
    }
    beat("default", worker, name=name, queues=["mail"], **about)
    return worker
