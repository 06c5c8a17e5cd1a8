"""A reset of stuck tasks reads these tasks twice, by the key."""

from __future__ import annotations

from django.db import connection

from django_pglock.models import Task
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.operate import RESET
from tests.plans.store.backlog import Call


def calls(backlog):
    chosen = first_free(RESET.movable(Task.objects.filter(pk__in=backlog.ids)).order_by("id"), no_key=True)
    return {"of a few": Call(*marking_sql(chosen, {"status": "READY", "worker": None}, '"queue"'))}


def test_a_reset_of_a_few_reads_their_rows(plans):
    # Servers before 17 may read all running tasks by the index of their statuses, as a reset of all tasks does.
    plans.check(**({"rows": 6_000, "pages": 6_000} if connection.pg_version < 170_000 else {}))
