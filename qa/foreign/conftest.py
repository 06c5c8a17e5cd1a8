"""One process, one project: a database of its own, migrated before the first test, and real commits in each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

PROJECT = os.environ["DJANGO_SETTINGS_MODULE"].rpartition(".")[2]


def pytest_configure() -> None:
    """Make the project's database and its tables. Not Django's test database: nothing here is rolled back."""
    server = os.environ["DATABASE_URL"].rpartition("/")[0]
    # The folder of the server's socket stands where libpq has a host name.
    socket = server.partition("@/")[2]
    with psycopg.connect(host=socket, user="postgres", dbname="postgres", autocommit=True) as maintenance:
        maintenance.execute(f"CREATE DATABASE {PROJECT}")
    os.environ["DATABASE_URL"] = f"{server}/{PROJECT}"

    import django
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    if settings.BEFORE_MIGRATING:
        with psycopg.connect(host=socket, user="postgres", dbname=PROJECT, autocommit=True) as maintenance:
            maintenance.execute(settings.BEFORE_MIGRATING)
    command, *options = settings.MIGRATE
    call_command(command, *options, verbosity=0)
    connections.close_all()


@pytest.fixture(autouse=True)
def new_sessions() -> Iterator[None]:
    """Give each test new connections on all aliases: the test before may have left a wrapper on one."""
    from django.db import connections

    yield
    for connection in connections.all(initialized_only=True):
        connection.close()
        del connections[connection.alias]


@pytest.fixture(autouse=True)
def no_tasks(new_sessions: None) -> None:
    """Forget the tasks that the test before has enqueued."""
    from django_pglock.models import Task

    Task.objects.all().delete()


@pytest.fixture
def no_schedules(no_tasks: None) -> None:
    """Disable the schedules of the project. Otherwise a worker of any test may run one whose time has just come."""
    from django_pglock.models import Schedule
    from django_pglock.store.schedules import ScheduleKeeper

    ScheduleKeeper("default").keep()
    Schedule.objects.disable()


@pytest.fixture
def drain() -> Callable[..., None]:
    """Run every task that is due in a worker in threads of this process, until none is left."""
    from tests.in_process import InProcessWorker

    def run(**options: Any) -> None:
        InProcessWorker(**{"threads": 1, "drain": True, **options}).run_here()

    return run
