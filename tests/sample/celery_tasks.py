"""Tasks with Celery's names, which kill their process."""

from __future__ import annotations

import os
import signal

from django_pglock.contrib.celery import shared_task
from tests.sample.models import Effect


@shared_task
def add(x, y):
    return x + y


@shared_task(bind=True)
def dies_once(self, number):
    """Kill this process in the first attempt."""
    Effect.objects.create(name="begins", number=self.request.retries)
    if Effect.objects.filter(name="begins").count() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number + self.request.delivery_info["redelivered"]


@shared_task
def dies():
    """Kill each process."""
    os.kill(os.getpid(), signal.SIGKILL)


@shared_task
def note_failure(task_id):
    Effect.objects.create(name=task_id)
