"""Our tasks, tables and pages inside the settings of other people: each project is started with every command."""

from __future__ import annotations

from textwrap import dedent

import pytest

pytestmark = pytest.mark.acceptance

WITH_ADMIN = """
INSTALLED_APPS = [
    *(f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions", "messages")),
    "django_pglock",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {"context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]},
}]
ROOT_URLCONF = "urls"
ALLOWED_HOSTS = ["testserver"]
QUEUE, BACKEND, MIGRATED, WORKER = "default", "default", ["default"], []
POSTGRES_BACKEND = "django_pglock.backend.PostgresBackend"
"""
FILES = {
    "urls": """
        from django.contrib import admin
        from django.urls import path

        urlpatterns = [path("admin/", admin.site.urls)]
    """,
    "shop__models": "",
    "shop__tasks": """
        from datetime import timedelta

        from django.conf import settings
        from django_pglock import task

        @task(queue_name=settings.QUEUE, backend=settings.BACKEND)
        def ship(number):
            return number

        @task(queue_name=settings.QUEUE, backend=settings.BACKEND)
        def refuse(number):
            raise LookupError(number)

        @task(queue_name=settings.QUEUE, backend=settings.BACKEND, every=3600)
        def count(): ...
    """,
}

#: Every command and every page, in one process: each is the same code as in a process of its own.
EVERYTHING = """
from datetime import timedelta
from io import StringIO

from django.apps import apps
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from django.test import Client, override_settings

from django_pglock.models import Task
from django_pglock.tasks.backends import database_of_backend
from django_pglock.verbs import TASK_VERBS
from django_pglock.bulk import enqueue_change
from shop.tasks import refuse, ship

DATABASE = database_of_backend(settings.BACKEND)
AT = ["--database", DATABASE]


def run(*command):
    call_command(*command, stdout=(said := StringIO()))
    return said.getvalue()


def status_of(result):
    return Task.objects.using(DATABASE).get(pk=result.id).status


def work():
    run("runlockworker", "--drain", *settings.WORKER)


run("check", "--fail-level", "WARNING", *(f"--database={alias}" for alias in settings.MIGRATED))
for alias in settings.MIGRATED:
    run("migrate", "-v0", "--database", alias)
run("makemigrations", "--check", "--dry-run")

shipped, refused, failed = ship.enqueue(5), refuse.enqueue(5), refuse.enqueue(6)
due = ship.using(run_after=timedelta(days=1)).enqueue(7)
work()
assert [status_of(each) for each in (shipped, refused, failed, due)] == ["SUCCESSFUL", "FAILED", "FAILED", "SCHEDULED"]
assert ship.get_result(shipped.id).return_value == 5

for command in (
    *("status", "list", f"show {failed.id}", "failures", "stats", "schedules", "keda", "keda --queue mail"),
    *(f"run-now {due.id}", f"retry {failed.id}", f"cancel {failed.id}", "reset --all --yes"),
    *("pause any", "resume any", "prune --older-than 9", "redrive --task shop.tasks.refuse --yes --rate 100"),
):
    run("locktasks", *command.split(), *AT)
[change] = enqueue_change(DATABASE, TASK_VERBS["discard"], [int(refused.id)])
work()
ours = Task.objects.using(DATABASE).filter(task_path__startswith="django_pglock.")
assert {each.task_path: each.status for each in ours} == {
    "django_pglock.redrive.redrive_tasks": "SUCCESSFUL", "django_pglock.bulk.change_tasks": "SUCCESSFUL",
}, list(ours.values())
assert status_of(due) == "SUCCESSFUL"
for command in ([], ["--leases"], ["--selftest"]):
    run("locks", *command, *AT)
if apps.is_installed("django.contrib.admin"):
    import pages
print("all done")
"""

PAGES = """
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.test import Client
from django.test.utils import setup_test_environment
from django.urls import reverse

from django_pglock.admin import actions
from django_pglock.models import Task
from shop.tasks import refuse

setup_test_environment()  # so that a response has its context
client = Client()
user = get_user_model().objects.create_superuser(**{get_user_model().USERNAME_FIELD: "a@b.example", "password": "x"})
client.force_login(user)
LIST = reverse("admin:django_pglock_task_changelist")


def said(response):
    assert response.status_code == 200, response
    return " ".join(map(str, response.context["messages"]))


models = [model for model in admin.site._registry if model._meta.app_label == "django_pglock"]
for model in models:
    assert client.get(reverse(f"admin:django_pglock_{model._meta.model_name}_changelist")).status_code == 200, model
for row in Task.objects.all():
    assert client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).status_code == 200
enqueue = reverse("admin:django_pglock_task_enqueue")
assert "#" in said(client.post(f"{enqueue}?function=shop.tasks.ship", {"argument-number": "8"}, follow=True))
failed = Task.objects.filter(task_path="shop.tasks.refuse").last()
again = reverse("admin:django_pglock_task_again", args=[failed.pk])
assert "#" in said(client.post(again, {"argument-number": "8"}, follow=True))
retry = {"action": "retry", "_selected_action": [failed.pk], "select_across": "1", "confirmed": "1"}
actions.WINDOW = 0
assert "#" in said(client.post(f"{LIST}?status__exact=CANCELLED", retry, follow=True))
assert str(LogEntry.objects.latest("pk").user_id) == str(user.pk)
"""


def start(project, settings="", **files):
    """Write a project with these settings and run everything in it."""
    made = project(settings=WITH_ADMIN + dedent(settings), pages=PAGES, **{**FILES, **files})
    said = made.python(EVERYTHING)
    assert "all done" in said
    assert "locked" in made.manage("withlock", "order:5", "--", "echo", "locked")
    return made


CONFIGURATIONS = {
    "queues, and none of them is default": """
        TASKS["default"]["QUEUES"] = ["mail", "reports"]
        QUEUE = "mail"
    """,
    "queues in a set, and a worker of one of them": """
        TASKS["default"]["QUEUES"] = {"mail", "reports"}
        QUEUE, WORKER = "mail", ["mail"]
    """,
    "no backend is default": """
        TASKS = {"pg": {**TASKS["default"], "QUEUES": ["mail"]}}
        QUEUE, BACKEND = "mail", "pg"
    """,
    "the default backend is Django's": """
        import django

        library = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
        TASKS["pg"] = {**TASKS["default"], "QUEUES": ["mail"]}
        TASKS["default"] = {"BACKEND": f"{library}.backends.immediate.ImmediateBackend"}
        QUEUE, BACKEND = "mail", "pg"
    """,
    "two backends in one database, and a worker of the second": """
        TASKS["second"] = {**TASKS["default"], "QUEUES": ["mail"]}
        QUEUE, BACKEND, WORKER = "mail", "second", ["--backend", "second"]
    """,
    "naive dates": "USE_TZ = False",
    "naive dates elsewhere": "USE_TZ, TIME_ZONE = False, 'Pacific/Kiritimati'",
    "another time zone": "TIME_ZONE = 'America/St_Johns'",
    "small primary keys": "DEFAULT_AUTO_FIELD = 'django.db.models.SmallAutoField'",
    "another language": "LANGUAGE_CODE, USE_I18N, USE_THOUSAND_SEPARATOR = 'de', True, True",
}


@pytest.mark.parametrize("settings", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_every_command_and_page_works_with(project, settings):
    start(project, settings)
