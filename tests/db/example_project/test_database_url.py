"""The message of the demo about a DATABASE_URL at which no PostgreSQL answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from example_project import database_url
from example_project.database_url import masked, require_postgres
from example_project.postgres import NoPostgres
from tests.conftest import ROOT


@pytest.fixture
def listener():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        yield made


def refusal(url):
    with pytest.raises(NoPostgres) as refused:
        require_postgres(url)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_database_url_of_a_reachable_server_is_accepted():
    require_postgres(os.environ["DATABASE_URL"])


@pytest.mark.parametrize(
    "url", ["sqlite:///shop.db", "nonsense", "postgres://host:port/name", "", "mysql://u:geheim@h/n"]
)
def test_a_database_url_that_is_not_postgresql_is_refused(url):
    said = refusal(url)
    assert said.startswith(f"DATABASE_URL is {masked(url)!r}, which is no PostgreSQL. Write postgres://")
    assert "geheim" not in said


def test_a_port_that_refuses_is_named_without_the_password(listener):
    port = listener.getsockname()[1]
    listener.close()
    said = refusal(f"postgres://shop:geh@eim@127.0.0.1:{port}/shop")
    assert f"'postgres://shop:***@127.0.0.1:{port}/shop', and no PostgreSQL answers there: " in said
    assert "refused" in said
    assert "unset DATABASE_URL" in said


def test_the_wait_for_a_server_that_does_not_answer_is_limited(listener, monkeypatch):
    """The kernel accepts the connection, and no server answers. Without a limit, libpq would wait forever."""
    monkeypatch.setattr(database_url, "PATIENCE", 2)
    assert "no PostgreSQL answers there: " in refusal(f"postgres://u@127.0.0.1:{listener.getsockname()[1]}/n")


def test_the_demo_reports_an_invalid_database_url_in_one_line():
    ran = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "demo"],
        env={**os.environ, "DATABASE_URL": "sqlite:///x", "PGLOCK_NO_BOOTSTRAP": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1, ran.stderr


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://u:p@h/n", "postgres://u:***@h/n"),
        ("postgres://u:p:q/@r@h:5/n", "postgres://u:***@h:5/n"),
        ("postgres://h/n?password=p&sslmode=require", "postgres://h/n?password=***&sslmode=require"),
        ("postgres://u@h/n", "postgres://u@h/n"),
    ],
)
def test_a_password_is_never_shown(url, shown):
    assert masked(url) == shown
