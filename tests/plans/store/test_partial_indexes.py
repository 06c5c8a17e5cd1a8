"""Which partial index serves each small statement: ask EXPLAIN, not the clock."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.statements import filled
from tests.plans.reading import STATEMENTS, plan_of, reads

pytestmark = pytest.mark.django_db


def test_the_other_statements_use_their_partial_indexes(history):
    worker = uuid4()
    Task.objects.filter(status="READY", queue="q1").update(status="RUNNING", worker=worker, last_attempted_at=Now())
    expected = {
        "NEXT_DUE": ((), {"pglock_task_due"}),
        "READY_QUEUES": ((), {"pglock_task_ready", "pglock_task_fair"}),
        "UNKNOWN": ((30.0, None, 1000, 1000, None), {"pglock_task_ready", "pglock_task_fair"}),
        "GIVE_BACK": ((worker, worker, worker, [1], 0.0, None, []), {"pglock_task_running", "django_pglock_task_pkey"}),
        "DOUBTFUL": ((6.6, None), {"pglock_task_running"}),
        "READY_PATHS": ((1000, 1000), {"pglock_task_ready", "pglock_task_fair"}),
        "CANCEL_REQUESTS": ((worker, worker), {"pglock_task_running"}),
        "REQUESTS": ((worker, worker, worker), {"pglock_task_running"}),
    }
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_task")
    for name, (params, index) in expected.items():
        plan = plan_of(filled(STATEMENTS[name]), params or None)
        assert {each for _, each in reads(plan)} == index, json.dumps(plan, indent=1)
