"""Task functions whose results or failures have something odd."""

from __future__ import annotations

from collections import UserList
from datetime import datetime

from django_pglock import Exponential, task
from tests.sample.models import Effect

AGAIN = {"max_attempts": 5, "backoff": 0}


class Unreadable(UserList):
    """A value whose conversion fails by code of the project's."""

    def __iter__(self):
        raise LookupError("its rows are gone")


RESULTS = {
    "date": lambda: datetime(2026, 1, 1),
    "nested": lambda: {"rows": [1, {"at": datetime(2026, 1, 1)}]},
    "set": lambda: {"4111": {1}},
    "nan": lambda: [float("nan")],
    "bytes": lambda: [b"\xff"],
    "key": lambda: {"a": {1: 2}},
    "nul": lambda: "a\x00b",
    "unreadable": Unreadable,
}


@task(**AGAIN)
def return_odd(kind):
    Effect.objects.create(name="outside")
    return RESULTS[kind]()


@task(**AGAIN)
async def return_odd_async(kind):
    return RESULTS[kind]()


@task(**AGAIN, atomic=True)
def return_odd_atomically(kind):
    Effect.objects.create(name="inside")
    return RESULTS[kind]()


@task(**AGAIN, group="odd:{kind}")
def return_odd_together(calls):
    Effect.objects.create(name="outside")
    return RESULTS[calls[0]["kind"]]()


def look_up(order_id):
    raise LookupError(f"there is no order {order_id}")


@task
def fail_deep(order_id):
    look_up(order_id)


@task(max_attempts=2, backoff=Exponential(base=0.01))
def fail_twice(order_id):
    look_up(order_id)


@task
async def fail_in_coroutine(order_id):
    look_up(order_id)
