"""What hot statements read beside a huge backlog and a long history, whatever the statistics say.

Plans are executed and their rows counted: a plan can look right and still walk through everything.
"""

from __future__ import annotations

import json
import re
from uuid import uuid4

import pytest
from django.db import connection

from django_pglock.models import Task, Waiter
from django_pglock.store.admit import ADMIT
from django_pglock.store.claim import ClaimStatement, claim_statement, claims_of
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.plans import _prepared, keep_plans
from django_pglock.store.promote import due
from django_pglock.store.prune import expired, outdated, pruning_sql
from django_pglock.store.ready import ready_queues
from django_pglock.store.release import RELEASE, TOLD_AT_ONCE, release
from django_pglock.store.rescue import RESCUED_AT_ONCE, rescue
from django_pglock.store.retry import _retriable
from django_pglock.store.sql import BY_INDEX, filled
from django_pglock.worker import Worker
from tests.conftest import ROOT
from tests.plans.conftest import STATEMENTS
from tests.plans.store.test_history import nodes, reads

pytestmark = pytest.mark.django_db

PATH = "tests.sample.tasks.nothing"
#: Statements of transactions or sessions in which indexes are walked in their order.
ORDERED = (
    *("ADMIT", "ADMIT_NEXT", "ADMIT_OWN", "BLOCKED_KEYS", "CLAIM_FAIR", "ENQUEUE_AT_KEY", "ENQUEUE_AT_RATE"),
    *("NEXT_DUE", "READY_QUEUES", "RESCUE", "TAKE_ALONG", "promotion"),
)
#: Rows of each kind that a statement has to deal with.
BATCH = 10
#: What every enqueued row has.
ROW = ("default", 0, PATH, "[]", "{}", "default", 0, "{}")

INSERT = """
INSERT INTO django_pglock_task (queue, task_path, backend, status, lock_key, fair_key, unique_key, unique_scope,
                                run_after, worker, last_attempted_at, attempts, finished_at)
SELECT 'default', 'tests.sample.tasks.nothing', 'default', %(status)s, %(lock)s, %(fair)s,
       'key ' || n, CASE WHEN %(status)s = 'SUCCESSFUL' THEN 'UNFINISHED' END,
       now() + %(seconds)s * n * interval '1 s',
       %(worker)s, CASE WHEN %(worker)s::uuid IS NOT NULL THEN now() END, 1,
       CASE WHEN %(status)s IN ('SUCCESSFUL', 'FAILED') THEN now() END
FROM generate_series(1, %(count)s) AS n
"""


def insert(status, count, *, lock=None, fair=None, seconds=0, worker=None):
    values = {"status": status, "count": count, "lock": lock, "fair": fair, "seconds": seconds, "worker": worker}
    with connection.cursor() as cursor:
        cursor.execute(INSERT if status == "SUCCESSFUL" else INSERT.replace("'key ' || n", "NULL"), values)


def analyze():
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_task")


def executed(sql, params=None, *, by_index=False):
    """Execute a statement, undo it, and return its plan. ``by_index``: as in admission and upkeep."""
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT before")
        if by_index:
            cursor.execute(f"SELECT {BY_INDEX}")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {sql}", params)
        answer = cursor.fetchone()[0]
        cursor.execute("ROLLBACK TO before")
    return answer if isinstance(answer, list) else json.loads(answer)


def rows_read(plan):
    """Return how many rows of the task table were looked at, those included that a filter threw away."""
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes(plan)
        if node.get("Relation Name") == "django_pglock_task" and "Scan" in node["Node Type"]
    )


def pages_read(plan):
    """Return how many pages were looked at, those of indexes included."""
    return plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]


def rated(most, row):
    """Return the values of ``ENQUEUE_AT_RATE``, where ``most`` tasks may be let through at once."""
    return ("backlog", 1, "backlog", "backlog", most, most, 1, most - 1, *row, "backlog", None, None, "backlog")


def plans(worker, ids):
    """Execute each hot statement once; return their plans by name."""
    rows = Task.objects.all()
    plain = claim_statement("default", worker=worker, paths=[PATH])
    behind = claim_statement("default", worker=worker, paths=[PATH], behind=True)
    texts = ["null"] * len(ids)
    group = ("backlog", "backlog", PATH)
    here = ("default", [PATH], None)
    ones = [1] * len(ids)
    failed = ["FAILED"] * len(ids)
    first = Task.objects.earliest("pk").pk
    Task.objects.filter(pk=first).update(status="FAILED")
    retried = _retriable(rows.filter(pk=first)).order_by("pk")
    others = (ids, ones, failed, [0.0] * len(ids), ones, ones, failed, texts, texts)
    calls = {
        "a claim of one": (plain.sql(1, "default"), None),
        "a claim of many": (plain.sql(1000, "default"), None),
        "a claim behind the last": (behind.sql(BATCH, "default", 0, 0), None),
        "CLAIM_FAIR": ("", "default", *here, "default", BATCH, *here, BATCH, BATCH, worker, BATCH),
        "SETTLE_SUCCESSES": (ids, ones, texts),
        "SETTLE_OWN_SUCCESS": ("null", ids[0], 1),
        "SETTLE_OTHERS": (*others, worker),
        "HELD": (ids, ones),
        "RESCUE": (4.5, 5.25, 6.6, 30.0, 1000, 3, "x", "y"),
        "GIVE_BACK": (worker, ids[:1], 0.0, None, []),
        "CANCEL_REQUESTS": (worker,),
        "NOTE_PROGRESS": (ids, ones, texts),
        "NOTE_LAST_PROGRESS": (ids, ones, texts),
        "UNKNOWN": (30.0, None, BATCH, BATCH, None),
        "READY_PATHS": (BATCH, BATCH),
        "DOUBTFUL": (None, 6.6),
        "COUNT_READY": (["default", "other"], BATCH, BATCH),
        "COUNT_OTHERS": (BATCH,),
        "STRAY_WAITERS": (0, BATCH),
        "NEXT_WINDOW": (0.0, ids[0], BATCH),
        "pruning of old ones": pruning_sql(
            outdated(rows, {"SUCCESSFUL": 7}).filter(pk__gt=first, pk__lte=first + BATCH), BATCH
        ),
        "pruning of expired ones": pruning_sql(expired(rows), BATCH),
        "REPLACE_UNIQUE": ("key 7", "[]", "{}", "default", 0, "default", 0, "{}", *[None] * 7),
        "AWAITED_BETWEEN": (ids[0], ids[-1], 2 * len(ids)),
        "AWAITED": (f"{{{ids[0]}}}",),
        "NOTE_WAITS": (f"{{{ids[0]}}}", f"{{{ids[0]}}}"),
        "LOOK_AT_AWAITED": (f"{{{','.join(map(str, ids))}}}",),
        "HAVE_AWAITED": (f"{{{ids[0]}}}",),
        "WAIT_AGAIN": (f"{{{ids[0]}}}",),
        "LOCK_AWAITED": (f"{{{ids[0]}}}",),
        "RELEASE": (f"{{{ids[0]}}}", BATCH, "x", "%s", "done"),
        "RELEASE_UNLOCKED": (f"{{{ids[0]}}}", BATCH, "x", "%s", "done"),
        "READY_QUEUES": None,
        "NEXT_DUE": None,
        "ADMIT": (["backlog"],),
        "ADMIT_NEXT": (["backlog", "other"],),
        "ADMIT_OWN": ("backlog", "backlog", ids[0], ids[0]),
        "ENQUEUE_AT_KEY": ("backlog", "backlog", *ROW, *[None] * 9, "backlog"),
        "ENQUEUE_AT_RATE": rated(BATCH, ROW),
        "ENQUEUE_AFTER": (f"{{{','.join(map(str, ids))}}}", *ROW, *[None] * 7, len(ids)),
        "BLOCKED_KEYS": ("", 1000),
        "HOLDERS": ("backlog", "backlog", BATCH),
        "TAKE_ALONG": (ids[0], 1, *group, BATCH, *group, 0.0, BATCH, BATCH, worker),
        "FIND_UNIQUE": (["key 7"],),
        "FREE_EXPIRED_UNIQUE": (["key 7"],),
        "promotion": marking_sql(first_free(due(rows), 1000, no_key=True), {"status": "READY"}, '"queue"'),
        "a retry": marking_sql(
            first_free(retried, 1000, no_key=True), {"status": "READY", "finished_at": None}, '"queue"'
        ),
    }
    return {
        name: executed(
            *((filled(STATEMENTS[name]), params) if name.isupper() else params),
            by_index=name in ORDERED or name.startswith("a claim"),
        )
        for name, params in calls.items()
    }


#: Constants that are not read here, because they look at no backlog: what they insert, lock, send, set or are part of,
#: and the few rows of the two small tables.
ELSEWHERE = {
    "BEAT", "DRAW_IDS", "ENQUEUE", "ENQUEUE_DRAWN", "ENQUEUE_MANY", "ENQUEUE_ONE", "FIND_QUEUES", "FIRST_READY",
    "FORGET_RATES", "LIMIT_TICK", "LOCK_IS_HELD", "LOCK_KEY", "LOCK_KEYS", "NOTIFY_CANCEL", "OPEN_RATES",
    "PRUNE", "REGISTER_SCHEDULES", "SCHEDULES", "WAKE",
}  # fmt: skip


@pytest.fixture(params=["none", "of an empty table", "from before", "of now"])
def backlog(request, new_table):
    """A long history, a hundred thousand waiting for one key and as many for a date, and a few others.

    The statistics are those of a new table, of one that was empty once, of the history only, or they know everything.
    """
    worker = uuid4()
    if request.param == "of an empty table":
        analyze()
    insert("SUCCESSFUL", 50_000)
    if request.param == "from before":
        analyze()
    insert("BLOCKED", 100_000, lock="backlog")
    insert("SCHEDULED", 100_000, seconds=60)
    insert("READY", BATCH)
    insert("READY", BATCH, fair="tenant")
    insert("RUNNING", BATCH, worker=worker)
    if request.param == "of now":
        analyze()
    return worker


def test_no_hot_statement_reads_the_backlog_or_the_history(backlog):
    ids = list(Task.objects.filter(status="RUNNING").values_list("pk", flat=True))
    read = {name: (rows_read(plan), pages_read(plan)) for name, plan in plans(backlog, ids).items()}
    assert {name for name in STATEMENTS if name[0] != "_"} == ELSEWHERE | {name for name in read if name.isupper()}
    assert {name: counts for name, counts in read.items() if counts[0] > 20 * BATCH or counts[1] > 800} == {}


def test_admission_does_not_read_what_of_its_key_is_for_later(backlog):
    insert("SCHEDULED", 20_000, lock="backlog", seconds=60)
    plan = executed(filled(ADMIT), (["backlog"],), by_index=True)
    assert rows_read(plan) < 20 * BATCH
    assert pages_read(plan) < 800


#: Statements of admission to one key, and how often each reads the table: what it takes to plan them.
SMALL = {
    "ADMIT_NEXT": ((["backlog"],), 4),
    "ADMIT_OWN": (("backlog", "backlog", 1, 1), 2),
    "ENQUEUE_AT_KEY": (("backlog", "backlog", *ROW, *[None] * 9, "b"), 1),
    "ENQUEUE_AT_RATE": (rated(1, ROW), 1),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_statements_are_small_and_look_at_a_key_by_its_index(backlog, name):
    params, count = SMALL[name]
    plan = executed(filled(STATEMENTS[name]), params, by_index=True)
    table = [node for node in nodes(plan) if node.get("Relation Name") == "django_pglock_task"]
    scans = [node for node in table if "Scan" in node["Node Type"]]
    assert len(scans) == count
    by_key = [node for node in scans if node.get("Index Name") == "pglock_task_lock"]
    assert len(by_key) == (2 if name == "ADMIT_NEXT" else 1)
    assert max(node["Actual Rows"] for node in by_key) <= 1
    assert {kind for kind, _ in reads(plan)} <= {"Index Scan", "Index Only Scan"}


def test_nothing_is_compiled_before_it_is_executed(backlog):
    """A sort that is forbidden and has to be looks so expensive to servers before 18 that they would."""
    ids = list(Task.objects.filter(status="RUNNING").values_list("pk", flat=True))
    assert [name for name, plan in plans(backlog, ids).items() if "JIT" in plan[0]] == []


@pytest.fixture
def keeps_plans(new_table):
    keep_plans(connection)
    yield
    del _prepared[connection.connection]
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")


def test_a_plan_that_was_made_for_an_empty_table_is_right_beside_a_backlog(keeps_plans):
    worker = uuid4()
    plain = claim_statement("default", worker=worker, paths=[PATH])
    behind = claim_statement("default", worker=worker, paths=[PATH], behind=True)
    assert (plain.execute(1, "default"), behind.execute(1, "default", 0, 0), ready_queues("default")) == ([], [], [])
    insert("SUCCESSFUL", 50_000)
    insert("BLOCKED", 100_000, lock="backlog")
    insert("READY", 100_000)
    calls = {
        "pglock_1 ('default', 1)": 1,
        f"pglock_1 ('default', {BATCH})": BATCH,
        f"pglock_2 ('default', 0, 0, {BATCH})": BATCH,
        "pglock_3": 1,
    }
    for call, count in calls.items():
        plan = executed(f"EXECUTE {call}")
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, call
        assert rows_read(plan) <= 4 * count, call
        assert pages_read(plan) < 800, call
    assert ready_queues("default") == ["default"]
    claims = claims_of(behind.execute(BATCH, "default", 0, 0), worker)
    assert len(claims) == BATCH


def test_names_that_read_like_the_places_of_numbers_are_names(keeps_plans):
    worker, names = uuid4(), [*map(str, ClaimStatement.HOLES[1:]), "name", "$1", "a $2 'b' %s \\"]
    for name in names:
        Task.objects.create(queue=name, backend="default", task_path=PATH)
    for name in names:
        statement = claim_statement("default", worker=worker, paths=[PATH, name], behind=True)
        assert len(statement.execute(5, name, 0, 0)) == 1, name
        Task.objects.update(status="READY")
        with connection.cursor() as cursor:
            cursor.execute(statement.sql(5, name, 0, 0))
            assert len(cursor.fetchall()) == 1, name


def test_a_claim_neither_scans_nor_sorts(backlog):
    statement = claim_statement("default", worker=backlog, paths=[PATH])
    for limit in (1, BATCH, 1000):
        plan = executed(statement.sql(limit, "default"), by_index=True)
        assert ("Index Scan", "pglock_task_ready") in reads(plan)
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}
        assert "Sort" not in {node["Node Type"] for node in nodes(plan)}


@pytest.mark.parametrize(("listens", "shown"), [(True, "off"), (False, "on")])
def test_only_a_session_of_its_own_walks_indexes_in_their_order(in_threads, listens, shown):
    def show(number):
        Worker(listens=listens).fetcher.open()
        with connection.cursor() as cursor:
            cursor.execute("SHOW enable_sort")
            return cursor.fetchone()[0]

    assert in_threads(show, 1) == [shown]


def test_a_task_for_which_thousands_wait_lets_them_through_some_at_a_time(new_table):
    """The planner expects one child and compares each with each: all at once are millions of comparisons."""
    insert("SUCCESSFUL", 1)
    awaited = Task.objects.get()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_pglock_waiter")
        cursor.execute("INSERT INTO django_pglock_waiter (awaited) VALUES (0)")
        cursor.execute("ANALYZE django_pglock_task, django_pglock_waiter")
        cursor.execute(
            """INSERT INTO django_pglock_task (status, queue, task_path, backend, waits_for)
               SELECT 'BLOCKED', 'default', 'tests.sample.tasks.nothing', 'default', 1 FROM generate_series(1, 2000)"""
        )
        cursor.execute(
            """INSERT INTO django_pglock_waiter (awaited, task_id)
               SELECT %s, id FROM django_pglock_task WHERE waits_for = 1 UNION ALL SELECT %s, NULL""",
            [awaited.pk, awaited.pk],
        )
    values = (f"{{{awaited.pk}}}", TOLD_AT_ONCE, "x", "%s", "done")
    plan = executed(filled(RELEASE), values)
    # A comparison is a row that a join throws away.
    compared = [node.get("Rows Removed by Join Filter", 0) * node["Actual Loops"] for node in nodes(plan)]
    assert sum(compared) <= TOLD_AT_ONCE**2
    assert release("default", [awaited.pk]) == 2000
    assert set(Task.objects.filter(waits_for=0).values_list("status")) == {("READY",), ("SUCCESSFUL",)}
    assert Waiter.objects.count() == 1, "the process was told, too; only the stranger is left"


@pytest.mark.parametrize("name", ["RESCUE", "NOTE_PROGRESS"])
def test_rows_that_are_known_by_their_ids_are_compared_some_at_a_time(new_table, name):
    """The planner expects a few: a thousand of a worker that died were a million comparisons."""
    analyze()
    insert("RUNNING", 1000, worker=uuid4())
    ids = list(Task.objects.order_by("pk").values_list("pk", flat=True))[:RESCUED_AT_ONCE]
    values = {
        "RESCUE": (4.5, 5.25, 6.6, 30.0, RESCUED_AT_ONCE, 3, "x", "y"),
        "NOTE_PROGRESS": (ids, [1] * len(ids), ["null"] * len(ids)),
    }
    plan = executed(filled(STATEMENTS[name]), values[name], by_index=name in ORDERED)
    compared = [node.get("Rows Removed by Join Filter", 0) * node["Actual Loops"] for node in nodes(plan)]
    assert sum(compared) <= 100_000
    assert [len(rescue("default")) for _ in range(6)] == [RESCUED_AT_ONCE] * 5 + [0]


def test_the_query_for_an_autoscaler_that_the_docs_show_stops_early(backlog):
    insert("READY", 20_000)
    insert("SCHEDULED", BATCH, seconds=-60)
    page = (ROOT / "docs" / "operations.md").read_text()
    [query] = re.findall(r"query: >-\n(.*?) targetQueryValue:", page, re.DOTALL)
    query = query.replace("'mail'", "'default'")
    with connection.cursor() as cursor:
        cursor.execute(query)
        assert cursor.fetchone() == (1000 + BATCH + BATCH,), "of the ready ones no more, those in turns, and those due"
    plan = executed(query)
    assert rows_read(plan) <= 1000 + 3 * BATCH
    assert pages_read(plan) < 800
