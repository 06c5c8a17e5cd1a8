"""A task by the clock of django-crontask."""

from __future__ import annotations

from crontask import cron
from django.tasks import task

from qa.foreign.sample.models import Letter


@cron("0 3 * * *")
@task
def write_nightly() -> None:
    Letter.objects.create(text="nightly")
