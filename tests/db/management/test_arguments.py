"""The messages of commands if the server refuses a statement."""

from __future__ import annotations

import os
import sys
from inspect import signature
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import CommandParser
from django.db import OperationalError, ProgrammingError, connection, transaction
from django.test import override_settings

from django_pglock.management.commands.runlockworker import Command
from django_pglock.worker import Worker
from django_pglock.worker.queues import Queues
from tests.db.management.commands.test_locktasks import locktasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("locktasks", ["status"]),
        ("locktasks", ["retry", "--all", "--yes"]),
        ("locktasks", ["stats"]),
        ("locks", []),
        ("locks", ["--free-lease", "a"]),
    ],
)
def test_a_role_without_rights_gets_a_sentence(name, arguments):
    role = f"pglock_stranger_{os.getpid()}"  # roles belong to the server, not to the tests' database
    execute_sql(f"CREATE ROLE {role}; SET ROLE {role}")
    try:
        with pytest.raises(
            CommandError, match=r"^permission denied for \w+ \w+\. .* docs/worker.md#rights-in-the-database\.$"
        ):
            call_command(name, *arguments, stdout=StringIO())
    finally:
        execute_sql(f"RESET ROLE; DROP ROLE {role}")


def test_a_server_that_cannot_be_reached_is_a_command_error(monkeypatch):
    def refuse(*arguments):
        raise OperationalError("connection failed: Connection refused\n\tIs the server running?")

    monkeypatch.setattr("django_pglock.management.tables.queue_counts", refuse)
    with pytest.raises(CommandError, match=r"^connection failed: Connection refused\. The database did not execute"):
        locktasks("status")


def test_a_table_that_is_missing_is_a_sentence():
    with (
        pytest.raises(CommandError, match=r"does not exist\. Run manage.py migrate .* --database\.$"),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("ALTER TABLE django_pglock_task RENAME TO away")
        locktasks("list")


def test_another_error_of_the_database_is_not_hidden(monkeypatch):
    def fail(*arguments):
        raise ProgrammingError("syntax error")

    monkeypatch.setattr("django_pglock.management.tables.queue_counts", fail)
    with pytest.raises(ProgrammingError):
        locktasks("status")


# The arguments of ``runlockworker``, and the options of the worker that they become.


OURS = "django_pglock.backend.PostgresBackend"


@override_settings(TASKS={"default": {"BACKEND": OURS, "QUEUES": []}})
def test_the_worker_is_built_as_asked_for(monkeypatch):
    built = []

    class Recorder:
        left_behind = ()
        code_has_changed = False

        def __init__(self, **options):
            built.append(options)
            self.queues = Queues(options["queues"], exclude=options["exclude"])
            self.databases, self.processes = ["default"], options["processes"]

        def run(self):
            return True

    monkeypatch.setattr("django_pglock.management.commands.runlockworker.Worker", Recorder)
    queues = ["any=3", "thing*", "--exclude", "thing-1", "--exclude=x"]
    others = "--probe-port [::]:9187 --threads 3 --grace 1.5 --no-reload --backend default --processes 2"
    call_command("runlockworker", *queues, *others.split())
    [options] = built
    assert (options.pop("queues"), options.pop("exclude")) == (["any=3", "thing*"], ["thing-1", "x"])
    assert options.pop("command")()[0] == sys.executable
    assert options == {
        "backend": "default",
        "threads": 3,
        "grace": 1.5,
        "using": "default",
        "processes": 2,
        "reloads": False,
        "drain": False,
        "max_tasks": None,
        "max_memory": None,
        "probe_port": "[::]:9187",
    }


def test_each_option_of_a_worker_is_an_argument_with_the_same_default():
    parser = CommandParser()
    Command().add_arguments(parser)
    arguments = vars(parser.parse_args([]))
    options = {name: each.default for name, each in signature(Worker).parameters.items()}
    assert options.keys() - arguments.keys() == {"using", "command", "reloads"}
    assert arguments.keys() - options.keys() == {"database", "reload"}
    shared = options.keys() & arguments.keys()
    # Lists of queues are empty.
    assert {name: arguments[name] or None for name in shared} == {name: options[name] or None for name in shared}
