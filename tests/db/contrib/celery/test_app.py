"""Apps of Celery: settings, names of tasks, classes as tasks, and what Django's start does."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from django.test import override_settings

import django_pglock.contrib.celery as bridge
from django_pglock.contrib.celery import Celery, Task, current_app, install, shared_task
from django_pglock.contrib.celery.apps import check_settings
from django_pglock.contrib.celery.exceptions import NotRegistered
from django_pglock.errors import ConfigurationError
from django_pglock.models import Task as Row
from django_pglock.testing import run_tasks

pytestmark = pytest.mark.django_db
app = Celery("shop", broker="redis://", backend="redis://", include=["json"])


@app.task
def plain():
    return "plain"


@app.task(name="own.name", queue="mail")
def named(x):
    return x


class Counting(Task):
    """A task that is a class."""

    name = "counting"

    def run(self, number):
        return [number, self.request.id is not None]


counting = app.register_task(Counting)


@pytest.fixture(autouse=True)
def same_settings(monkeypatch):
    for name in list(vars(app.conf)):
        monkeypatch.delitem(vars(app.conf), name)
    yield
    vars(app.conf).clear()


def test_tasks_have_names_and_are_found_by_these():
    assert {f"{__name__}.plain", "own.name", "counting"} <= set(current_app.tasks)
    assert plain.app is app
    assert repr(plain) == f"<@task: {__name__}.plain>"
    result = app.send_task("own.name", (5,), countdown=0)
    run_tasks(raise_errors=True)
    assert (result.get(), Row.objects.get().queue) == (5, "mail")
    with pytest.raises(NotRegistered, match="No task is called 'gone'"):
        app.send_task("gone")


def test_a_class_may_be_a_task():
    result = counting.delay(3)
    run_tasks(raise_errors=True)
    assert (result.get(), Row.objects.get().task_path) == ([3, True], f"{__name__}.Counting")


def test_revoke_takes_one_id_or_several():
    results = [plain.delay() for _ in range(3)]
    app.control.revoke(results[0].id, terminate=True)
    app.control.revoke([each.id for each in results[1:]])
    assert [each.state for each in results] == ["REVOKED"] * 3


def test_what_an_app_does_not_have_says_what_to_write():
    with pytest.raises(
        AttributeError, match=r"app.add_periodic_task of Celery has no equivalent here. Write @task\(cron"
    ):
        app.add_periodic_task(10, plain.s())
    with pytest.raises(AttributeError, match=r"app.nonsense does not exist"):
        _ = app.nonsense
    with pytest.raises(AttributeError, match=r"has no 'signals' of Celery"):
        _ = bridge.signals


@override_settings(CELERY_TASK_ALWAYS_EAGER=True, OTHER_TASK_ALWAYS_EAGER=False)
def test_settings_are_those_of_django_with_the_prefix_of_the_app(monkeypatch):
    app.config_from_object("django.conf:settings", namespace="CELERY")
    assert app.conf.task_always_eager
    assert app.conf.unknown is None
    app.config_from_object("django.conf:settings", namespace="OTHER")
    assert not app.conf.task_always_eager
    app.config_from_object(SimpleNamespace(task_always_eager=True))
    assert plain.delay().get() == "plain"
    app.conf.update(task_always_eager=False)
    assert plain.delay().state == "PENDING"


@override_settings(CELERY_TASK_DEFAULT_QUEUE="low", CELERY_TASK_SOFT_TIME_LIMIT="30", CELERY_TASK_TIME_LIMIT=60)
def test_settings_are_defaults_of_tasks():
    def local():
        pass

    local.__qualname__ = "local"
    definition = shared_task(local).definition
    assert (definition.queue_name, definition.timeout) == ("low", 30)


@override_settings(CELERY_TASK_ROUTES={"a": "b"}, CELERY_TASK_SERIALIZER="pickle", CELERY_RESULT_SERIALIZER="json")
def test_settings_that_would_change_something_are_errors_of_a_check():
    app.conf.beat_schedule = {"nightly": {}}
    assert sorted(f"{each.id} {each.msg} {each.hint}" for each in check_settings()) == [
        "django_pglock.E101 beat_schedule of Celery is not read. Write @task(cron=…), or rows of Schedule.",
        "django_pglock.E101 task_routes of Celery is not read. Write queue= at the decorator or the call.",
        "django_pglock.E101 task_serializer of Celery is not read. Write nothing: arguments and results are JSON.",
    ]


def test_the_bridge_is_not_installed_beside_celery(monkeypatch):
    monkeypatch.setitem(sys.modules, "celery", SimpleNamespace())
    with pytest.raises(ConfigurationError, match="celery was imported before install"):
        install()


# A project whose package imports its app before the settings, as in Celery's tutorial.
PROJECT = {
    "shop/__init__.py": "from .celery import app as celery_app\n",
    "shop/celery.py": """
from celery import Celery
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
app.autodiscover_tasks(related_name="jobs")

@app.task(bind=True, ignore_result=True)
def debug_task(self):
    return object()
""",
    "shop/jobs.py": "from celery import shared_task\n\n@shared_task\ndef job(): pass\n",
    "shop/settings.py": """
from django_pglock.contrib.celery import install
INSTALLED_APPS = ["django.contrib.contenttypes", "django_pglock", "django_pglock.contrib.celery", "shop"]
TASKS = {"default": {"BACKEND": "django_pglock.backend.PostgresBackend"}}
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql"}}
""",
}
RUN = """
from django_pglock.contrib.celery import install
install()
import django
django.setup()
from django_pglock.tasks import registry
print([path for path in registry.known_paths() if path.startswith("shop")])
"""


def test_tasks_that_come_before_the_settings_are_known_after_the_start(tmp_path):
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "DJANGO_SETTINGS_MODULE": "shop.settings"}
    done = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "['shop.celery.debug_task', 'shop.jobs.job']\n", done.stderr
