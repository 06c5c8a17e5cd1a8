"""The plans of the statements that need nothing but their few rows: by a key, by ids or by a few probes."""

from __future__ import annotations

from uuid import uuid4

from django.db import connection

from django_pglock.store.admit import BLOCKED_KEYS, HOLDERS
from django_pglock.store.after import HAVE_DEPENDENCIES, WAIT_AGAIN
from django_pglock.store.await_end import AWAITED_IN_WORKER
from django_pglock.store.call import row_of
from django_pglock.store.claim import CLAIM_FAIR, CLAIM_GROUP, RUNNING_CLAIM
from django_pglock.store.id_range import ABOVE_SUCCEEDED, ENQUEUED_BETWEEN, FIRST_SINCE
from django_pglock.store.insert_tasks import insert_many
from django_pglock.store.liveness import DELETE_DEAD
from django_pglock.store.ready import READY_PATHS, READY_QUEUES
from django_pglock.store.release import FIND_ENDED, WRITE_WAITERS
from django_pglock.store.schedules import LAST_STATUSES, SCHEDULE_RUNS
from django_pglock.store.settle import GIVE_BACK
from django_pglock.store.statements import filled
from django_pglock.store.unique import FIND_AND_LOCK_UNIQUE, FIND_UNIQUE, FREE_EXPIRED_UNIQUE, REPLACE_UNIQUE
from django_pglock.store.wake import STILL_READY
from django_pglock.store.why_it_waits import WHY_UNFINISHED
from tests.plans.reading import BATCH, CALL, PATH
from tests.plans.store.backlog import Call
from tests.sample import tasks

HERE = ("default", [PATH], None)
KEY = ("backlog", "backlog")


def calls(backlog):
    first = backlog.ids[0]
    return {
        # Tasks that wait for others are enqueued, and wait again, beside a backlog.
        "HAVE_DEPENDENCIES": Call(filled(HAVE_DEPENDENCIES), (f"{{{backlog.ids[0]}}}",)),
        "WAIT_AGAIN": Call(filled(WAIT_AGAIN), (f"{{{backlog.ids[0]}}}",)),
        "ENQUEUE_MANY, with after": Call(insert_many(connection, tasks.nothing.using(after=backlog.ids), [CALL], "{}")),
        # What a task waits for, and the queues of its worker, are found by their ids.
        "AWAITED_IN_WORKER": Call(filled(AWAITED_IN_WORKER), (uuid4(), backlog.ids[0])),
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
        # The id above all tasks that have succeeded is found by the primary key.
        "ABOVE_SUCCEEDED": Call(filled(ABOVE_SUCCEEDED)),
        "ENQUEUED_BETWEEN": Call(filled(ENQUEUED_BETWEEN), ["2026-01-01"] * 4),
        "FIRST_SINCE": Call(filled(FIRST_SINCE), [0.0]),
        # Workers that are dead are deleted unless they have running tasks, which an index has.
        "DELETE_DEAD": Call(filled(DELETE_DEAD), (30.0,), by_index=True),
        "DELETE_DEAD, if all are silent": Call(filled(DELETE_DEAD), (0.0,), by_index=True),
        # Lock keys, and the tasks that hold one, are found by the index of keys.
        "BLOCKED_KEYS": Call(filled(BLOCKED_KEYS), ("", 1000), by_index=True),
        "HOLDERS": Call(filled(HOLDERS), ("backlog", "backlog", BATCH)),
        # Queues and functions of ready tasks are found by a probe each.
        "READY_QUEUES": Call(filled(READY_QUEUES), by_index=True),
        "READY_PATHS": Call(filled(READY_PATHS), (BATCH, BATCH)),
        # Tasks that processes wait for are found by their ids.
        "WRITE_WAITERS": Call(filled(WRITE_WAITERS), [f"{{{backlog.ids[0]}}}"] * 2),
        "FIND_ENDED": Call(filled(FIND_ENDED), [backlog.array]),
        # The runs of a schedule are found one from the other, and the statuses of the last ones, by their ids.
        "LAST_STATUSES": Call(filled(LAST_STATUSES), [backlog.array]),
        "SCHEDULE_RUNS": Call(filled(SCHEDULE_RUNS), (backlog.ids[-1], PATH, PATH, BATCH)),
        # Unique keys are looked up, freed and replaced by their index.
        "FIND_UNIQUE": Call(filled(FIND_UNIQUE), (["key 7"],)),
        "FIND_AND_LOCK_UNIQUE": Call(filled(FIND_AND_LOCK_UNIQUE), (["key 7"],)),
        "FREE_EXPIRED_UNIQUE": Call(filled(FREE_EXPIRED_UNIQUE), (["key 7"],)),
        "REPLACE_UNIQUE": Call(
            filled(REPLACE_UNIQUE),
            row_of(tasks.nothing, CALL._replace(unique="key 7"), "{}") | {"date": None, "delay": None},
        ),
        # Before others are woken, ready tasks are looked for by one index probe for each queue.
        "STILL_READY": Call(filled(STILL_READY), (["default", "other", "empty"],)),
        # The reason why a task is not finished is found by its id.
        "WHY_UNFINISHED": Call(filled(WHY_UNFINISHED), (30.0, backlog.ids[0])),
    }


def test_each_statement_reads_no_more_than_its_rows(plans):
    plans.check()
