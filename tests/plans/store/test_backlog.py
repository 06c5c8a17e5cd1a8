"""What hot statements read beside a huge backlog and a long history, whatever the statistics say.

Plans are executed and their rows counted: a plan can look right and still walk through everything.
"""

from __future__ import annotations

import re
from itertools import pairwise
from uuid import uuid4

import pytest
from django.db import connection

from django_pglock.models import Task, Worker
from django_pglock.store.claim import claim_statement
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.promote import due
from django_pglock.store.prune import expired, locking_old, outdated
from django_pglock.store.rescue import RESCUED_AT_ONCE, rescue
from django_pglock.store.retry import _retriable
from django_pglock.store.statements import filled
from tests.conftest import ROOT
from tests.plans.reading import (
    BATCH,
    PATH,
    ROW,
    STATEMENTS,
    analyze,
    executed,
    insert,
    nodes,
    pages_read,
    rated,
    reads,
    rows_read,
)

pytestmark = pytest.mark.django_db
#: Statements of transactions or sessions in which indexes are walked in their order.
ORDERED = (
    *("ADMIT", "ADMIT_NEXT", "ADMIT_OWN", "BLOCKED_KEYS", "CLAIM_FAIR", "ENQUEUE_AT_KEY", "ENQUEUE_AT_RATE"),
    *("CANCEL_REQUESTS", "DOUBTFUL", "GIVE_BACK", "REQUESTS"),
    *("KNOWN_QUEUES", "NEXT_DUE", "READY_QUEUES", "RESCUE", "CLAIM_GROUP", "CLAIM_GROUP_IN_KEY_ORDER", "promotion"),
)
#: Statements about tasks that run on one worker, are known by their ids, or whose worker is dead.
OF_ONE_WORKER = (
    *("REQUESTS", "CANCEL_REQUESTS", "FORGET_DEAD", "GIVE_BACK", "RESCUE", "DOUBTFUL"),
    *("SETTLE_SUCCESSES", "SETTLE_UNOBSERVED", "SETTLE_OWN_SUCCESS", "SETTLE_OTHERS", "HELD"),
    *(
        "ASK_STACK",
        "ANSWER_STACK",
        "CLAIM_GROUP",
        "CLAIM_GROUP_IN_KEY_ORDER",
        "NOTE_PROGRESS",
        "NOTE_LAST_PROGRESS",
        "NOTE_LOGS",
    ),
)


def filled_first(statement):
    """Return a statement with the names of its tables, and its values."""
    sql, values = statement
    return filled(sql), values


def plans(worker, ids, names=None):
    """Execute each hot statement once, or those of these names; return their plans by name."""
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
    for before, id_ in pairwise(sorted(ids)):
        Task.objects.filter(pk=id_).update(meta={"previous_run": before})
    others = (ids, ones, failed, [0.0] * len(ids), ones, ones, failed, texts, texts, ids, texts)
    calls = {
        "a claim of one": (plain.sql(1, "default"), None),
        "a claim of some": (plain.sql(BATCH, "default"), None),
        "a claim of many": (plain.sql(1000, "default"), None),
        "a claim behind the last": (behind.sql(BATCH, "default", 0, 0), None),
        "CLAIM_FAIR": ("", "default", *here, "default", BATCH, *here, BATCH, BATCH, worker, BATCH),
        "SETTLE_SUCCESSES": (sorted(ids), ones, "[]"),
        "SETTLE_UNOBSERVED": (sorted(ids), ones, "[]", len(ids)),
        "SETTLE_OWN_SUCCESS": ("null", ids[0], 1),
        "SETTLE_OTHERS": (*others, worker),
        "HELD": (ids, ones),
        "RESCUE": (4.5, 5.25, 6.6, 30.0, 1000, 1000, 3, "x", "y"),
        "FORGET_DEAD": (4.5, 5.25, 30.0),
        "GIVE_BACK": (worker, worker, worker, ids[:1], 0.0, None, []),
        "CANCEL_REQUESTS": (worker, worker),
        "REQUESTS": (worker, worker, worker),
        "ASK_STACK": (ids[0], 600.0, ids[0]),
        "ANSWER_STACK": ("", ids[0], 1, worker),
        "NOTE_PROGRESS": (ids, ones, texts),
        "NOTE_LOGS": (ids, ones, texts),
        "NOTE_LAST_PROGRESS": (ids, ones, texts),
        "WHY_UNFINISHED": (30.0, ids[0]),
        "SCHEDULE_RUNS": (max(ids), PATH, PATH, BATCH),
        "FINISH_DATES": (f"{{{','.join(map(str, ids))}}}",),
        "LAST_STATUSES": (f"{{{','.join(map(str, ids))}}}",),
        "UNKNOWN": (30.0, None, BATCH, BATCH, None),
        "READY_PATHS": (BATCH, BATCH),
        "DOUBTFUL": (6.6, None),
        "COUNT_READY": (["default", "other"], 3, BATCH, BATCH),
        "COUNT_FAILED": (BATCH,),
        "FAILURE_GROUPS": (BATCH, True, BATCH, 24, BATCH, BATCH),
        "UNMARKED_FAILURES": (BATCH,),
        "LAST_TRACEBACKS": (BATCH, ids),
        "ABOVE_SUCCEEDED": None,
        "COUNT_FAILED_IN": (["default", "other"], BATCH),
        "NEXT_AT": (0.0, ids[0]),
        "COUNT_OTHERS": (BATCH,),
        "STRAY_WAITERS": (0, BATCH),
        "WAKE_OTHERS": ("channel", ["default", "other", "empty"]),
        "NEXT_WINDOW": (0.0, ids[0], BATCH),
        "NEXT_TO_ARCHIVE": (0.0, 0.0, 0.0, ids[0], BATCH),
        "pruning of old ones": filled_first(
            locking_old(outdated(rows, {"SUCCESSFUL": 7}).filter(pk__gt=first, pk__lte=first + BATCH), BATCH)
        ),
        "pruning of expired ones": filled_first(locking_old(expired(rows), BATCH)),
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
        "KNOWN_QUEUES": (BATCH, ["default"]),
        "COUNTED_QUEUES": (60.0, ["default"]),
        "COMMON_QUEUES": None,
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
        "CLAIM_GROUP": (ids[0], 1, *group, BATCH, *group, 0.0, BATCH, BATCH, worker),
        "CLAIM_GROUP_IN_KEY_ORDER": (ids[0], 1, *group[:2], BATCH, *group[:2], 0.0, BATCH, BATCH, worker),
        "FIND_UNIQUE": (["key 7"],),
        "FIND_AND_LOCK_UNIQUE": (["key 7"],),
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
        if names is None or name in names
    }


#: Constants that are not read here, because they look at no backlog: what they insert, lock, send, set or are part of,
#: the few rows of the two small tables, and what test_history.py and test_rate.py read.
ELSEWHERE = {
    "ARCHIVE_IS_USED", "ARCHIVE_RIGHTS", "ARCHIVE_STATE", "ARE_ARCHIVED", "KEEP_IDS", "LIMIT_MOVE", "MOVE_TO_ARCHIVE",
    "PARTITIONS_AND_DETACHED", "REFERENCES_TO_TASKS", "SCHEDULE_RUNS_ARCHIVED", "SIZES_OF_DAYS",
    "ARGUMENT_INDEX", "END_TURN", "FORGET_COUNTS", "FORGET_FAILURES", "READ_COUNTS", "READ_FAILURES", "TAKE_TURN",
    "WRITE_COUNTS",
    "ADD_HISTORY", "CLOCK", "HISTORY_OF", "HISTORY_OF_FUNCTION", "PRUNE_HISTORY", "TOTAL_HISTORY",
    "BEAT", "DRAW_IDS", "ENQUEUE", "ENQUEUE_DRAWN", "ENQUEUE_MANY", "ENQUEUE_ONE", "FIND_QUEUES", "FIRST_READY",
    "FORGET_RATES", "LAST_ID", "LIMIT_TICK", "LIMIT_WAITS", "LOCK_IS_HELD", "LOCK_KEY", "LOCK_KEYS", "NOTIFY_CANCEL",
    "LOCK_WORKER", "OPEN_RATES", "PRUNE", "REFUSING_KEYS", "UNAWAITED", "REGISTER_SCHEDULES", "RESTORE_WAITS",
    "SCHEDULES", "UNLOCK_WORKER", "UPKEEP_TURN", "WAKE", "WITNESS",
}  # fmt: skip


def test_no_hot_statement_reads_the_backlog_or_the_history(backlog):
    """All plans of one backlog in one test, because to insert a backlog takes longer than to execute every plan."""
    ids = list(Task.objects.filter(status="RUNNING").values_list("pk", flat=True))
    executed = plans(backlog, ids)
    read = {name: (rows_read(plan), pages_read(plan)) for name, plan in executed.items()}
    assert {name for name in STATEMENTS if name[0] != "_"} == ELSEWHERE | {name for name in read if name.isupper()}
    assert {name: counts for name, counts in read.items() if counts[0] > 30 * BATCH or counts[1] > 600} == {}
    nothing_is_compiled(executed)
    claims_neither_scan_nor_sort(executed)
    tasks_that_run_elsewhere_are_not_read(backlog, ids)


def nothing_is_compiled(executed):
    """A sort that is forbidden and has to be looks so expensive to servers before 18 that they would compile it."""
    assert [name for name, plan in executed.items() if "JIT" in plan[0]] == []


def tasks_that_run_elsewhere_are_not_read(worker, ids):
    """A settle that read all running tasks of a fleet took seven times as long beside a hundred thousand of them."""
    for living in Worker.objects.bulk_create(Worker(id=uuid4(), pid=1, threads=1, queues=[]) for _ in range(BATCH)):
        insert("RUNNING", 500, worker=living.pk)
    read = {name: rows_read(plan) for name, plan in plans(worker, ids, OF_ONE_WORKER).items()}
    assert set(read) == set(OF_ONE_WORKER)
    assert {name: count for name, count in read.items() if count > 30 * BATCH} == {}


def claims_neither_scan_nor_sort(executed):
    for name in ("a claim of one", "a claim of some", "a claim of many"):
        plan = executed[name]
        assert ("Index Scan", "pglock_task_ready") in reads(plan), name
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, name
        assert "Sort" not in {node["Node Type"] for node in nodes(plan)}, name


@pytest.mark.parametrize("name", ["RESCUE", "NOTE_PROGRESS"])
def test_rows_that_are_known_by_their_ids_are_compared_some_at_a_time(new_table, name):
    """The planner expects a few: a thousand of a worker that died were a million comparisons."""
    analyze()
    insert("RUNNING", 1000, worker=uuid4())
    ids = list(Task.objects.order_by("pk").values_list("pk", flat=True))[:RESCUED_AT_ONCE]
    values = {
        "RESCUE": (4.5, 5.25, 6.6, 30.0, RESCUED_AT_ONCE, RESCUED_AT_ONCE, 3, "x", "y"),
        "NOTE_PROGRESS": (ids, [1] * len(ids), ["null"] * len(ids)),
    }
    plan = executed(filled(STATEMENTS[name]), values[name], by_index=name in ORDERED)
    compared = [node.get("Rows Removed by Join Filter", 0) * node["Actual Loops"] for node in nodes(plan)]
    assert sum(compared) <= 100_000
    assert [len(rescue("default")) for _ in range(6)] == [RESCUED_AT_ONCE] * 5 + [0]


@pytest.mark.parametrize("backlog", ["from before", "of now"], indirect=True)
def test_the_query_of_the_autoscaler_stops_early(backlog):
    """Where the statistics know something of the table: this query comes from elsewhere, without our settings."""
    insert("READY", 10_000)
    insert("SCHEDULED", BATCH, seconds=-60)
    [query] = re.findall(r"query: >-\n(.*?) #", (ROOT / "deploy" / "kubernetes.yaml").read_text(), re.DOTALL)
    with connection.cursor() as cursor:
        cursor.execute(query)
        assert cursor.fetchone() == (1000 + BATCH + BATCH,), "of the ready ones no more, those in turns, and those due"
    plan = executed(query)
    assert rows_read(plan) <= 1000 + 3 * BATCH
    assert pages_read(plan) < 400
