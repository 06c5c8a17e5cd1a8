"""The messages of commands if the server refuses a statement."""

from __future__ import annotations

import os
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, ProgrammingError, connection, transaction

from tests.db.management.commands.test_locktasks import locktasks

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
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}; SET ROLE {role}")
    try:
        with pytest.raises(CommandError, match=r"^permission denied for \w+ \w+\. The rights .* docs/security.md\.$"):
            call_command(name, *arguments, stdout=StringIO())
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"RESET ROLE; DROP ROLE {role}")


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
