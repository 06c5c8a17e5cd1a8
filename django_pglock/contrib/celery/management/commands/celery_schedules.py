"""``manage.py celery_schedules``: beat's schedules become rows of ``Schedule``, once."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_pglock.contrib.celery.schedules import move


class Command(BaseCommand):
    """Move the schedules of Celery's beat."""

    help = (
        "Make rows of Schedule of the rows of django-celery-beat, which are disabled there, and of beat_schedule. "
        "A schedule that has been moved before is left as it is. Ends with an error if one cannot be moved."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        lines = list(move())
        for line in lines or ["There are no schedules of Celery."]:
            self.stdout.write(line)
        if left := sum("NOT MOVED" in line for line in lines):
            raise CommandError(f"{left} schedules were not moved.")
