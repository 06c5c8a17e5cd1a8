"""Task functions of the soak, beside those of tests/sample/chaos_tasks.py: coroutines, retries, groups, schedules."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from asgiref.sync import sync_to_async

from django_pglock import Group, TaskContext, Unique, task
from tests.sample.chaos_tasks import TIMEOUT, end, identity, recorded, session_number
from tests.sample.models import Effect, Run

GROUP_EFFECT = "soak:{serial}"


@task(takes_context=True, max_attempts=10, backoff=0.1, timeout=TIMEOUT)
async def work_in_coroutine(context: TaskContext, seconds):
    me = identity(context)
    session = await sync_to_async(session_number)()
    try:
        # Within the block: the row may be committed although the answer was lost.
        await Run.objects.acreate(**me)
        await asyncio.sleep(seconds)
    finally:
        await sync_to_async(end)(me, session)
    return context.fencing_token


@task(takes_context=True, max_attempts=10, backoff=0.1, timeout=TIMEOUT)
def fail_at_first(context: TaskContext, seconds):
    with recorded(context):
        time.sleep(seconds)
        if context.fencing_token == 1:
            raise ValueError("the first attempt always fails")
    return context.fencing_token


@task(
    takes_context=True,
    unique=Unique("soak:{number}", while_="unfinished"),
    max_attempts=10,
    backoff=0.1,
    timeout=TIMEOUT,
)
def work_once(context: TaskContext, number, seconds):
    with recorded(context):
        time.sleep(seconds)
    return context.fencing_token


@task(group=Group("soak:{group}", limit=50), atomic=True, max_attempts=10, backoff=0.1, timeout=TIMEOUT)
def work_together(calls):
    """Write one effect for each call, all in one transaction."""
    for call in calls:
        Effect.objects.create(name=GROUP_EFFECT.format(serial=call["serial"]))


@task(takes_context=True, every=timedelta(seconds=5), max_attempts=10, backoff=0.1, timeout=TIMEOUT)
def tick(context: TaskContext):
    with recorded(context):
        pass
    return context.fencing_token
