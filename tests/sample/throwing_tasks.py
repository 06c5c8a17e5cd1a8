"""Task functions that raise exceptions which are hard to read or to change."""

from __future__ import annotations

import dataclasses

from django.db import connection

from django_pglock import task
from django_pglock.errors import TaskStopped


class NoText(Exception):
    """As an exception whose message is made of an attribute that it has not got."""

    def __str__(self):
        raise RuntimeError("not to be read")

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """It refuses that its traceback is assigned."""

    number: int = 7


HOSTILE = {each.__name__: each for each in (NoText, Frozen)}


def throw(kind):
    """Raise an exception of a kind, also as a cause, or with one."""
    name, _, how = kind.partition(" ")
    if how == "as cause":
        raise ValueError("because of another one") from HOSTILE[name]()
    if how == "with cause":
        raise HOSTILE[name]() from HOSTILE[name]()
    raise HOSTILE[name]()


@task(max_attempts=2, backoff=0)
def throw_in_thread(kind):
    throw(kind)


@task(max_attempts=2, backoff=0, atomic=True)
def throw_atomically(kind):
    throw(kind)


@task(max_attempts=2, backoff=0, capture_logs=True)
async def throw_in_coroutine(kind):
    throw(kind)


@task(max_attempts=2, backoff=lambda error, result: str(error))
def throw_and_read_in_backoff(kind):
    throw(kind)


@task(timeout=0.2, max_attempts=2, backoff=0)
def throw_after_timeout(kind):
    try:
        while True:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_sleep(0.01)")
    except TaskStopped:
        throw(kind)


@task(max_attempts=2, backoff=0)
def return_what_throws(kind):
    class Value(dict):
        def items(self):
            throw(kind)

        __iter__ = keys = items

    return Value(a=1)


@task(group="{kind}", max_attempts=2, backoff=0)
def throw_in_group(calls, kind=None):
    throw(calls[0]["kind"])
