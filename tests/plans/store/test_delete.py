"""Whether a finished task is needed is read by an index for each task, however many tasks wait for others."""

from __future__ import annotations

from django_pglock.models import Task
from django_pglock.store.operate import DELETE
from tests.plans.store.backlog import Call


def calls(backlog):
    chosen = DELETE.movable(Task.objects.filter(pk__in=[backlog.first, *backlog.awaited])).values("pk")
    return {"of a few": Call(*chosen.query.sql_with_params())}


def test_a_few_tasks_to_delete_are_read_by_their_keys(plans):
    plans.check()
