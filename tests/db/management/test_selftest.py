"""The self-test: which locks exclude other sessions on this server."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from django_pglock.management import selftest as module
from django_pglock.management.selftest import QUESTIONS, selftest
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)

#: A function that hides the one of PostgreSQL, and grants each lock.
LIE = """
CREATE SCHEMA lies;
CREATE FUNCTION lies.{name}(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true';
"""


@pytest.fixture(autouse=True)
def long_timeout(monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", NEVER)


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
        with connection.cursor() as cursor:
            cursor.execute(LIE.format(name=name))
        options("-c search_path=lies,pg_catalog,public")

    yield replace
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA lies CASCADE")


def not_ok():
    return {finding.question for finding in selftest("default") if not finding.is_ok}


def test_the_self_test_accepts_a_private_server_and_leaves_no_table():
    out = StringIO()
    call_command("locks", "--selftest", stdout=out)
    lines = out.getvalue().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["ok"] * len(QUESTIONS), out.getvalue()
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname FROM pg_class WHERE relname LIKE '%%selftest%%'")
        assert cursor.fetchall() == []


@pytest.mark.parametrize(
    ("name", "question"),
    [("pg_try_advisory_lock", "session_locks"), ("pg_try_advisory_xact_lock", "transaction_locks")],
)
def test_the_self_test_finds_locks_that_do_not_exclude(replace_lock_function, name, question):
    """The statements succeed, as on database engines that accept the functions without locking."""
    replace_lock_function(name)
    out = StringIO()
    with pytest.raises(CommandError, match="do not exclude"):
        call_command("locks", "--selftest", "--json", stdout=out)
    findings = {each["question"]: each["is_ok"] for each in json.loads(out.getvalue())}
    assert findings == {each: each != question for each in QUESTIONS}


def test_session_locks_are_not_needed_with_the_scope_transaction(replace_lock_function, settings):
    replace_lock_function("pg_try_advisory_lock")
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "SCOPE": "transaction"}
    call_command("locks", "--selftest", stdout=StringIO())


@pytest.mark.parametrize(
    ("option", "question"),
    [
        ("idle_session_timeout=1h", "limits"),
        ("default_transaction_read_only=on", "writes"),
    ],
)
def test_a_setting_that_limits_locks_is_found(options, option, question):
    options(f"-c {option}")
    assert question in not_ok()


def test_the_self_test_reports_a_missing_answer(monkeypatch):
    def asks_for_ever(first, second):
        first.execute("SELECT pg_sleep(3600)")

    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    monkeypatch.setattr(module, "QUESTIONS", {"rows": asks_for_ever})
    [finding] = selftest("default")
    assert (finding.is_ok, finding.is_needed) == (False, True)
    assert "no answer" in finding.text


def test_an_unreachable_server_is_an_error(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "HOST", "/nowhere")
    with pytest.raises(CommandError):
        call_command("locks", "--selftest", stdout=StringIO())
