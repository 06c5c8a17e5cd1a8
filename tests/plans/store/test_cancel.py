"""The tasks that a cancel would change are counted by the key, as they are changed."""

from __future__ import annotations

from django.db import connection

from django_pglock.models import Task
from django_pglock.store.operate import CANCEL
from tests.plans.store.backlog import Call


def calls(backlog):
    chosen = CANCEL.movable(Task.objects.filter(pk__in=backlog.ids)).values("pk")
    return {"of a few": Call(*chosen.query.sql_with_params())}


def test_a_few_tasks_to_cancel_are_read_by_their_keys(plans):
    # Servers before 17 may read all unfinished tasks by the index of their statuses, as a cancel of all tasks does.
    plans.check(**({"rows": 60_000, "pages": 6_000} if connection.pg_version < 170_000 else {}))
