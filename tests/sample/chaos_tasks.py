"""Task functions that leave evidence of each run: who ran what, from when to when. tests/chaos judges by it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from django.db import Error as DatabaseFailure
from django.db import connection
from django.db.models.functions import Now

from django_pglock import TaskContext, task
from tests.sample.models import Run

#: Seconds for which a function tries to write that it ends. Until it has, it has not ended.
LAST_WORD = 60.0


def identity(context: TaskContext) -> dict[str, Any]:
    result = context.task_result
    return {"task": int(result.id), "attempt": context.fencing_token, "worker": result.worker_ids[-1]}


@contextlib.contextmanager
def recorded(context: TaskContext, key: str = "") -> Iterator[None]:
    """Write a start and an end, each committed at once."""
    me = identity(context)
    try:
        Run.objects.create(**me, key=key)
        yield
    finally:
        end(me)


def end(me: dict[str, Any]) -> None:
    deadline = time.monotonic() + LAST_WORD
    while True:
        try:
            Run.objects.filter(**me).update(ended_at=Now())
            return
        except DatabaseFailure:
            if time.monotonic() > deadline:
                raise
            connection.close()
            time.sleep(0.05)


@task(takes_context=True, max_attempts=10, backoff=0.1)
def work(context: TaskContext, seconds):
    with recorded(context):
        time.sleep(seconds)
    return context.fencing_token


@task(takes_context=True, atomic=True, max_attempts=10, backoff=0.1)
def work_atomically(context: TaskContext, seconds):
    """Leave one effect, with the task's completion or not at all."""
    run = Run.objects.create(**identity(context), is_atomic=True)
    time.sleep(seconds)
    Run.objects.filter(pk=run.pk).update(ended_at=Now())
    return context.fencing_token


@task(takes_context=True, lock="chaos:{key}", max_attempts=10, backoff=0.1)
def work_alone(context: TaskContext, key, seconds):
    with recorded(context, key=key):
        time.sleep(seconds)
    return context.fencing_token
