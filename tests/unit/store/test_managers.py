"""A queryset of this package extends that of Django and hides none of its methods."""

from __future__ import annotations

import pytest
from django.db.models import QuerySet

from django_pglock.models import Number, Queue, Task
from tests.sample.models import Letter


def test_no_method_hides_one_of_django_including_its_private_ones():
    """``bulk_create`` calls ``_insert``, for one, and only on some versions."""
    for model in (Task, Letter):
        ours = [each for each in type(model.objects.all()).__mro__ if each.__module__.startswith("django_pglock")]
        assert ours
        assert [name for each in ours for name in vars(each) if name[:2] != "__" and hasattr(QuerySet, name)] == []


@pytest.mark.parametrize("name", ["claim_each", "claim_update"])
def test_tasks_change_their_status_only_by_verbs_of_tasks(name):
    """``claim_update(1, status="SUCCESSFUL")`` would release neither the lock key nor the tasks that wait for it."""
    assert hasattr(Letter.objects.all(), name)
    assert not hasattr(Task.objects, name)
    assert not hasattr(Task.objects.all(), name)
    assert hasattr(Task.objects.all(), "claim")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Task, ["unknown", "queue_counts", "failures", "count_workable"]),
        (Queue, ["pause", "resume"]),
        (Number, ["series", "totals"]),
    ],
)
def test_what_reads_a_whole_database_is_no_method_of_a_queryset(model, names):
    """``filter(queue="mail").failures()`` would return the failures of all queues."""
    other = model.objects.db_manager("other")
    assert [name for name in names if not hasattr(other, name)] == []
    assert [name for name in names if hasattr(model.objects.filter(pk=1), name)] == []
    assert other.db == "other"
