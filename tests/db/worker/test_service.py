"""A service continues whatever happens in its passes."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections

from django_pglock.worker.service import Service
from tests.conftest import NEVER

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_a_service_continues_whatever_its_round_raises(worker, eventually, monkeypatch):
    passes = []

    def leave():
        passes.append(1)
        raise SystemExit("a mistake of ours")

    process = worker()
    monkeypatch.setattr(process.upkeep, "run_once", leave)
    process.upkeep.wake()
    eventually(lambda: len(passes) > 1)
    assert not process.upkeep.is_missing


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("SET statement_timeout = 1; SELECT pg_sleep(600)", "cannot do its work and tries again: canceling statement"),
        ("SELECT pg_terminate_backend(pg_backend_pid())", "has lost its database connection and tries again: "),
    ],
)
def test_a_statement_that_is_cancelled_is_not_called_a_lost_connection(
    worker, eventually, monkeypatch, caplog, statement, said
):
    def send():
        with connections["default"].cursor() as cursor:
            cursor.execute(statement)

    process = worker()
    monkeypatch.setattr(process.upkeep, "run_once", send)
    process.upkeep.wake()
    eventually(lambda: f"The upkeep {said}" in caplog.text)
    assert [each for each in caplog.messages if "\n" in each] == [], (
        "the server's message has several lines, a record one"
    )


class Waiting(Service):
    name = "part"

    def run_once(self):
        self.stopping.wait()


def test_a_service_that_has_never_reached_its_database_has_not_lost_it(eventually, monkeypatch, caplog, tmp_path):
    service = Waiting("default")
    with monkeypatch.context() as patch:
        patch.setitem(connections.settings["default"], "HOST", str(tmp_path))
        service.start()
        try:
            eventually(lambda: "The part cannot reach the database and tries again: connection" in caplog.text)
        finally:
            service.stop()
    assert service.wait(NEVER)
    assert "has lost" not in caplog.text


def test_a_feeder_that_ends_without_a_database_says_so_in_one_line(worker, eventually, monkeypatch, caplog):
    """Before, its thread ended with a traceback on the terminal."""

    def refuse(*args, **values):
        raise OperationalError("the server\nis gone")

    process = worker()
    eventually(lambda: process.feeder.asks)
    monkeypatch.setattr("django_pglock.worker.child.feeder.write_sleep_flag", refuse)
    assert process.shutdown() is True
    assert "The feeder could not finish its work: the server is gone" in caplog.messages


def test_sessions_of_a_worker_have_the_settings_that_its_statements_need(worker, eventually, monkeypatch):
    """At a higher isolation level, a claim, a settle or a rescue fails if another worker has changed the row.

    With ``array_nulls`` off, the settle of a failure would read NULL as a text.
    """
    found = []

    def ask():
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT current_setting('transaction_isolation'), current_setting('array_nulls')")
            found.append(cursor.fetchone())

    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER ROLE CURRENT_USER SET default_transaction_isolation = 'serializable'")
        cursor.execute("ALTER ROLE CURRENT_USER SET array_nulls = off")
    try:
        process = worker()
        monkeypatch.setattr(process.upkeep, "run_once", ask)
        process.upkeep.wake()
        eventually(lambda: found)
        assert set(found) == {("read committed", "on")}
    finally:
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER ROLE CURRENT_USER RESET default_transaction_isolation")
            cursor.execute("ALTER ROLE CURRENT_USER RESET array_nulls")
