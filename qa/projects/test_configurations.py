"""Our tasks, tables and pages inside the settings of other people: each project is started with every command."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.conftest import ROOT
from tests.docs.test_docs import blocks

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
    "no_urls": "urlpatterns = []",
    "derived": """
        from django_pglock.backend import PostgresBackend

        class Strict(PostgresBackend):
            def validate_task(self, task):
                assert task.queue_name == "mail" and task.priority == 0
                super().validate_task(task)
    """,
    "shop__models": "",
    "shop__tasks": """
        from django.conf import settings

        from django_pglock import task

        @task(queue_name=settings.QUEUE, backend=settings.BACKEND)
        def ship(number):
            return number

        @task(queue_name=settings.QUEUE, backend=settings.BACKEND)
        def refuse(number):
            raise LookupError(number)

        @task(queue_name=settings.QUEUE, backend=settings.BACKEND, cron="30 12 * * *")
        def count(): ...
    """,
}

#: Every command and every page, in one process: each is the same code as in a process of its own.
EVERYTHING = """
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from io import StringIO

from django.conf import settings
from django.core.management import call_command, execute_from_command_line
from django.db import router
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock.store.bulk import enqueue_change
from django_pglock.models import Lease, Schedule, Task
from django_pglock.tasks.backends import database_of_tasks
from django_pglock.store.operate import DISCARD
from shop.tasks import refuse, ship

DATABASE = database_of_tasks(settings.BACKEND, option="")
TASKS, AT = Task.objects.using(DATABASE), ["--database", DATABASE]
WITH_LOCKS = ["--database", router.db_for_read(Lease)]


def run(*command):
    # As manage.py does, with the checks that precede each command.
    with redirect_stdout(said := StringIO()), redirect_stderr(said):
        try:
            execute_from_command_line(["manage.py", *command])
        except SystemExit as end:
            assert not end.code, (command, said.getvalue())


def status_of(result):
    return TASKS.get(pk=result.id).status


def work():
    run("runlockworker", "--drain", *settings.WORKER)


run("check", "--fail-level", "WARNING", *(f"--database={alias}" for alias in settings.MIGRATED))
for alias in settings.MIGRATED:
    run("migrate", "-v0", "--database", alias)
run("makemigrations", "--check", "--dry-run")

in_a_day = timezone.now() + timedelta(days=1)
shipped, refused, failed = ship.enqueue(5), refuse.enqueue(5), refuse.enqueue(6)
due = ship.using(run_after=in_a_day).enqueue(7)
work()
assert [status_of(each) for each in (shipped, refused, failed, due)] == ["SUCCESSFUL", "FAILED", "FAILED", "SCHEDULED"]
assert ship.get_result(shipped.id).return_value == 5
assert TASKS.get(pk=due.id).run_after == in_a_day
assert TASKS.filter(pk=shipped.id, finished_at__gt=Now() - timedelta(minutes=5), finished_at__lte=Now()).exists()

[discard] = enqueue_change(DATABASE, DISCARD, [int(refused.id)])
work()
assert status_of(refused) == "CANCELLED"
for command in (
    *("list", f"show {failed.id}", "failures", "stats", "schedules"),
    *(f"run-now {due.id}", f"retry {refused.id}", f"cancel {refused.id}", "reset --all --yes"),
    *("pause any", "resume any", "prune --older-than 9", "redrive --task shop.tasks.refuse --yes --rate 100"),
):
    call_command("locktasks", *command.split(), *AT, stdout=StringIO())
work()
assert (status_of(due), TASKS.get(pk=failed.id).attempts) == ("SUCCESSFUL", 2)
next_at = Schedule.objects.using(DATABASE).get(pk="shop.tasks.count").next_at
assert (timezone.localtime(next_at) if timezone.is_aware(next_at) else next_at).strftime("%H:%M") == "12:30"
for command in (["--leases"], ["--selftest"]):
    call_command("locks", *command, *WITH_LOCKS, stdout=StringIO())
run("locktasks", "status", *AT)
run("locks", *WITH_LOCKS)
run("withlock", "order:5", *WITH_LOCKS, "--", "true")
if settings.ROOT_URLCONF == "urls":
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

from django_pglock.admin import pages
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
assert "#" in said(client.post(f"{enqueue}?function=shop.tasks.ship", {"kwargs": '{"number": 8}'}, follow=True))
failed = Task.objects.filter(task_path="shop.tasks.refuse").last()
again = reverse("admin:django_pglock_task_again", args=[failed.pk])
assert "#" in said(client.post(again, {"kwargs": '{"number": 8}'}, follow=True))
retry = {"action": "retry", "_selected_action": [failed.pk], "select_across": "1", "confirmed": "1"}
pages.WINDOW = 0
assert "#" in said(client.post(f"{LIST}?status__exact=CANCELLED", retry, follow=True))
assert str(LogEntry.objects.latest("pk").user_id) == str(user.pk)
"""


def start(project, settings="", **files):
    """Write a project with these settings and run everything in it."""
    made = project(settings=WITH_ADMIN + dedent(settings), pages=PAGES, **{**FILES, **files})
    assert "all done" in made.python(EVERYTHING)
    return made


CONFIGURATIONS = {
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
    "naive dates elsewhere": "USE_TZ, TIME_ZONE = False, 'Pacific/Kiritimati'",
    "other time zones": "TIME_ZONE, DATABASES['default']['TIME_ZONE'] = 'America/St_Johns', 'Asia/Kathmandu'",
    "server-side binding and a pool": "DATABASES['default']['OPTIONS'] = {'server_side_binding': True, 'pool': True}",
    "a derived backend that allows few tasks": """
        TASKS["default"].update(BACKEND="derived.Strict", QUEUES=["mail"])
        QUEUE = "mail"
    """,
    "small primary keys": "DEFAULT_AUTO_FIELD = 'django.db.models.SmallAutoField'",
    "another language, and a transaction for each request": """
        LANGUAGE_CODE, USE_I18N, USE_THOUSAND_SEPARATOR = "de", True, True
        DATABASES["default"]["ATOMIC_REQUESTS"] = True
    """,
    "this app alone": "INSTALLED_APPS, MIDDLEWARE, ROOT_URLCONF = ['django_pglock', 'shop'], [], 'no_urls'",
    "the admin, and no address for it": "ROOT_URLCONF = 'no_urls'",
}


@pytest.mark.parametrize("settings", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_every_command_and_page_works_with(project, settings):
    start(project, settings)


def test_every_command_and_page_works_with_a_user_model_whose_key_is_no_number(project):
    made = project(
        settings=WITH_ADMIN + "AUTH_USER_MODEL = 'shop.User'", pages=PAGES, **{**FILES, "shop__models": USER}
    )
    made.manage("makemigrations", "-v0", "shop")
    assert "all done" in made.python(EVERYTHING)


USER = """
from uuid import uuid4

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.auth.models import PermissionsMixin
from django.db import models


class Users(BaseUserManager):
    def create_superuser(self, email, password):
        return self.create(email=email, is_staff=True, is_superuser=True)


class User(AbstractBaseUser, PermissionsMixin):
    id = models.UUIDField(primary_key=True, default=uuid4)
    email = models.EmailField(unique=True)
    is_staff = models.BooleanField(default=False)
    objects = Users()
    USERNAME_FIELD = "email"
"""
#: The router of the page about databases, and two more.
ROUTERS = (
    next(code for code in blocks(ROOT / "docs" / "worker.md", "python") if "class TasksRouter" in code)
    + """
class Whole:
    '''All of this app in one database, as Django documents routers.'''

    def db_for_read(self, model, **hints):
        return "tasks" if model._meta.app_label == "django_pglock" else None

    db_for_write = db_for_read

    def allow_migrate(self, db, app_label, **hints):
        return (db == "tasks") == (app_label == "django_pglock")

class Parts(TasksRouter):
    def allow_migrate(self, db, app_label, model_name=None, **hints):
        is_lock = model_name in ("advisorylock", "lease")
        return db == ("default" if is_lock or app_label != "django_pglock" else "tasks") or not model_name
"""
)
TWO_DATABASES = """
DATABASES["tasks"] = {**POSTGRES, "NAME": "%s"}
TASKS["default"]["OPTIONS"] = {"database": "tasks"}
MIGRATED = ["default", "tasks"]
SILENCED_SYSTEM_CHECKS = ["django_pglock.W009"]
"""
ROUTED = {
    "the documented router": "DATABASE_ROUTERS = ['routers.TasksRouter']",
    "all tables in one of them": """
        DATABASE_ROUTERS = ["routers.Whole"]
        DJANGO_PGLOCK["USING"] = "tasks"
    """,
    "SQLite for all other apps": """
        DATABASES["default"] = SQLITE
        DATABASE_ROUTERS = ["routers.Whole"]
        DJANGO_PGLOCK["USING"] = "tasks"
    """,
    "tasks in both, and a worker of one": """
        TASKS["second"] = {**TASKS["default"], "QUEUES": ["mail"]}
        TASKS["default"]["OPTIONS"] = {"database": "default"}
        QUEUE, BACKEND, WORKER = "mail", "second", ["--database", "tasks"]
        ROOT_URLCONF = "no_urls"
    """,
}


def with_two_databases(project, settings):
    return TWO_DATABASES % project().database + dedent(settings)


@pytest.mark.parametrize("settings", ROUTED.values(), ids=ROUTED)
def test_every_command_and_page_works_with_two_databases_and(project, settings):
    start(project, with_two_databases(project, settings), routers=ROUTERS)


def test_a_router_may_put_locks_and_tasks_into_different_databases(project):
    """It is asked for each table, and for the view of locks."""
    made = start(project, with_two_databases(project, "DATABASE_ROUTERS = ['routers.Parts']"), routers=ROUTERS)
    assert made.tables() == {"django_pglock_advisorylock", "django_pglock_lease"}


def test_without_a_router_check_says_that_the_admin_shows_another_database(project):
    """A task of the form is in the database of the tasks. In that of the pages, another task may have its id."""
    made = project(settings=WITH_ADMIN + with_two_databases(project, ""), **FILES)
    expected = "W012) TASKS stores tasks in 'tasks', but the routers of the project lead to 'default'"
    assert expected in made.manage("check", "--database", "default", "--database", "tasks")
    made.manage_each("migrate -v0", "migrate -v0 --database tasks")
    made.python(
        """
        from django.contrib.admin.models import LogEntry
        from django.contrib.auth.models import User
        from django.test import Client
        from django.urls import reverse

        from django_pglock.models import Task

        client = Client()
        client.force_login(User.objects.create_superuser("someone"))
        form = reverse("admin:django_pglock_task_enqueue")
        answer = client.post(f"{form}?function=shop.tasks.ship", {"kwargs": '{"number": 8}'})
        assert answer.url == reverse("admin:django_pglock_task_changelist"), answer
        assert LogEntry.objects.get().object_id is None
        assert Task.objects.using("tasks").count() == 1
        """
    )


def test_the_overview_works_if_a_router_allows_no_view_of_locks_where_they_are_taken(project):
    settings = with_two_databases(project, "DATABASE_ROUTERS = ['routers.Whole']")
    made = project(settings=WITH_ADMIN + settings, routers=ROUTERS, **FILES)
    made.manage_each("migrate -v0", "migrate -v0 --database tasks")
    made.python(
        """
        from django.contrib.auth.models import User
        from django.test import Client
        from django.urls import reverse

        from django_pglock import lock

        client = Client()
        client.force_login(User.objects.create_superuser("someone"))
        with lock("order:5"):
            assert client.get(reverse("admin:django_pglock_overview_changelist")).status_code == 200
        """
    )


NOT_OURS = {
    "no TASKS": """
        del TASKS
        SILENCED_SYSTEM_CHECKS = ["django_pglock.W010"]
    """,
    "TASKS of another backend": """
        import django

        library = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
        TASKS = {"default": {"BACKEND": f"{library}.backends.dummy.DummyBackend"}}
        SILENCED_SYSTEM_CHECKS = ["django_pglock.W010"]
    """,
}


@pytest.mark.parametrize("settings", NOT_OURS.values(), ids=NOT_OURS)
def test_without_our_backend_the_commands_of_tasks_say_so_and_all_else_works(project, settings):
    """There may be tasks nevertheless, from before."""
    made = project(settings=WITH_ADMIN + dedent(settings), **FILES)
    _, _, unchanged, locks, leases, _ = made.manage_each(
        "check --fail-level WARNING --database default",
        "migrate -v0",
        "makemigrations --check --dry-run",
        "locks",
        "locks --leases",
    )
    assert "No changes" in unchanged
    assert "No advisory lock" in locks
    assert "No lease" in leases
    for command in ("runlockworker --drain", "locktasks status", "locktasks redrive --task a --rate 1"):
        assert "No backend in TASKS stores its tasks in PostgreSQL" in made.manage(*command.split(), fails=True)
    assert "locked" in made.manage("withlock", "order:5", "--", "echo", "locked")
    made.python(
        """
        from django.contrib import admin
        from django.contrib.auth.models import User
        from django.db.models.functions import Now
        from django.test import Client
        from django.urls import reverse

        from django_pglock.admin import pages
        from django_pglock.models import Task

        client = Client()
        client.force_login(User.objects.create_superuser("someone"))
        for status in ("READY", "FAILED"):
            dates = {"last_attempted_at": Now(), "finished_at": Now() if status == "FAILED" else None}
            row = Task.objects.create(status=status, queue="a", backend="default", task_path="a.b", **dates)
            assert client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).status_code == 200
        for model in [each for each in admin.site._registry if each._meta.app_label == "django_pglock"]:
            assert client.get(reverse(f"admin:django_pglock_{model._meta.model_name}_changelist")).status_code == 200
        pages.WINDOW = 0
        retry = {"action": "retry", "_selected_action": [row.pk]}
        page = client.post(reverse("admin:django_pglock_task_changelist"), retry, follow=True).content.decode()
        assert "No backend in TASKS stores its tasks in the database" in page
        """
    )
