"""System checks of how the server sends dates and stores characters."""

from __future__ import annotations

import io

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections

from django_pglock.checks import check_texts_of_server

pytestmark = pytest.mark.django_db(transaction=True)


class Nowhere:
    """A router that has no table of the package made."""

    def allow_migrate(self, db, app_label, **hints):
        return app_label != "django_pglock"


@pytest.fixture
def latin(monkeypatch):
    """The connection leads to a database that cannot store each character."""
    name, original = "pglock_latin", connection.settings_dict["NAME"]
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    connection.close()
    connection.settings_dict["NAME"] = name
    yield
    connection.close()
    connection.settings_dict["NAME"] = original
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name}")


def test_migrate_says_that_the_encoding_is_not_utf8(latin):
    with pytest.raises(SystemCheckError) as refused:
        call_command("migrate", stdout=io.StringIO(), stderr=io.StringIO(), skip_checks=False)
    assert "E013) Database 'default' has the encoding LATIN1" in str(refused.value)
    assert "ENCODING 'UTF8'" in str(refused.value)


def test_a_database_for_locks_only_may_have_any_encoding(latin, settings):
    settings.DATABASE_ROUTERS = [Nowhere()]
    assert check_texts_of_server(databases=["default"]) == []


def test_a_check_reports_a_datestyle_that_django_cannot_read(monkeypatch):
    connections["default"].close()
    monkeypatch.setitem(connections["default"].settings_dict["OPTIONS"], "options", "-c DateStyle=German")
    [problem] = check_texts_of_server(databases=["default"])
    connections["default"].close()
    assert problem.id == "django_pglock.E012"
    assert problem.msg.startswith("Database 'default' has DateStyle = 'German, DMY'.")
    assert "'-c DateStyle=ISO'" in problem.hint
