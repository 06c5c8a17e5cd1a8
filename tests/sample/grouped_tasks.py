"""Functions of groups, of whose calls single ones fail."""

from __future__ import annotations

import os
import threading
import time

from django.db import connection

from django_pglock import Cancel, Group, Retry, Snooze, TaskContext, task
from tests.sample.models import Effect


class Wrong(Exception):
    """What a call that is to fail raises."""


ERRORS = {"raise": Wrong("no"), "retry": Retry("later", after=300), "cancel": Cancel("no"), "snooze": Snooze(300)}
#: The calls that have failed once in this process.
failed_once: list[str] = []


def book(how):
    """Write an effect, and then do what the call says."""
    Effect.objects.create(name=how)
    if how == "wrong value":
        Effect.objects.create(name="x" * 65)
    elif how == "once" and not failed_once:
        failed_once.append(how)
        raise Wrong("not yet")
    elif how in ERRORS:
        raise ERRORS[how]


@task
def note_failure(task_id):
    Effect.objects.create(name="failed", number=task_id)


def book_each(calls):
    for call in calls:
        with calls.each(call):
            book(call["how"])
    return len(calls)


options = {"group": "book", "max_attempts": 2, "backoff": 0, "retry_on": Wrong, "on_failure": note_failure}


@task(**options, atomic=True)
def book_atomically(calls):
    return book_each(calls)


@task(**options)
def book_plainly(calls):
    return book_each(calls)


@task(**options)
async def book_in_coroutine(calls):
    for call in calls:
        with calls.each(call):
            if call["how"] == "raise":
                raise Wrong("no")
    return len(calls)


@task(**options, atomic=True)
def fail_some(calls):
    """Fail without a block: what was written for the call stays."""
    for call in calls:
        Effect.objects.create(name=call["how"])
        if call["how"] == "raise":
            calls.fail(call, Wrong("no"))


@task(group="book", atomic=True, max_attempts=2, backoff=0)
def fail_one_and_all(calls):
    Effect.objects.create(name="rolled back")
    calls.fail(calls[0], Wrong("one"))
    raise ValueError("all")


@task(group="book", atomic=True, takes_context=True)
def wait_for_stop(context: TaskContext, calls):
    for call in calls:
        with calls.each(call):
            Effect.objects.create(name="rolled back")
            while True:
                context.check()
                time.sleep(0.005)


@task(group="book", atomic=True)
def sleep_in_sql(calls):
    for call in calls:
        with calls.each(call), connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(600)")


@task(group="book", atomic=True)
def leave(calls):
    with calls.each(calls[0]):
        raise SystemExit(3)


@task(group="book", atomic=True)
def lose_session(calls):
    for call in calls:
        Effect.objects.create(name="once")
        with calls.each(call), connection.cursor() as cursor:
            if not lost:
                lost.append(call)
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


#: The calls of ``lose_session`` that have lost a session in this process.
lost: list[object] = []
begun, may_end = threading.Event(), threading.Event()


@task(group="book", atomic=True)
def wait_then_fail_first(calls):
    Effect.objects.create(name="rolled back")
    calls.fail(calls[0], Wrong("no"))
    begun.set()
    may_end.wait(60)


@task(group=Group("side:{key}", limit=2, concurrency=3), max_attempts=2, backoff=0)
def side_by_side(calls):
    """Run until there is a note, and fail if more runs are in progress than may be."""
    Effect.objects.create(name="begin", number=len(calls), pid=os.getpid())
    while not Effect.objects.filter(name="go on").exists():
        time.sleep(0.005)
    Effect.objects.create(name="end", number=len(calls), pid=os.getpid())
