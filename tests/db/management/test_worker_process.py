"""The banner that a worker prints at its start."""

from __future__ import annotations

import os
import sys

import pytest
from django.db import connection

from django_pglock import __version__, task
from django_pglock.management import worker_process
from django_pglock.management.arguments import WrongArguments
from django_pglock.management.worker_process import banner, own_command_line
from django_pglock.store.bulk import change_tasks
from django_pglock.tasks import registry
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.worker import Worker
from tests.sample import scheduled, tasks

pytestmark = pytest.mark.django_db


def facts_of(worker):
    sentence, *lines = banner(worker.queues, ["default"], processes=2, threads=3).splitlines()
    return sentence, {line.split()[0]: line.split(None, 1)[1] for line in lines}


@pytest.fixture(autouse=True)
def no_functions(monkeypatch):
    monkeypatch.setattr(registry, "_definitions", {})


def test_the_worker_banner_lists_database_queues_and_functions():
    worker = Worker(queues=["mail", "d*"], exclude=["dark"])
    task(tasks.echo.func)
    task(every=60)(scheduled.hourly)
    task(cron="0 3 * * *", timezone="Europe/Berlin")(scheduled.nightly)
    sentence, facts = facts_of(worker)
    assert sentence == f"Worker {os.getpid()} of django_pglock {__version__} starts."
    host = connection.settings_dict["HOST"]
    assert facts["database"].startswith(f"default: {connection.settings_dict['NAME']}{' at ' if host else ''}{host}")
    assert facts["queues"] == "mail, d*, --exclude dark"
    assert (
        facts["functions"]
        == "3: tests.sample.scheduled.hourly, tests.sample.scheduled.nightly, tests.sample.tasks.echo"
    )
    assert facts["schedules"] == (
        "2: tests.sample.scheduled.hourly (every 60 s), tests.sample.scheduled.nightly (0 3 * * * Europe/Berlin)"
    )
    assert facts["processes"] == "2, each with 3 threads; coroutines need none"
    assert facts["look"].startswith("manage.py locktasks status, the pages 'Background tasks and locks' of the admin")


def test_the_worker_banner_without_functions_says_where_to_define_them():
    _, facts = facts_of(Worker())
    assert facts["functions"] == "none; define tasks in a module tasks.py of an app in INSTALLED_APPS"
    assert (facts["schedules"], facts["queues"]) == ("none", "all")


def test_the_worker_banner_lists_only_the_first_of_many_functions(monkeypatch):
    monkeypatch.setattr(worker_process, "FEW", 1)
    task(tasks.echo.func)
    task(tasks.fail.func)
    assert facts_of(Worker())[1]["functions"] == "2: tests.sample.tasks.echo and 1 more"


def test_the_worker_banner_shows_no_password(settings, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "PASSWORD", "secret-word")
    monkeypatch.setitem(connection.settings_dict, "USER", "somebody")
    assert "secret-word" not in banner(Worker().queues, ["default"], processes=1, threads=1)


def test_the_worker_banner_says_that_no_function_has_its_queue():
    """The name may be a typing error. Without it in QUEUES nothing else says so."""
    task(queue_name="mail")(tasks.echo.func)
    assert facts_of(Worker(queues=["mial"]))[1]["queues"] == (
        "mial; no function is enqueued there, unless by using(queue_name=...)"
    )
    assert facts_of(Worker(queues=["m*"]))[1]["queues"] == "m*"


def test_the_worker_banner_does_not_count_the_functions_of_the_package():
    task(queue_name=OWN_QUEUE)(change_tasks.func)
    assert facts_of(Worker())[1]["functions"].startswith("none; define tasks")


def test_the_command_line_of_a_worker_starts_new_interpreters(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c", "runlockworker"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-W", "error", "-c", "code", "runlockworker"])
    assert own_command_line() == [sys.executable, "-W", "error", "-c", "code", "runlockworker"]
    monkeypatch.setattr(sys, "argv", ["-", "runlockworker"])
    with pytest.raises(WrongArguments, match="from its standard input"):
        own_command_line()
