"""System checks: each finds its problem, and only that."""

from __future__ import annotations

import pytest
from django.core.checks import run_checks
from django.db import OperationalError, connection, connections
from django.test import override_settings

from django_pglock import checks

pytestmark = pytest.mark.django_db

SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}


def ids(**options):
    return [message.id for message in run_checks(**options) if message.id.startswith("django_pglock.")]


def test_a_project_in_order_hears_nothing():
    assert ids() == []
    assert ids(databases=["default"]) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"SCOPES": "auto"}, "Did you mean 'SCOPE'"),
        ({"XYZ": 1}, "It knows USING"),
        ({"SCOPE": "forever"}, "must be one of auto, session, transaction"),
        ({"POLL_INTERVAL": 0}, "number of seconds above zero"),
        ({"HEARTBEAT_LIMIT": 5}, "three times HEARTBEAT_INTERVAL"),
        ({"MAX_RESCUES": -1}, "MAX_RESCUES"),
        ([], "must be a dict"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_meant(given, text):
    with override_settings(DJANGO_PGLOCK=given):
        [problem] = checks.check_settings()
    assert problem.id == "django_pglock.E001"
    assert text in problem.msg


@override_settings(DJANGO_PGLOCK={"USING": "nowhere"})
def test_an_alias_that_does_not_exist_is_named():
    [problem] = checks.check_databases()
    assert (problem.id, "'nowhere'" in problem.msg) == ("django_pglock.E002", True)


@override_settings(
    TASKS={"default": {"BACKEND": "django_pglock.backend.PostgresBackend", "OPTIONS": {"database": "x"}}}
)
def test_the_database_of_a_task_backend_is_checked_as_well():
    [problem] = checks.check_databases()
    assert "TASKS['default']" in problem.msg


def test_another_kind_of_database_is_refused(monkeypatch):
    monkeypatch.setattr(type(connections["default"]), "vendor", "sqlite")
    assert [problem.id for problem in checks.check_databases()] == ["django_pglock.E002"]


def test_missing_packages_are_asked_for(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    monkeypatch.setattr(checks.django, "VERSION", (5, 2, 0))
    assert [problem.id for problem in checks.check_psycopg()] == ["django_pglock.E003"]
    [problem] = checks.check_backport()
    assert (problem.id, problem.hint) == (
        "django_pglock.E004",
        "pip install 'django-tasks>=0.12', or upgrade to Django 6.0.",
    )


def test_atomic_requests_with_session_locks_is_warned_of(settings):
    settings.DJANGO_PGLOCK = {"SCOPE": "session"}
    assert checks.check_atomic_requests() == []
    settings.DATABASES["default"]["ATOMIC_REQUESTS"] = True
    try:
        assert [problem.id for problem in checks.check_atomic_requests()] == ["django_pglock.W002"]
    finally:
        settings.DATABASES["default"]["ATOMIC_REQUESTS"] = False


def test_a_pooler_is_recognised_by_its_process_number(monkeypatch):
    """Behind PgBouncer libpq's idea of the backend is PgBouncer's own."""
    monkeypatch.setattr(checks, "_is_pooled", lambda connection, pid: True)
    assert ids(databases=["default"]) == ["django_pglock.W001"]
    with override_settings(DJANGO_PGLOCK={"SCOPE": "transaction"}):
        assert ids(databases=["default"]) == []


@pytest.mark.parametrize(("oldest", "expected"), [(99, "django_pglock.E005"), (None, "django_pglock.W003")])
def test_an_old_server_is_told(monkeypatch, oldest, expected):
    monkeypatch.setattr(checks, "OLDEST_SERVER", oldest or connection.pg_version // 10000 + 1)
    assert ids(databases=["default"]) == [expected]


def test_a_server_that_cannot_be_reached_is_not_our_news(monkeypatch):
    def refuse(alias):
        raise OperationalError

    monkeypatch.setattr(checks, "_check_one", refuse)
    assert ids(databases=["default"]) == []
