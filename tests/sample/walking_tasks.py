"""Functions whose parts are their argument, for walks through all that a context offers.

Each part is a list: its kind, its number, and what else it needs. ``HOOK`` is called wherever something may happen.
"""

from __future__ import annotations

from asgiref.sync import sync_to_async

from django_pglock import task
from django_pglock.errors import EventTimeout, StepFailed
from tests.sample.models import Effect

#: More attempts than a walk has interruptions.
PLENTY = 50


def nothing():
    pass


HOOK = nothing


def hook():
    HOOK()


def act(name, number):
    hook()
    Effect.objects.create(name=name, number=number)
    hook()
    return number


def fail(name, number):
    act(name, number)
    raise LookupError("for good")


@task(max_attempts=PLENTY, backoff=0)
def child(number):
    return act("child", number)


@task(takes_context=True, max_attempts=PLENTY, backoff=0, no_retry_on=LookupError)
def walk(context, parts):
    seen = []
    for part in parts:
        hook()
        seen.append(DO[part[0]](context, *part[1:]))
    hook()
    return seen


def step(context, number):
    return context.step(f"step {number}", act, "step", number)


def atomic(context, number):
    return context.atomic_step(f"atomic {number}", act, "atomic", number)


def failing(context, number):
    try:
        context.step(f"failing {number}", fail, "failing", number)
    except StepFailed as error:
        return error.path


def asked(context, number):
    """Leave a step out that an earlier run has recorded, as code does that has changed."""
    if f"asked {number}" not in context.steps:
        context.step(f"asked {number}", act, "asked", number)
    return context.steps[f"asked {number}"]


def sleep(context, number):
    context.sleep(f"sleep {number}", 3600)


def wait(context, number, comes):
    try:
        return context.wait_for(f"event {number}", timeout=None if comes == "later" else 3600)
    except EventTimeout as error:
        return error.step


def chunks(context, number, size, is_atomic, end):
    """Copy rows up to ``end``, where it leaves the loop."""
    for rows in context.chunks(f"chunks {number}", Effect.objects.filter(name="from"), size=size):
        if rows[0].number >= end:
            break
        if is_atomic:
            with rows:
                copy(number, rows)
        else:
            copy(number, rows)
        hook()


def copy(number, rows):
    for row in rows:
        act(f"to {number}", row.number)


def gather(context, number, count):
    results = context.gather(f"gather {number}", [child.call_of(each) for each in range(count)])
    return [each.return_value for each in results]


DO = {
    "step": step,
    "atomic": atomic,
    "failing": failing,
    "asked": asked,
    "sleep": sleep,
    "wait": wait,
    "chunks": chunks,
    "gather": gather,
}


@task(takes_context=True, max_attempts=PLENTY, backoff=0, no_retry_on=LookupError)
async def awalk(context, parts):
    seen = []
    for kind, number, *values in parts:
        hook()
        if kind in ("sleep", "wait"):
            seen.append(DO[kind](context, number, *values))
        elif kind == "gather":
            results = await context.agather(f"gather {number}", [child.call_of(each) for each in range(values[0])])
            seen.append([each.return_value for each in results])
        else:
            seen.append(await context.astep(f"step {number}", sync_to_async(act), "step", number))
    return seen
