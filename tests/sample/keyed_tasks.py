"""Task functions that ask for keys."""

from __future__ import annotations

import time

from django_pglock import task
from django_pglock.tasks.options import Group, Rate, Unique
from tests.sample.models import Effect


@task(lock="order:{order_id}")
def step(order_id, number=0, seconds=0.0):
    """Record its begin and its end."""
    Effect.objects.create(name=f"begin {order_id}", number=number)
    time.sleep(seconds)
    Effect.objects.create(name=f"end {order_id}", number=number)


@task(lock="order:{order_id}", max_attempts=2, backoff=0.05)
def fail_first(order_id):
    Effect.objects.create(name=f"begin {order_id}", number=-1)
    if Effect.objects.filter(name=f"begin {order_id}", number=-1).count() == 1:
        raise ValueError("not yet")
    Effect.objects.create(name=f"end {order_id}", number=-1)


@task(lock="api:{name}", concurrency=3)
def call(name, seconds=0.01):
    Effect.objects.create(name=f"begin {name}")
    time.sleep(seconds)
    Effect.objects.create(name=f"end {name}")


@task(unique=True)
def refresh(number, text=""):
    Effect.objects.create(name=f"refresh {text}", number=number)


@task(unique=Unique("{number}", while_="unfinished"))
def rebuild(number):
    Effect.objects.create(name="rebuild", number=number)


@task(unique=Unique("{number}", period=3600, on_conflict="raise"))
def remind(number): ...


@task(unique=Unique("{number}", on_conflict="replace"))
def save(number, text=""):
    return text


@task(group="mail:{user}")
def digest(calls):
    Effect.objects.create(name=",".join(str(each["text"]) for each in calls)[:40], number=len(calls))
    return len(calls)


@task(lock="order:{order_id}", group="note:{author}", max_attempts=2, backoff=0.05)
def note(calls):
    """Record the calls of the group, after the steps of the same order that were enqueued before."""
    name = ",".join(str(each["text"]) for each in calls)[:40]
    Effect.objects.create(name=name, number=len(calls))
    if "fail" in name and Effect.objects.filter(name=name).count() == 1:
        raise ValueError("not yet")


_gathering: list[int] = []


@task(group=Group("mail:{user}", limit=3, gather=0.2))
def gather(calls):
    """Record how many others of the group run at the same time."""
    _gathering.append(len(calls))
    time.sleep(0.01)
    Effect.objects.create(name=f"beside {len(_gathering) - 1}", number=len(calls))
    _gathering.remove(len(calls))


@task(group="g:{user}", max_attempts=2, backoff=0, atomic=True)
def fail_together(calls):
    Effect.objects.create(name="rolled back", number=len(calls))
    raise ValueError("together")


#: The calls of ``serve`` that ran in this process, in their order.
served: list[tuple[str, int]] = []


@task(fair="{tenant}")
def serve(tenant, number=0):
    served.append((tenant, number))


@task(rate=Rate(20, per=1))
def drip(number=0):
    return time.time()


@task(rate=Rate(5, per=3600, key="tenant:{tenant}", burst=2))
def trickle(tenant): ...
