"""The plans of the statements of the store beside a backlog: each reads no more rows and pages than it needs.

A plan can look right and still walk through everything, so plans are executed, and what they read is counted
(``backlog.py``). Each function here says how the statements of one verb are called.
"""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock import Rate
from django_pglock.models import Task
from django_pglock.store.admit import ADMIT, ADMIT_NEXT, BLOCKED_KEYS, HOLDERS
from django_pglock.store.children import ABOVE, CHILDREN, END_GATHER, SUSPEND_PARENT
from django_pglock.store.claim import CLAIM_FAIR, CLAIM_GROUP, RUNNING_CLAIM, claim_statement
from django_pglock.store.count import COUNT_FAILED, COUNT_OTHERS, COUNT_READY, COUNT_SUSPENDED
from django_pglock.store.dependants import CANCELLED_BECAUSE_OF, PASS_CAUSE_ON, UNFINISHED_PARTS
from django_pglock.store.enqueue import ENQUEUE_UNKNOWN, admit_statement, enqueue_statement
from django_pglock.store.failures import FAILURE_GROUPS
from django_pglock.store.id_range import BISECT
from django_pglock.store.insert_tasks import insert_many
from django_pglock.store.liveness import DELETE_DEAD
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.operate import CANCEL, DELETE, RESET, RETRY
from django_pglock.store.prune import NEXT_WINDOW, expired, locking_old, outdated
from django_pglock.store.rate import OPEN_RATES, START_AT_RATE
from django_pglock.store.ready import NEXT_DUE, READY_PATHS, READY_QUEUES, UNKNOWN, due
from django_pglock.store.release import (
    AWAITED,
    AWAITED_BETWEEN,
    FIND_ENDED,
    HAVE_DEPENDENCIES,
    ORPHANED_WAITERS,
    RELEASE,
    RELEASE_UNLOCKED,
    WAIT_AGAIN,
    WRITE_WAITERS,
)
from django_pglock.store.requests_to_worker import (
    ANSWER_STACK,
    REQUEST_STACK,
    REQUESTS,
    STACK,
    WRITE_LAST_PROGRESS,
    WRITE_LOGS,
    WRITE_PROGRESS,
)
from django_pglock.store.rescue import POSSIBLY_LOST, RESCUE
from django_pglock.store.schedules import SCHEDULE_RUNS
from django_pglock.store.settle import (
    FINISH_DATES,
    GIVE_BACK,
    LOCK_OWN,
    LOCKED_BY_OTHERS,
    SETTLE_OTHERS,
    SETTLE_OWN_OTHERS,
    SETTLE_OWN_SUCCESS,
    SETTLE_OWN_SUCCESSES,
    SETTLE_SUCCESSES,
    SETTLE_UNOBSERVED,
)
from django_pglock.store.statements import array_of_numbers, filled
from django_pglock.store.steps import (
    COUNT_ANEW,
    EMIT,
    FORGET_FAILED,
    FORGET_FROM,
    MISSED_EVENTS,
    NOTE_CAUSES,
    NOTE_POSITION,
    PRUNE_EVENTS,
    RECORD,
    RECORD_OWN,
    RECORDS,
    SUSPEND,
    WAKE_WAITING,
)
from django_pglock.store.unique import FIND_AND_LOCK_UNIQUE, FIND_UNIQUE, FREE_EXPIRED_UNIQUE, replace_statement
from django_pglock.store.wake import STILL_READY
from django_pglock.store.why_it_waits import GATHERED, OPEN_STEP, WHY_UNFINISHED
from tests.plans.reading import (
    BATCH,
    CALL,
    PATH,
    nodes,
    pages_read,
    reads,
    scans_by_key,
)
from tests.plans.store.backlog import STATISTICS, Call, plans_beside_backlog
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

HERE = ("default", [PATH], None)
KEY = ("backlog", "backlog")


def admission(backlog):
    first = backlog.ids[0]
    return {
        "ADMIT": Call(filled(ADMIT), (["backlog"],), by_index=True),
        "ADMIT, with tasks of the key for later": Call(filled(ADMIT), (["for later"],), by_index=True),
        "ADMIT, behind tasks that wait for others": Call(filled(ADMIT), (["after others"],), by_index=True),
        "ADMIT, beside a task that gathers": Call(filled(ADMIT), (["gathered"],), by_index=True),
        "ADMIT_NEXT": Call(filled(ADMIT_NEXT), (["backlog"],), by_index=True),
        "ADMIT_NEXT beside a task that gathers": Call(filled(ADMIT_NEXT), (["gathered"],), by_index=True),
        "ADMIT_NEXT to several": Call(filled(ADMIT_NEXT), (["backlog", "other"],), by_index=True),
        "enqueueing at a key": Call(enqueue_statement("default", keyed.step, CALL, "{}"), by_index=True),
        "admitting one": Call(admit_statement("default", keyed.step, first, "backlog"), by_index=True),
    }


def claims(backlog):
    paths = [PATH, "tests.sample.tasks.echo"]
    plain = filled(claim_statement("default", worker=backlog.worker, paths=paths).text)
    behind = filled(claim_statement("default", worker=backlog.worker, paths=paths, behind=True).text)
    return {
        "CLAIM of one": Call(plain, ("default", "default", 1), by_index=True),
        "CLAIM of some": Call(plain, ("default", "default", BATCH), by_index=True),
        "CLAIM of many": Call(plain, ("default", "default", 1000), by_index=True),
        "CLAIM behind the last": Call(behind, ("default", 0, 0, "default", BATCH), by_index=True),
    }


def outcomes(backlog):
    ids, ones, texts = backlog.ids, backlog.ones, backlog.texts
    failed = ["FAILED"] * len(ids)
    others = (ids, ones, failed, [0.0] * len(ids), ones, ones, ones, failed, texts, texts, ids, texts)
    many = [*ids, *range(ids[-1] + 10_000_000, ids[-1] + 10_000_490)]
    return {
        "SETTLE_SUCCESSES": Call(filled(SETTLE_SUCCESSES), (ids, ones, "[]")),
        "SETTLE_SUCCESSES, many": Call(filled(SETTLE_SUCCESSES), (many, [1] * len(many), "[]")),
        "SETTLE_UNOBSERVED": Call(filled(SETTLE_UNOBSERVED), (ids, ones, "[]", len(ids))),
        "SETTLE_UNOBSERVED, many": Call(filled(SETTLE_UNOBSERVED), (many, [1] * len(many), "[]", len(many))),
        "SETTLE_OWN_SUCCESS": Call(filled(SETTLE_OWN_SUCCESS), ("null", ids[0], 1)),
        "SETTLE_OWN_SUCCESSES": Call(filled(SETTLE_OWN_SUCCESSES), (ids, ones, "[]", len(ids))),
        "SETTLE_OTHERS": Call(filled(SETTLE_OTHERS), (*others, backlog.worker)),
        "SETTLE_OWN_OTHERS": Call(filled(SETTLE_OWN_OTHERS), (*others, backlog.worker)),
        "LOCK_OWN": Call(filled(LOCK_OWN), [backlog.array]),
        "LOCKED_BY_OTHERS": Call(filled(LOCKED_BY_OTHERS), (ids, ones)),
        "ENQUEUE_UNKNOWN": Call(filled(ENQUEUE_UNKNOWN), ("other.tasks.call", backlog.array)),
        "FINISH_DATES": Call(filled(FINISH_DATES), [backlog.array]),
    }


def rates(backlog):
    one, many = (keyed.drip.using(rate=Rate(most, per=most, burst=most)) for most in (1, BATCH))
    return {
        "OPEN_RATES": Call(filled(OPEN_RATES), [BATCH], by_index=True),
        "enqueueing": Call(enqueue_statement("default", many, CALL, "{}"), by_index=True),
        "enqueueing of one": Call(enqueue_statement("default", one, CALL, "{}"), by_index=True),
        "START_AT_RATE": Call(filled(START_AT_RATE), [["backlog"], [1.0], [1], [1]], by_index=True),
        "admission": Call(admit_statement("default", many, backlog.ids[0], "backlog"), by_index=True),
        "admission of one": Call(admit_statement("default", one, backlog.ids[0], "backlog"), by_index=True),
    }


def releases(backlog):
    ids, one = backlog.ids, f"{{{backlog.ids[0]}}}"
    return {
        "AWAITED_BETWEEN": Call(filled(AWAITED_BETWEEN), (ids[0], ids[-1], 2 * len(ids))),
        "AWAITED": Call(filled(AWAITED), [one]),
        "RELEASE": Call(filled(RELEASE), (one, BATCH, "x", "%s", "done")),
        "RELEASE_UNLOCKED": Call(filled(RELEASE_UNLOCKED), (one, BATCH, "x", "%s", "done")),
        "RELEASE of several": Call(filled(RELEASE), (array_of_numbers(backlog.awaited), BATCH, "x", "%s", "done")),
        "ORPHANED_WAITERS": Call(filled(ORPHANED_WAITERS), (0, BATCH)),
    }


def promotion(_backlog):
    promotion = marking_sql(first_free(due(Task.objects.all()), 1000, no_key=True), {"status": "READY"}, '"queue"')
    return {"promotion": Call(*promotion, by_index=True), "NEXT_DUE": Call(filled(NEXT_DUE), by_index=True)}


def rescue_of_tasks(_backlog):
    return {
        # Heartbeats count as recent for an hour: a slow machine takes long to fill the tables.
        "RESCUE": Call(filled(RESCUE), (3600.0, 3600.0, 3600.0, 1000, 1000, 3, "x", "x", "y"), by_index=True),
        "POSSIBLY_LOST": Call(filled(POSSIBLY_LOST), (3600.0, 3600.0, None), by_index=True),
    }


def requests(backlog):
    return {
        "REQUESTS": Call(filled(REQUESTS), ([backlog.worker],), by_index=True),
        "REQUEST_STACK": Call(filled(REQUEST_STACK), (backlog.ids[0],)),
        "ANSWER_STACK": Call(filled(ANSWER_STACK), ("", backlog.ids[0], 1, backlog.worker)),
        "STACK": Call(filled(STACK), (backlog.ids[0],)),
    }


def progress_and_logs(backlog):
    values = (backlog.ids, backlog.ones, backlog.texts)
    return {
        "WRITE_PROGRESS": Call(filled(WRITE_PROGRESS), values),
        "WRITE_LAST_PROGRESS": Call(filled(WRITE_LAST_PROGRESS), values),
        "WRITE_LOGS": Call(filled(WRITE_LOGS), values),
    }


def pruning_of_tasks(backlog):
    window = outdated(Task.objects.all(), {"SUCCESSFUL": 7}).filter(pk__gt=backlog.first, pk__lte=backlog.first + BATCH)
    old, values = locking_old(window, BATCH)
    window = outdated(Task.objects.all(), {"SUCCESSFUL": 0}).filter(
        pk__gt=min(backlog.awaited) - 1, pk__lte=max(backlog.awaited)
    )
    awaited, values_of_awaited = locking_old(window, BATCH)
    over, values_of_over = locking_old(expired(Task.objects.all()), BATCH)
    return {
        "NEXT_WINDOW": Call(filled(NEXT_WINDOW), (0.0, backlog.ids[0], BATCH)),
        "the locking of old ones": Call(filled(old), values),
        "the locking of awaited ones": Call(filled(awaited), values_of_awaited),
        "the locking of expired ones": Call(filled(over), values_of_over),
    }


def counts(_backlog):
    return {
        "COUNT_READY": Call(filled(COUNT_READY), (["default", "other"], 3, BATCH, BATCH)),
        "COUNT_FAILED": Call(filled(COUNT_FAILED), [BATCH] * 4),
        "COUNT_OTHERS": Call(filled(COUNT_OTHERS), [BATCH]),
        "COUNT_SUSPENDED": Call(filled(COUNT_SUSPENDED), [BATCH]),
    }


def failure_groups(backlog):
    return {
        "FAILURE_GROUPS": Call(filled(FAILURE_GROUPS), (BATCH, BATCH, 24, BATCH, BATCH)),
    }


def unknown_tasks(_backlog):
    return {"UNKNOWN": Call(filled(UNKNOWN), (30.0, None, BATCH, BATCH, None))}


def cancels(backlog):
    chosen = CANCEL.movable(Task.objects.filter(pk__in=backlog.ids)).values("pk")
    return {"of a few": Call(*chosen.query.sql_with_params())}


def deletions(backlog):
    chosen = DELETE.movable(Task.objects.filter(pk__in=[backlog.first, *backlog.awaited])).values("pk")
    return {"of a few": Call(*chosen.query.sql_with_params())}


def resets(backlog):
    chosen = first_free(RESET.movable(Task.objects.filter(pk__in=backlog.ids)).order_by("id"), no_key=True)
    return {"of a few": Call(*marking_sql(chosen, {"status": "READY", "worker": None}, '"queue"'))}


def retries(backlog):
    retried = RETRY.movable(Task.objects.filter(pk=backlog.first)).order_by("pk")
    changes = {"status": "READY", "finished_at": None}
    return {"of one": Call(*marking_sql(first_free(retried, 1000, no_key=True), changes, '"queue"'))}


def few_rows(backlog):
    first = backlog.ids[0]
    return {
        # Tasks that wait for others are enqueued, and wait again, beside a backlog.
        "HAVE_DEPENDENCIES": Call(filled(HAVE_DEPENDENCIES), (f"{{{backlog.ids[0]}}}",)),
        "WAIT_AGAIN": Call(filled(WAIT_AGAIN), (f"{{{backlog.ids[0]}}}",)),
        # What belongs to a task is found by the index of causes, and by that of waiting tasks.
        "CANCELLED_BECAUSE_OF": Call(filled(CANCELLED_BECAUSE_OF), [backlog.array]),
        "UNFINISHED_PARTS": Call(filled(UNFINISHED_PARTS), [backlog.array]),
        "PASS_CAUSE_ON": Call(filled(PASS_CAUSE_ON), [backlog.array, "%s"]),
        "ENQUEUE_MANY, with after": Call(insert_many(connection, tasks.nothing.using(after=backlog.ids), [CALL], "{}")),
        # A claim in turns reads the first tasks of each tenant.
        "CLAIM_FAIR": Call(
            filled(CLAIM_FAIR),
            ("", "default", *HERE, "default", BATCH, *HERE, BATCH, BATCH, backlog.worker, BATCH),
            by_index=True,
        ),
        # A claim of a group reads the first waiting tasks of its key.
        **{
            f"CLAIM_GROUP, {has_order}": Call(
                filled(CLAIM_GROUP),
                (first, 1, *KEY, has_order, BATCH, *KEY, 0.0, BATCH, has_order, BATCH, backlog.worker),
                by_index=True,
            )
            for has_order in (True, False)
        },
        # The claim that has exceeded its timeout is found by the task's id.
        "RUNNING_CLAIM": Call(filled(RUNNING_CLAIM), (first, 1, backlog.worker)),
        # Claims are given back by the index of running tasks.
        "GIVE_BACK": Call(filled(GIVE_BACK), (*[backlog.worker] * 3, [1], 0.0, None, None, []), by_index=True),
        # The ids of a time are found by the primary key.
        "BISECT": Call(filled(BISECT), ["2026-01-01", 0.0, 300]),
        # Workers that are dead are deleted unless they have running tasks, which an index has.
        "DELETE_DEAD": Call(filled(DELETE_DEAD), (30.0,), by_index=True),
        "DELETE_DEAD, if all are silent": Call(filled(DELETE_DEAD), (0.0,), by_index=True),
        # Lock keys, and the tasks that hold one, are found by the index of keys.
        "BLOCKED_KEYS": Call(filled(BLOCKED_KEYS), ("", 1000), by_index=True),
        "HOLDERS": Call(filled(HOLDERS), (*["backlog"] * 4, BATCH), by_index=True),
        "HOLDERS beside a task that gathers": Call(filled(HOLDERS), (*["gathered"] * 4, BATCH), by_index=True),
        # Queues and functions of ready tasks are found by a probe each.
        "READY_QUEUES": Call(filled(READY_QUEUES), by_index=True),
        "READY_PATHS": Call(filled(READY_PATHS), (BATCH, BATCH)),
        # Tasks that processes wait for are found by their ids.
        "WRITE_WAITERS": Call(filled(WRITE_WAITERS), [f"{{{backlog.ids[0]}}}"] * 2),
        "FIND_ENDED": Call(filled(FIND_ENDED), [backlog.array]),
        # The runs of a schedule are found one from the other, and the statuses of the last ones, by their ids.
        "SCHEDULE_RUNS": Call(filled(SCHEDULE_RUNS), (backlog.ids[-1], PATH, PATH, BATCH)),
        # Unique keys are looked up, freed and replaced by their index.
        "FIND_UNIQUE": Call(filled(FIND_UNIQUE), (["key 7"],)),
        "FIND_AND_LOCK_UNIQUE": Call(filled(FIND_AND_LOCK_UNIQUE), (["key 7"],)),
        "FREE_EXPIRED_UNIQUE": Call(filled(FREE_EXPIRED_UNIQUE), (["key 7"],)),
        "REPLACE_UNIQUE": Call(replace_statement("default", tasks.nothing, CALL._replace(unique="key 7"), "{}")),
        # Before others are woken, ready tasks are looked for by one index probe for each queue.
        "STILL_READY": Call(filled(STILL_READY), (["default", "other", "empty"],)),
        # The reason why a task is not finished is found by its id.
        "WHY_UNFINISHED": Call(filled(WHY_UNFINISHED), (30.0, backlog.ids[0])),
    }


def steps(backlog):
    first = backlog.ids[0]
    return {
        "RECORDS": Call(filled(RECORDS), (first,)),
        "RECORD": Call(filled(RECORD), ("new", 1, "STEP", "1", None, 0.0, first, 1)),
        "RECORD_OWN": Call(filled(RECORD_OWN), ("last", 1, "STEP", "1", None, 0.0, 1, first, 1)),
        "NOTE_POSITION": Call(filled(NOTE_POSITION), ('"6"', "rows", 1, '"7"', False, first, 1)),
        "COUNT_ANEW": Call(filled(COUNT_ANEW), (first, 1)),
        "SUSPEND": Call(filled(SUSPEND), ([first], [1], ["rest"], [1], ["EVENT"], ["came 7"], [True])),
        "EMIT": Call(filled(EMIT), ("new", "1", 60.0)),
        "WAKE_WAITING": Call(filled(WAKE_WAITING), (["came 7", "awaited 7"],)),
        "MISSED_EVENTS": Call(filled(MISSED_EVENTS), ("", BATCH), by_index=True),
        "PRUNE_EVENTS": Call(filled(PRUNE_EVENTS), (BATCH,), by_index=True),
        "NOTE_CAUSES": Call(filled(NOTE_CAUSES), ([first], ["wait"], [first])),
        "FORGET_FROM": Call(filled(FORGET_FROM), (backlog.first, backlog.first, "wait")),
        "FORGET_FAILED": Call(filled(FORGET_FAILED), (backlog.ids,)),
        "OPEN_STEP": Call(filled(OPEN_STEP), (first, first)),
    }


def gathers(backlog):
    first, gathering, array = backlog.ids[0], backlog.gathering, backlog.array
    step = (gathering, "children")
    return {
        "SUSPEND_PARENT": Call(filled(SUSPEND_PARENT), (BATCH, first, 1, "new", 1, "{}", array)),
        "ABOVE": Call(filled(ABOVE), (first,), by_index=True),
        "END_GATHER": Call(filled(END_GATHER), (*step, *step)),
        "CHILDREN": Call(filled(CHILDREN), (f"{{{gathering},{first}}}",)),
        "GATHERED": Call(filled(GATHERED), (gathering,)),
    }


VERBS = (
    *(admission, claims, outcomes, rates, releases, promotion, rescue_of_tasks, requests, progress_and_logs),
    *(pruning_of_tasks, counts, failure_groups, unknown_tasks, cancels, deletions, resets, retries, few_rows, steps),
    gathers,
)
#: The rows and pages that statements may read where these are other than usual.
LIMITS = {
    admission: {"rows": 20 * BATCH, "pages": 400},
    outcomes: {"pages": 2000},
    rates: {"rows": 20 * BATCH, "pages": 400},
}
#: Servers before 17 may read all unfinished or all running tasks by the index of their statuses, as for all tasks.
BEFORE_17 = {cancels: {"rows": 80_000, "pages": 6_000}, resets: {"rows": 6_000, "pages": 6_000}}


@pytest.fixture(params=STATISTICS)
def plans(request, db):
    """The plans of each verb, executed beside the backlog with statistics of one kind."""
    if not plans_beside_backlog.cache_info().currsize:
        request.getfixturevalue("new_table")
    return plans_beside_backlog(VERBS)[request.param]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_each_statement_reads_no_more_than_its_rows(plans, verb):
    """With statistics that have no buckets, the planner read all keys with a bucket before the one of an admission."""
    old = BEFORE_17.get(verb) if connection.pg_version < 170_000 else None
    plans[verb].check(**(old or LIMITS.get(verb, {})))


def test_a_claim_walks_the_ready_index_in_order(plans):
    for name, plan in plans[claims].items():
        if name != "behind the last":
            assert ("Index Scan", "pglock_task_ready") in reads(plan), name
            assert "Sort" not in {node["Node Type"] for node in nodes(plan)}, name


def test_no_table_is_read_for_claims_outcomes_and_progress(plans):
    for verb in (claims, outcomes, progress_and_logs):
        for name, plan in plans[verb].items():
            assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, name


def test_due_tasks_and_tokens_are_found_by_the_index_of_dates(plans):
    for plan in plans[promotion].values():
        assert "pglock_task_due" in {index for _, index in reads(plan)}
    assert pages_read(plans[rates]["OPEN_RATES"]) <= 20


def test_admission_to_one_key_reads_the_index_of_keys(plans):
    """``ADMIT_NEXT`` reads the first waiting task of the key, and whether another one is admitted."""
    assert scans_by_key(plans[admission]["ADMIT_NEXT"]) == [2, 4]
    assert scans_by_key(plans[admission]["enqueueing at a key"]) == [1, 1]
    assert scans_by_key(plans[admission]["admitting one"]) == [1, 2]
    assert scans_by_key(plans[rates]["enqueueing of one"]) == [1, 1]
    assert scans_by_key(plans[rates]["admission of one"]) == [1, 2]
