"""A reset of stuck tasks beside a worker that claims one of them."""

from __future__ import annotations

import math
from threading import Event
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL

from django_pglock.models import Task
from django_pglock.store.claim import claim_statement
from django_pglock.store.liveness import beat
from django_pglock.store.rescue import rescue
from tests.conftest import NEVER
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

GATE = 4711
WAITS_AT_GATE = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted)"


def query(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql, [GATE])
        return cursor.fetchone()[0]


def claim(worker):
    return claim_statement("default", worker=worker, paths=[tasks.nothing.module_path]).execute(1, "default")


def test_a_task_that_a_new_worker_has_claimed_meanwhile_is_not_reset(in_threads, eventually):
    """The new worker registers after the snapshot of the statement that resets, and before it reads a row."""
    tasks.nothing.enqueue()
    assert claim(uuid4()), "by a worker without a row, so it is dead"
    living, is_closed = uuid4(), Event()

    def reset_or_claim(number):
        if number == 0:
            assert is_closed.wait(NEVER)
            # Evaluated once, before the first row is read.
            at_gate = RawSQL(f"(SELECT pg_advisory_xact_lock_shared({GATE})::text = '')", (), BooleanField())
            return Task.objects.filter(at_gate).reset_stuck()
        query("SELECT pg_advisory_lock(%s) IS NULL")
        is_closed.set()
        eventually(lambda: query(WAITS_AT_GATE))
        assert rescue("default", unbroken=math.inf)
        beat("default", living, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
        claimed = claim(living)
        query("SELECT pg_advisory_unlock(%s)")
        return len(claimed)

    assert in_threads(reset_or_claim, 2) == [0, 1], "none was reset, one was claimed"
    assert Task.objects.get().worker == living
