"""Task functions of a project that uses the package."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextvars import ContextVar

from django.core.cache import caches
from django.db import connection, transaction
from django.utils import translation

from django_pglock import Cancel, Retry, Snooze, lock, task

# A worker finds what this module imports.
from tests.sample import (  # noqa: F401
    advisory_tasks,
    chaos_tasks,
    forking_tasks,
    grouped_tasks,
    hostile_tasks,
    result_tasks,
    running_tasks,
    session_tasks,
)
from tests.sample.models import Effect


@task
def nothing(*args, **kwargs):
    """Do nothing."""


tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


@task
def set_tenant(name):
    tenant.set(name)
    translation.activate("fr")


@task
def tell_tenant():
    return [tenant.get(), translation.get_language(), id(caches["default"])]


@task
async def tell_tenant_in_coroutine():
    return [tenant.get(), translation.get_language()]


@task
def echo(value):
    return value


@task
def record(name, number=0):
    Effect.objects.create(name=name, number=number, pid=os.getpid())


@task(atomic=True)
def record_atomically(name, number=0):
    Effect.objects.create(name=name, number=number, pid=os.getpid())


@task(atomic=True, wait_for_disk=False)
def record_soon(name, number=0):
    Effect.objects.create(name=name, number=number, pid=os.getpid())


@task(atomic=True)
def record_slowly(name, seconds):
    Effect.objects.create(name=name, pid=os.getpid())
    time.sleep(seconds)


@task
def note_and_sleep(name, seconds):
    """Write a row at once, so that a test knows that the function runs."""
    Effect.objects.create(name=name, pid=os.getpid())
    time.sleep(seconds)


@task
async def sleep_async(seconds):
    await asyncio.sleep(seconds)
    return seconds


@task
def fail(text="no"):
    raise ValueError(text)


@task(max_attempts=3, backoff=0)
def fail_twice(name):
    Effect.objects.create(name=name)
    if Effect.objects.filter(name=name).count() < 3:
        raise ValueError("not yet")
    return "at last"


@task(max_attempts=5, backoff=0, no_retry_on=KeyError)
def fail_for_good():
    raise KeyError("never again")


@task(max_attempts=2, backoff=lambda error, result: 0)
def fail_with_function():
    raise ValueError("asks its own function")


@task(max_attempts=2, backoff=lambda error, result: 1 / 0)
def fail_with_broken_function():
    raise ValueError("asks a broken function")


@task(max_attempts=2, backoff=lambda error, result: sys.exit("asks a function that ends"))
def fail_with_function_that_exits():
    raise ValueError("asks a function that ends")


@task(max_attempts=2, backoff=3600)
def fail_with_long_wait():
    raise ValueError("later")


@task(atomic=True)
def write_and_fail(name):
    Effect.objects.create(name=name)
    raise ValueError("so undo it")


@task(atomic=True)
def fail_after_commit(name):
    Effect.objects.create(name=name)
    transaction.on_commit(lambda: 1 / 0)


@task(takes_context=True)
def tell_context(context, value):
    return [context.attempt, context.task_result.id, value]


_hoard: list[bytes] = []


@task
def hoard(mebibytes):
    _hoard.append(b"x" * mebibytes * 2**20)
    return os.getpid()


@task
def leave():
    sys.exit("a task that calls sys.exit()")


@task
async def cancel_itself():
    raise asyncio.CancelledError


@task
async def leave_in_child():
    async def main():
        sys.exit("a coroutine that calls sys.exit()")

    await asyncio.gather(main())


@task
async def stop_its_loop():
    asyncio.get_running_loop().stop()


@task
async def cancel_itself_at_its_end():
    asyncio.current_task().cancel()
    return "the end"


@task
async def shut_down_executor_of_loop():
    await asyncio.get_running_loop().shutdown_default_executor()


@task
async def cancel_new_coroutines(number):
    """Cancel so many coroutines of the worker before their first step."""
    begun = asyncio.all_tasks()
    while number > 0:
        for each in asyncio.all_tasks() - begun:
            each.cancel()
            begun.add(each)
            number -= 1
        await asyncio.sleep(0)


@task
def raise_unprintable():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    raise Unprintable


class Answer(Exception):
    """Reads attributes from the answer of a server, as the exceptions of some clients do. Counts the errors in it."""

    exceptions = 503

    def __getattr__(self, name):
        return {"status": 503}[name]

    def __len__(self):
        return 0


class Closed(Exception):
    """Reads each attribute from a connection that is closed, as a proxy for an exception of another process may do."""

    def __getattribute__(self, name):
        raise ConnectionError(name)


@task
def raise_closed():
    raise Closed


@task(atomic=True)
def raise_closed_atomically():
    raise Closed


@task
async def raise_after_closed_in_coroutine():
    try:
        raise Closed
    except Closed:
        raise KeyError("key")  # noqa: B904 - this chain is the case


@task
def raise_answer():
    raise RuntimeError("the service is down") from Answer("busy")


@task(atomic=True)
def raise_answer_atomically():
    raise Answer("busy")


@task
async def raise_answer_in_coroutine():
    raise Answer("busy")


@task
def raise_nul():
    raise ValueError("nul \x00 and surrogate \udcff")


@task
def return_unstorable():
    return object()


class OwnRetry(Retry):
    """Has an ``__init__`` of its own, as exceptions often do."""

    def __init__(self, code):
        self.code = code


#: The arguments of each call of ``note_failures``, and the paths of the exceptions in the result.
asked: list[tuple[str, list[str], int]] = []


def note_failures(error, result):
    asked.append((str(error), [each.exception_class_path for each in result.errors], result.attempts))
    assert str(error) in result.errors[-1].traceback
    return 0


@task(max_attempts=3, backoff=note_failures)
def fail_in_turns():
    raise [ValueError, KeyError, OSError][len(asked) % 3](f"failure {len(asked) + 1}")


@task(group="turns", max_attempts=2, backoff=note_failures)
def fail_together_in_turns(calls):
    raise ValueError(f"failure {len(asked) + 1}")


@task(group="{user}", max_snoozes=2)
def snooze_together(calls, user=None):
    raise Snooze(0)


class OwnSnooze(Snooze):
    def __init__(self, code):
        self.code = code


@task(max_attempts=2, backoff=0)
def raise_own_retry():
    raise OwnRetry(503)


@task(max_attempts=2, backoff=0, atomic=True)
def raise_own_retry_atomically():
    raise OwnRetry(503)


@task(max_attempts=2, backoff=0)
async def raise_own_retry_in_coroutine():
    raise OwnRetry(503)


@task
def raise_own_snooze():
    raise OwnSnooze(503)


@task
def raise_nonsense():
    error = OwnSnooze(503)
    error.seconds = "soon"
    raise error


def raise_in_ring():
    """Raise an exception from another one that was raised from it."""
    first, second = ValueError("first"), KeyError("second")
    try:
        raise first from second
    except ValueError:
        raise second from first


@task
def raise_ring():
    raise_in_ring()


@task
async def raise_ring_in_coroutine():
    raise_in_ring()


@task
def break_connection():
    """Leave the thread's connection in a state that must not reach the next task."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")


@task
def leave_transaction_open(kind):
    """Leave the connection of the thread in a state that the next task must not get."""
    if kind == "autocommit":
        transaction.set_autocommit(False)
    else:
        transaction.atomic().__enter__()
    if kind == "closed":
        connection.close()
    else:
        Effect.objects.create(name="not committed")


@task
def connection_pid():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


_inside: list[str] = []


@task
@lock("alone:{name}")
def alone(name):
    """Record how many others were inside."""
    _inside.append(name)
    time.sleep(0.01)
    Effect.objects.create(name="alone", number=len(_inside) - 1)
    _inside.remove(name)


@task(max_attempts=3, no_retry_on=(Exception,))
def say(word, times=1, after=0.0):
    """Raise Retry, Snooze or Cancel this number of times, then succeed."""
    said = Effect.objects.filter(name=f"say {word}").count()
    Effect.objects.create(name=f"say {word}", number=said)
    if said < times:
        raise {"retry": Retry("not yet", after=after), "snooze": Snooze(after), "cancel": Cancel("withdrawn")}[word]
    return said


@task(atomic=True)
def say_atomically(word):
    Effect.objects.create(name="rolled back")
    raise {"cancel": Cancel("withdrawn"), "snooze": Snooze(3600)}[word]


@task
async def say_in_coroutine():
    raise Cancel("withdrawn")
