"""The self-test: which locks exclude other sessions on this server."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from django_pglock.management.selftest import selftest
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

#: A function that hides the one of PostgreSQL, and grants each lock.
LIE = """
CREATE SCHEMA lies;
CREATE FUNCTION lies.{name}(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true';
"""


@pytest.fixture
def options(monkeypatch):
    """Connect as a project would with these options of the server."""

    def choose(options):
        settings = connections["default"].settings_dict
        monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], "options": options})

    return choose


@pytest.fixture
def replace_lock_function(options):
    """Grant a lock to two clients."""

    def replace(name):
        execute_sql(LIE.format(name=name))
        options("-c search_path=lies,pg_catalog,public")

    yield replace
    execute_sql("DROP SCHEMA lies CASCADE")


def not_ok():
    return {text for text, is_ok in selftest("default") if not is_ok}


def test_the_self_test_accepts_a_private_server_and_leaves_no_table():
    out = StringIO()
    call_command("locks", "--selftest", stdout=out)
    assert [line.partition(" ")[0] for line in out.getvalue().splitlines()] == ["ok"] * 4, out.getvalue()
    assert execute_sql("SELECT relname FROM pg_class WHERE relname LIKE '%%selftest%%'") == []


SESSION_LOCKS = "A session lock excludes other clients until it is freed."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pg_try_advisory_lock", SESSION_LOCKS),
        ("pg_try_advisory_xact_lock", "A transaction lock excludes other clients until the commit."),
    ],
)
def test_the_self_test_finds_locks_that_do_not_exclude(replace_lock_function, name, text):
    """The statements succeed, as on database engines that accept the functions without locking."""
    replace_lock_function(name)
    assert not_ok() == {text}
    with pytest.raises(CommandError, match="do not exclude"):
        call_command("locks", "--selftest", stdout=StringIO())


def test_session_locks_are_not_needed_with_the_scope_transaction(replace_lock_function, settings):
    replace_lock_function("pg_try_advisory_lock")
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "SCOPE": "transaction"}
    call_command("locks", "--selftest", stdout=StringIO())


def test_a_server_that_accepts_no_writes_is_found(options):
    options("-c default_transaction_read_only=on")
    assert "The server accepts writes." in not_ok()


def test_an_unreachable_server_is_an_error(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "HOST", "/nowhere")
    with pytest.raises(CommandError):
        call_command("locks", "--selftest", stdout=StringIO())
