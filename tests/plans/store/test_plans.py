"""Plans that are kept for a session stay right however much the table grows."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.admit import ADMIT, ADMIT_NEXT, admit
from django_pglock.store.claim import claim_fair, claim_statement, claims_of
from django_pglock.store.outcome import Succeeded
from django_pglock.store.ready import ready_queues
from django_pglock.store.release import AWAITED_BETWEEN
from django_pglock.store.settle import SETTLE_SUCCESSES, SETTLE_UNOBSERVED, settle, settle_unobserved
from django_pglock.store.statements import _prepared, bound, keep_plans, run
from django_pglock.worker.child.claimer import Claimer
from django_pglock.worker.child.feeder import Feeder, ParentsHeartbeat
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.queues import Queues
from tests.plans.reading import BATCH, PATH, delete_all, executed, insert, pages_read, reads, rows_read
from tests.sample.tasks import nothing
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db


@pytest.fixture(params=["of a new table", "of an emptied table"])
def table(request, new_table):
    """A table without rows, for whose statistics ``tests/plans/store/backlog.py`` has the reason."""
    if request.param == "of an emptied table":
        insert("SUCCESSFUL", 1000)
        execute_sql("INSERT INTO django_pglock_waiter (awaited) SELECT id FROM django_pglock_task")
        delete_all("django_pglock_task", "django_pglock_waiter")


@pytest.fixture
def keeps_plans(new_table):
    keep_plans(connection)
    yield
    del _prepared[connection.connection]
    execute_sql("DEALLOCATE ALL")


def check_plans(calls, *, rows):
    """Execute prepared statements. Each reads so many rows for each one that it needs, and no whole table."""
    for call, count in calls.items():
        plan = executed(f"EXECUTE {call}")
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, call
        assert rows_read(plan) <= rows * count, call
        assert pages_read(plan) < 400, call


def test_a_plan_that_was_made_for_an_empty_table_is_right_beside_a_backlog(table, keeps_plans):
    worker = uuid4()
    plain = claim_statement("default", worker=worker, paths=[PATH])
    behind = claim_statement("default", worker=worker, paths=[PATH], behind=True)
    assert (plain.execute(1, "default"), behind.execute(1, "default", 0, 0), ready_queues("default")) == ([], [], {})
    assert claim_fair("default", worker=worker, queue="default", paths=[PATH], after="", limit=1) == ([], "")
    insert("SUCCESSFUL", 20_000)
    insert("BLOCKED", 20_000, lock="backlog")
    insert("READY", 20_000)
    insert("READY", 20_000, fair="tenant")
    here = f"'default', '{{{PATH}}}', NULL"
    calls = {
        "pglock_1 ('default', 'default', 1)": 1,
        f"pglock_1 ('default', 'default', {BATCH})": BATCH,
        f"pglock_2 ('default', 0, 0, 'default', {BATCH})": BATCH,
        "pglock_3": 1,
    }
    check_plans(calls, rows=4)
    in_turn = {
        f"pglock_4 ('', 'default', {here}, 'default', 1, {here}, 1, 1, '{worker}', 1)": 1,
        f"pglock_4 ('', 'default', {here}, 'default', {BATCH}, {here}, {BATCH}, {BATCH}, '{worker}', {BATCH})": BATCH,
    }
    check_plans(in_turn, rows=5)
    assert ready_queues("default") == {"default": True}
    claims = claims_of(behind.execute(BATCH, "default", 0, 0), worker)
    assert len(claims) == BATCH


def test_the_plans_of_settle_release_and_admit_are_right_beside_a_backlog(table, keeps_plans):
    """They were made for an empty table."""
    run("default", SETTLE_UNOBSERVED, "{1}", "{1}", None, 1, prepared=True)
    run("default", SETTLE_SUCCESSES, "{1}", "{1}", None, prepared=True)
    run("default", AWAITED_BETWEEN, 1, 1, 2, prepared=True)
    run("default", ADMIT_NEXT, '{"a key"}', prepared=True)
    run("default", ADMIT, '{"a key"}', prepared=True)
    insert("SUCCESSFUL", 20_000)
    insert("READY", 20_000)
    insert("BLOCKED", 20_000, lock="backlog")
    insert("RUNNING", BATCH, worker=uuid4())
    ids = sorted(Task.objects.filter(status="RUNNING").values_list("pk", flat=True))
    many, ones = "{" + str(ids)[1:-1] + "}", "{" + ",".join(["1"] * BATCH) + "}"
    calls = {
        f"pglock_1 ('{many}', '{ones}', NULL, {BATCH})": BATCH,
        f"pglock_2 ('{many}', '{ones}', NULL)": BATCH,
        f"pglock_3 ({ids[0]}, {ids[-1]}, {2 * BATCH})": 1,
        "pglock_4 ('{\"backlog\"}')": 1,
        "pglock_5 ('{\"backlog\"}')": 1,
    }
    check_plans(calls, rows=8)


def test_settle_and_admit_by_kept_plans_write_the_same(keeps_plans):
    worker = uuid4()
    statement = claim_statement("default", worker=worker, paths=["tests.sample.tasks.nothing"])

    def claim(most):
        return sorted(claims_of(statement.execute(most, "default"), worker), key=lambda each: each.id)

    keys = ["a", 'a "b" \\ {c,d} %s $1', "é\n"]
    for key in keys:
        for _ in range(3):
            nothing.using(lock=key.replace("{", "{{").replace("}", "}}")).enqueue()
    [first, second, third] = claim(3)
    assert settle_unobserved("default", [first, second], ["null", '"it\'s \\\\ 100 %"']) is None
    assert [*settle("default", [(third, Succeeded("[1]"))], third.worker)] == [third.id]
    assert settle_unobserved("default", [first], ["null"]) == [], "a settled claim is lost"
    results = Task.objects.filter(status="SUCCESSFUL").order_by("pk").values_list("result", flat=True)
    assert list(results) == [None, "it's \\ 100 %", [1]]
    assert admit("default", keys) == 3
    assert admit("default", keys) == 0
    assert {each.lock_key for each in claim(9)} == {each.lock_key for each in (first, second, third)}
    assert len(_prepared[connection.connection]) == 4, "one statement for each verb, whatever its values are"


def test_the_settings_of_a_session_that_keeps_plans_stay():
    session = dedicated_connection("default")
    try:
        keep_plans(session)
        with session.cursor() as cursor:
            cursor.execute("SELECT current_setting('plan_cache_mode'), current_setting('enable_seqscan')")
            assert cursor.fetchone() == ("force_generic_plan", "off")
    finally:
        session.close()


def test_a_kept_plan_is_executed(keeps_plans):
    plain = claim_statement("default", worker=uuid4(), paths=[PATH])
    with CaptureQueriesContext(connection) as queries:
        plain.execute(1, "default")
        plain.execute(2, "default")
    prepare, *executes = (each["sql"] for each in queries)
    assert prepare.startswith("PREPARE pglock_1 AS ")
    assert executes == [f"EXECUTE pglock_1 ('default', 'default', {limit})" for limit in (1, 2)]


def test_names_that_read_like_the_places_of_values_are_names(keeps_plans):
    worker, names = uuid4(), ["name", "$1", "a $2 'b' %s \\", "{task} {"]
    for name in names:
        Task.objects.create(queue=name, backend="default", task_path=PATH)
    for name in names:
        statement = claim_statement("default", worker=worker, paths=[PATH, name], behind=True)
        assert len(statement.execute(5, name, 0, 0)) == 1, name
        Task.objects.update(status="READY")
        assert len(execute_sql(bound("default", statement.text, (name, 0, 0, name, 5)))) == 1, name


@pytest.mark.parametrize(("sessions", "shown"), [((), "off"), (("pooled",), "on")])
def test_only_a_session_of_its_own_walks_indexes_in_their_order(in_threads, request, sessions, shown):
    for each in sessions:
        request.getfixturevalue(each)

    def show(number):
        claimer = Claimer("default", uuid4(), Queues())
        Feeder(InFlight(1), claimer, heartbeat=ParentsHeartbeat()).open()
        return execute_sql("SHOW enable_sort")[0][0]

    assert in_threads(show, 1) == [shown]
