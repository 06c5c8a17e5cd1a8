"""How statements are sent: one message, one transaction, settings that end with it."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from django.apps import apps
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock.errors import ConfigurationError
from django_pglock.models import Task
from django_pglock.store.admit import admit
from django_pglock.store.release import promote
from django_pglock.store.rescue import rescue
from django_pglock.store.statements import IN_INDEX_ORDER, OFF, array_of_texts, bound, filled, message, rows_of, run
from tests.db.store.schedules import enqueue_due
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

ADD = "INSERT INTO {rate_limit} (key, arrives_at) VALUES (%s, now())"
SHOW = "SELECT current_setting('transaction_isolation'), current_setting('enable_sort')"


def test_names_of_tables_are_filled_in_and_values_are_sent_apart():
    id_ = int(tasks.nothing.enqueue().id)
    assert run("default", "SELECT id, %s FROM {task} WHERE queue = %s", "a'b %s", "default") == [(id_, "a'b %s")]
    assert run("default", "UPDATE {task} SET priority = 3") == [], "it returns no rows"
    assert rows_of("Task", "default").get().priority == 3
    assert filled("{rate_limit}") == '"django_pglock_ratelimit"'


def test_statements_are_one_message_and_one_transaction():
    with CaptureQueriesContext(connection) as queries:
        select = "SELECT key, pg_current_xact_id() = xmin::text::xid8 FROM {rate_limit}"
        rows = run("default", select, first=[(ADD, ["mail"])])
    assert rows == [("mail", True)]
    assert len(queries) == 1
    with pytest.raises(Exception, match="division by zero"):
        run("default", "SELECT 1 / %s", 0, first=[("DELETE FROM {rate_limit}", [])])
    assert run("default", "SELECT key FROM {rate_limit}") == [("mail",)], "all or none"


def test_a_message_is_read_committed_whatever_the_default_is():
    """Only at READ COMMITTED does each statement have its own snapshot."""
    with connection.cursor() as cursor:
        cursor.execute("SET default_transaction_isolation = 'repeatable read'")
        try:
            assert run("default", SHOW, first=["SELECT 1"])[0][0] == "read committed"
        finally:
            cursor.execute("RESET default_transaction_isolation")


def test_inside_of_a_transaction_a_message_is_a_part_of_it():
    with transaction.atomic():
        run("default", "SELECT 1", first=[(ADD, ["mail"])])
        transaction.set_rollback(True)
    assert run("default", "SELECT key FROM {rate_limit}") == []


def test_indexes_are_walked_in_their_order_for_one_message_only():
    assert run("default", SHOW, first=IN_INDEX_ORDER)[0][1] == "off"
    assert run("default", SHOW)[0][1] == "on"
    shown = ", ".join(f"current_setting('{name}')" for name in OFF)
    assert set(run("default", f"SELECT {shown}", first=IN_INDEX_ORDER)[0]) == {"off"}


def test_values_are_bound_as_the_server_quotes_them():
    connection.ensure_connection()
    assert bound("default", "SELECT {{}} %s, %s", ["a'b", None]) == "SELECT {} 'a''b', NULL"


def test_a_message_within_a_transaction_does_not_set_its_isolation_level():
    """Neither if it is the first of an atomic block, nor in a transaction that the caller commits itself."""
    select = ("SELECT 1", ())
    connection.ensure_connection()
    assert message("default", select) == "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;SELECT 1"
    with transaction.atomic():
        assert message("default", select) == "SELECT 1"
        run("default", "SELECT 1")
        assert message("default", select) == "SELECT 1"
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        assert message("default", select) == "SELECT 1"
        cursor.execute("ROLLBACK")


def test_statements_without_the_app_in_installed_apps_raise_a_configuration_error(monkeypatch):
    def missing(*_):
        raise LookupError("No installed app with label 'django_pglock'.")

    monkeypatch.setattr(apps, "get_model", missing)
    for ask in (lambda: rows_of("Task", "default"), lambda: filled("SELECT 1 FROM {task} -- without the app")):
        with pytest.raises(ConfigurationError, match="Add 'django_pglock' to INSTALLED_APPS"):
            ask()


# The settings of the transaction itself are always there once a statement has set them.
# Those of the package are in no view.
SET_HERE = """SELECT name, setting FROM pg_settings WHERE source = 'session' AND name NOT LIKE 'transaction%'
UNION ALL SELECT 'locked', NULLIF(current_setting('django_pglock.locked', true), '') ORDER BY name"""


def enqueue_a_key():
    with transaction.atomic():
        keyed.step.enqueue(1)


def retry_unique_tasks():
    for number in range(2):
        keyed.refresh.enqueue(number)
    Task.objects.all().cancel()
    assert Task.objects.all().retry() == 2


def prune_one():
    keyed.refresh.enqueue(1)
    old = Now() - timedelta(days=9)
    Task.objects.update(status="SUCCESSFUL", enqueued_at=old, finished_at=old)
    assert Task.objects.prune(older_than=1) == 1


@pytest.mark.parametrize(
    "verb",
    [
        enqueue_a_key,
        retry_unique_tasks,
        lambda: admit("default", ["order:1", "order:2"]),
        lambda: rescue("default", unbroken=math.inf),
        lambda: promote("default"),
        lambda: enqueue_due(),
        prune_one,
    ],
    ids=["enqueue", "retry", "admit", "rescue", "promote", "schedule", "prune"],
)
def test_a_verb_leaves_no_setting_in_the_session(verb):
    """Statements of the caller, and behind a pooler those of other clients, run in the same session."""
    with connection.cursor() as cursor:
        before = cursor.execute(SET_HERE).fetchall()
        verb()
        assert cursor.execute(SET_HERE).fetchall() == before


def test_texts_are_an_array_whatever_they_contain():
    texts = ["a", "", "NULL", 'x"y', "back\\slash", "{b,c}", " space ", "é\n\t'", "%s %"]
    assert run("default", "SELECT %s::text[]", array_of_texts(texts)) == [(texts,)]
    assert run("default", "SELECT %s::text[]", array_of_texts([])) == [([],)]
