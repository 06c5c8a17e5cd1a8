"""A backfill of django-maintenance-tasks."""

from __future__ import annotations

from django.db.models import QuerySet
from maintenance_tasks.task import MaintenanceTask

from django_pglock import lock
from qa.foreign.sample.models import Letter


class Capitalise(MaintenanceTask):
    batch_size = 2

    def collection(self) -> QuerySet[Letter]:
        return Letter.objects.all()

    def process(self, item: Letter) -> None:
        with lock("letter", item.pk):
            Letter.objects.filter(pk=item.pk).update(text=item.text.upper())
