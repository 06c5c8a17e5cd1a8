"""Helpers for tests of waits for results."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models.functions import Now

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.store.release import release
from tests.conftest import NEVER
from tests.sample import tasks
from tests.sql import execute_sql


def sessions():
    return execute_sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'django_pglock wait'")[0][0]


def results_of(count):
    """Return results of as many tasks that are due in an hour."""
    first = tasks.echo.using(run_after=timedelta(hours=1)).enqueue(1)
    others = enqueue_many(tasks.echo.using(run_after=timedelta(hours=1)), range(count - 1))
    return [first, *(replace(first, id=id_) for id_ in others)]


def settle(*results):
    """Settle these tasks as successful, as a worker does."""
    ids = [int(result.id) for result in results]
    Task.objects.filter(pk__in=ids).update(status="SUCCESSFUL", finished_at=Now())
    release("default", ids)


def run(coroutine):
    async def then_close():
        try:
            return await coroutine
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(then_close())


async def until(function):
    """Wait until a function of the database returns something true."""
    deadline = time.monotonic() + NEVER
    while time.monotonic() < deadline:
        if await sync_to_async(function)():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{function} never came true")


def listener_threads():
    return [thread for thread in threading.enumerate() if thread.name == "django_pglock wait"]
