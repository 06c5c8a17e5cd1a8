"""Options that are refused, on the command line and in Python."""

from __future__ import annotations

import pytest
from django.db import connections

from django_pglock.errors import ConfigurationError
from django_pglock.tasks.compat import BaseTaskBackend
from django_pglock.worker import Worker as Process

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"using": "nope"}, "DATABASES has no alias 'nope'. Its aliases: default"),
        ({"threads": 0}, "threads: 0 is not a number from 1 to 1000"),
        ({"threads": True}, "threads: True is not a number from 1"),
        ({"grace": -1}, "grace: -1 is not a number from 0 to"),
        ({"grace": float("nan")}, "grace: nan is not a number from 0 to"),
        ({"max_tasks": 0}, "max_tasks: 0 is not a number from 1"),
        ({"max_memory": 0}, "max_memory: 0 is not a number from 1"),
        ({"max_memory": -1}, "max_memory: -1 is not a number from 1"),
        ({"probe_port": 65536}, "probe_port: 65536 is not a port from 0 to 65535, and not ADDRESS:PORT"),
        *[
            ({"probe_port": wrong}, "is not a port from 0 to 65535, and not ADDRESS:PORT")
            for wrong in ("", "127.0.0.1", "127.0.0.1:65536", "::1:80", ":80", "[::1]", "[x]:80", True, -1, 80.5)
        ],
    ],
)
def test_a_worker_in_python_refuses_the_options_that_the_command_refuses(options, text):
    """Without threads or a database, a draining worker would never end."""
    with pytest.raises(ConfigurationError, match=text):
        Process(drain=True, **options)


DUMMY = f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"
OURS = "django_pglock.backend.PostgresBackend"
ELSEWHERE = {"BACKEND": OURS, "OPTIONS": {"database": "elsewhere"}}


@pytest.fixture
def elsewhere(monkeypatch):
    """A second alias of the database of the tests."""
    monkeypatch.setitem(connections.settings, "elsewhere", {**connections.settings["default"]})


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["elsewhere"], {}),
        (["default", "elsewhere"], {"backend": "elsewhere"}),
        (["default", "elsewhere"], {"using": "elsewhere"}),
    ],
)
def test_a_worker_serves_the_database_of_the_tasks(settings, names, options):
    """Otherwise a worker with ``drain`` would end at once in a database without tasks, as if all were done."""
    settings.TASKS = {name: {**ELSEWHERE, "OPTIONS": {"database": name}} for name in names}
    assert Process(drain=True, **options).databases == ["elsewhere"]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("tasks", "options", "text"),
    [
        ({}, {}, "No backend in TASKS stores its tasks in PostgreSQL. In one entry of TASKS, set BACKEND to"),
        (
            {"default": ELSEWHERE},
            {"using": "default"},
            "No backend in TASKS stores its tasks in the database 'default'",
        ),
        (
            {"default": {"BACKEND": OURS}, "b": ELSEWHERE},
            {},
            "several databases: default, elsewhere. Choose one with us",
        ),
        ({"default": {"BACKEND": OURS, "OPTIONS": {"database": "x"}}}, {}, "DATABASES has no alias 'x'. Its aliases: "),
    ],
)
def test_a_worker_in_python_refuses_the_databases_that_the_command_refuses(settings, tasks, options, text):
    settings.TASKS = {"dummy": {"BACKEND": DUMMY}, **tasks}
    with pytest.raises(ConfigurationError, match=text):
        Process(drain=True, **options)
