"""A queryset of ours adds to Django's and takes nothing of it away by accident."""

from __future__ import annotations

from django.db.models import QuerySet

from django_pglock.models import Task
from tests.sample.models import Letter


def test_no_method_hides_one_of_django_including_its_private_ones():
    """``bulk_create`` calls ``_insert``, for one, and only on some versions."""
    for model in (Task, Letter):
        ours = [each for each in type(model.objects.all()).__mro__ if each.__module__.startswith("django_pglock")]
        assert ours
        assert [name for each in ours for name in vars(each) if name[:2] != "__" and hasattr(QuerySet, name)] == []
