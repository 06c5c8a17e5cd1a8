"""Functions with steps. ``CALLS`` says which of their parts were called in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_pglock import Cancel, Snooze, Unique, task
from django_pglock.errors import EventTimeout, StepFailed
from django_pglock.store import children
from tests.sample.models import Effect

CALLS: list[str] = []
#: The parts that raise, and how often.
FAILING: dict[str, int] = {}


def part(name):
    CALLS.append(name)
    if FAILING.get(name, 0) > 0:
        FAILING[name] -= 1
        raise ConnectionError(f"{name} fails")
    return {"name": name}


async def apart(name):
    return part(name)


def effect(name):
    Effect.objects.create(name=name)
    return part(name)


@task(takes_context=True, max_attempts=3, backoff=0)
def order(context, number):
    charge = context.step("charge", part, "charge")
    context.atomic_step("book", effect, "book")
    context.sleep("night", timedelta(hours=8))
    packed = context.wait_for(f"packed:{number}", timeout=timedelta(days=7))
    context.step("mail", part, "mail")
    return [charge, packed]


@task(takes_context=True, max_attempts=3, backoff=0)
async def aorder(context, number):
    charge = await context.astep("charge", apart, "charge")
    packed = context.wait_for(f"packed:{number}", timeout=timedelta(days=7))
    return [charge, packed]


@task(takes_context=True, max_attempts=3, backoff=0)
async def together(context, number):
    """Steps in a group of coroutines: an error of one leaves in a group of exceptions."""
    async with asyncio.TaskGroup() as group:
        group.create_task(context.astep("charge", apart, "charge"))
    return number


@task(takes_context=True, max_attempts=2, backoff=0)
def trip(context):
    undo = []
    try:
        for name in ("flight", "hotel"):
            context.step(name, part, name)
            undo.append(name)
    except StepFailed as error:
        for name in reversed(undo):
            context.step(f"undo {name}", part, f"undo {name}")
        return [error.step, error.path, error.message]
    return "booked"


@task(takes_context=True, max_attempts=2, backoff=0)
def strict_trip(context, how):
    with contextlib.suppress(StepFailed):
        context.step("newsletter", part, "newsletter")
    context.step("flight", part, "flight")
    try:
        context.step("hotel", part, "hotel")
    except StepFailed:
        context.step("undo flight", part, "undo flight")
        if how == "raise":
            raise
        raise (Cancel("undone") if how == "cancel" else LookupError("no trip"))  # noqa: B904
    if how == "bug":
        part("bug")


@task(takes_context=True)
def approval(context, seconds):
    try:
        return context.wait_for("approved", timeout=seconds)
    except EventTimeout as error:
        return str(error)


@task(takes_context=True, lock="approval:{number}")
def approval_of(context, number):
    return context.wait_for("approved", timeout=3600)


#: The seconds of the wait of ``race``.
RACE = 3.0


@task(takes_context=True, max_attempts=2, backoff=0)
def race(context, number):
    """Return what the first run behind the wait has seen, and what a second run sees."""
    try:
        seen = context.wait_for(f"race:{number}", timeout=RACE)
    except EventTimeout:
        seen = "timeout"
    first = context.step("see", str, seen)
    if not context.task_result.errors:
        raise ConnectionError("once more")
    return [first, seen]


ENDS = {"error": ConnectionError("again"), "snooze": Snooze(60), "cancel": Cancel("no more")}


@task(max_attempts=2, backoff=60)
def without_context(how):
    if how in ENDS:
        raise ENDS[how]


@task(takes_context=True, max_attempts=2, backoff=60)
def without_steps(context, how):
    if how in ENDS:
        raise ENDS[how]


@task(takes_context=True, max_attempts=3, backoff=60)
def impatient(context):
    part("before")
    return context.wait_for("approved", timeout=3600)


@task(takes_context=True, max_attempts=2, backoff=0)
def wrong(context, how, is_swallowed=False):
    """Use steps in a way that is refused."""
    with contextlib.suppress(*[Exception] * is_swallowed):
        USES[how](context)


def swallows(context):
    with contextlib.suppress(BaseException):
        context.sleep("nap", 60)


def goes_on(context):
    try:
        context.sleep("nap", 60)
    finally:
        context.step("after", part, "after")


def in_a_transaction(context):
    with transaction.atomic():
        context.step("inside", part, "inside")


def swallows_an_error(context):
    with contextlib.suppress(BaseException):
        context.step("charge", part, "charge")


def goes_on_after_an_error(context):
    with contextlib.suppress(BaseException):
        context.step("charge", part, "charge")
    context.step("mail", part, "mail")


def refused_at_commit(context):
    context.atomic_step("note", defer_refusal)


def refused_at_commit_of_rows(context):
    for rows in context.chunks("rows", Effect.objects.filter(name="from"), size=3):
        with rows:
            defer_refusal()


def leave_open(how):
    """Write a row, and leave its transaction open."""
    if how == "BEGIN":
        connection.cursor().execute("BEGIN")
    else:
        transaction.set_autocommit(False)
    effect("manual")
    return how


@task(takes_context=True, max_attempts=2, backoff=0)
def manual(context, how):
    context.step("manual", leave_open, how)
    return context.step("after", part, "after")


def defer_refusal():
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO sample_deferred VALUES (1), (1)")


def in_a_loop(context):
    for _rows in context.chunks("rows", Effect.objects.filter(name="from"), size=3):
        context.step("inside", part, "inside")


def in_a_thread(context):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(context.step, "elsewhere", part, "elsewhere").exception()


async def in_a_loop_of_events(context):
    context.step("blocks", part, "blocks")


def over(rows):
    return lambda context: list(context.chunks("rows", rows()))


USES = {
    "in a thread": in_a_thread,
    "called before": lambda context: context.step("called", part("called")),
    "a coroutine": lambda context: context.step("coroutine", apart, "coroutine"),
    "an atomic coroutine": lambda context: context.atomic_step("coroutine", apart, "coroutine"),
    "in an event loop": lambda context: asyncio.run(in_a_loop_of_events(context)),
    "no coroutine": lambda context: asyncio.run(context.astep("no coroutine", part, "no coroutine")),
    "a list": over(lambda: [1, 2]),
    "a slice": over(lambda: Effect.objects.all()[:5]),
    "dicts": over(lambda: Effect.objects.values("name")),
    "a union": over(lambda: Effect.objects.all().union(Effect.objects.all())),
    "swallows an error": swallows_an_error,
    "goes on after an error": goes_on_after_an_error,
    "refused at commit": refused_at_commit,
    "refused at commit of rows": refused_at_commit_of_rows,
    "in a loop": in_a_loop,
    "without a size": lambda context: list(context.chunks("rows", Effect.objects.all(), size=0)),
    "nested": lambda context: context.step("outer", lambda: context.step("inner", part, "inner")),
    "twice": lambda context: [context.step("same", part, "same") for _ in range(2)],
    "no text": lambda context: context.step(7, part, "seven"),
    "no name": lambda context: context.step("", part, "empty"),
    "surrogate": lambda context: context.step("a\ud800", part, "surrogate"),
    "NUL in an event": lambda context: context.wait_for("a\0", timeout=1),
    "backwards": lambda context: context.sleep("nap", -1),
    "NaN": lambda context: context.wait_for("approved", timeout=float("nan")),
    "for ever": lambda context: context.sleep("nap", 1e300),
    "no JSON": lambda context: context.step("object", object),
    "in a transaction": in_a_transaction,
    "swallows": swallows,
    "goes on": goes_on,
}


@task(takes_context=True, atomic=True)
def atomic(context):
    context.step("inside", part, "inside")


#: The names of the steps that ``changing`` has today, and those that it has after a failure.
CODE: list[str] = []
NEXT: list[str] = []


@task(takes_context=True, max_attempts=9, backoff=0)
def changing(context):
    for name in list(CODE):
        if name == "fail":
            CODE[:] = NEXT
            raise ConnectionError("again")
        if name.startswith("?"):
            assert name[1:] in context.steps
        else:
            context.step(name, part, name)


#: How many lists ``copy_rows`` may see before it fails.
LEFT = [99]


@task(takes_context=True, max_attempts=2, backoff=0)
def copy_rows(context, how):
    for rows in context.chunks("rows", Effect.objects.filter(name="from"), size=3):
        LEFT[0] -= 1
        if how == "in a transaction":
            with rows:
                copy(rows)
        else:
            copy(rows)
    return context.step("sum", Effect.objects.filter(name="to").count)


@task(takes_context=True, max_attempts=2, backoff=0)
def leave_loop(context, how):
    seen = []
    with contextlib.suppress(ZeroDivisionError):
        for rows in context.chunks("rows", Effect.objects.filter(name="from"), size=3):
            seen.append(len(rows))
            with rows:
                copy(rows)
                part("in the loop")
                if how == "by a break":
                    break
            if how == "by an error":
                raise ZeroDivisionError
            if how == "by a break behind its rows":
                break
    context.step("after", part, "after")
    return seen


def copy(rows):
    for row in rows:
        Effect.objects.create(name="to", number=row.number)
        if LEFT[0] == 0:
            LEFT[0] = 99
            raise ConnectionError("in the middle of a list")


def count(name, number):
    Effect.objects.create(name=name, number=number)
    time.sleep(0.02)
    return number % 10


#: The names of the parts of ``deployed``, in this version of the code.
VERSION = "SAMPLE_VERSION"


@task(takes_context=True)
def deployed(context, number):
    for name in os.environ.get(VERSION, "").split():
        if name.startswith("?"):
            context.wait_for(f"{name[1:]}:{number}", timeout=None, name=name)
        else:
            context.step(name, count, name, number)


@task(takes_context=True)
def journey(context, number):
    """Ten parts, every other one atomic, with a sleep and an event between them."""
    found = []
    for part_ in range(10):
        if part_ == 4:
            context.sleep("rest", 0.2)
        if part_ == 7:
            context.wait_for(f"go on:{number}", timeout=None)
        name, step = ("atomic", context.atomic_step) if part_ % 2 else ("plain", context.step)
        found.append(step(f"part {part_}", count, name, number * 10 + part_))
    return found


@task(takes_context=True)
async def ajourney(context, number):
    """Do the same in a coroutine, which has no atomic parts."""
    found = []
    for part_ in range(10):
        if part_ == 4:
            context.sleep("rest", 0.2)
        if part_ == 7:
            context.wait_for(f"go on:{number}", timeout=None)
        found.append(await context.astep(f"part {part_}", sync_to_async(count), "plain", number * 10 + part_))
    return found


# Children


@task(max_attempts=1)
def child(number, how="returns"):
    """End in one of several ways."""
    part(f"child {number}")
    if how == "raises":
        raise ConnectionError(f"child {number} fails")
    if how == "cancels":
        raise Cancel("not today")
    return number * 10


@task
async def achild(number):
    return number * 100


@task(lock="order:{order_id}")
def child_of_order(order_id):
    return order_id


@task(unique=Unique("{number}", while_="unfinished"))
def unique_child(number):
    return part(f"child {number}")["name"]


@task(unique=Unique("{number}", period=3600))
def child_of_the_hour(number):
    return number


@task(takes_context=True, unique=Unique("family", while_="unfinished"))
def unique_family(context):
    return gathered(context.gather("children", CHILDREN))


@task(takes_context=True, lock="order:7")
def grandparent(context):
    return gathered(context.gather("families", [family_of_order.call_of(8)]))


#: What ``family`` gathers today.
CHILDREN: list[object] = []


def gathered(results):
    return [[each.status.value, each.return_value if each.status == "SUCCESSFUL" else None] for each in results]


@task(takes_context=True, max_attempts=2, backoff=0)
def family(context):
    results = context.gather("children", (call for call in CHILDREN))
    CALLS.append("gathered")
    context.step("after", part, "after")
    return gathered(results)


@task(takes_context=True)
async def afamily(context):
    return gathered(await context.agather("children", CHILDREN))


@task(takes_context=True, max_attempts=2, backoff=0)
def family_after_a_step(context):
    part("before")
    context.gather("children", CHILDREN)
    part("after")


@task(takes_context=True)
def family_in_open_transaction(context, how):
    leave_open(how)
    return gathered(context.gather("children", CHILDREN))


@task(takes_context=True, lock="order:{order_id}")
def family_of_order(context, order_id):
    CALLS.append(f"order {order_id}")
    return gathered(context.gather("children", CHILDREN))


@task(takes_context=True, lock="order:{order_id}", concurrency=2)
def family_beside_others(context, order_id, depth=0):
    calls = [] if depth == 2 else [family_beside_others.call_of(order_id, depth=depth + 1) for _ in range(2)]
    return sum(each.return_value for each in context.gather("children", calls)) + 1


@task(takes_context=True, lock="order:{order_id}")
def order_of_steps(context, order_id):
    context.step("charge", part, "charge")
    return context.wait_for(f"packed:{order_id}", timeout=None, name="packed")


def gathers_in_a_transaction(context):
    with transaction.atomic():
        context.gather("inside", [child.call_of(1)])


USES |= {
    "gathers in a transaction": gathers_in_a_transaction,
    "gathers in a step": lambda context: context.step("outer", lambda: context.gather("inner", [child.call_of(1)])),
    "gathers by a step": lambda context: context.gather("outer", (context.step("in", part, "x") for _ in range(1))),
    "gathers what is enqueued": lambda context: context.gather("outer", [child.enqueue(1)]),
    "gathers in a loop": lambda context: [
        context.gather("inside", [child.call_of(1)])
        for _ in context.chunks("rows", Effect.objects.filter(name="from"), size=3)
    ],
    "gathers wrong arguments": lambda context: context.gather("outer", [child.call_of(1), child.call_of(colour="red")]),
    "swallows a gather": lambda context: swallow(lambda: context.gather("outer", [child.call_of(1)])),
}


def swallow(function):
    with contextlib.suppress(BaseException):
        function()


@task
def counted_child(number):
    Effect.objects.create(name="child", number=number)
    return number


@task(takes_context=True)
def large_family(context, count, moment="", fault=0):
    """Gather children. The worker of the first attempt is struck at a moment of the transaction that enqueues them."""
    if moment and context.fencing_token == 1:
        strike_at(moment, fault)
    results = context.gather("children", [counted_child.call_of(number) for number in range(count)])
    return [each.return_value for each in results]


def strike_at(moment, fault):
    run = children.run

    def struck(using, statement, *values, **options):
        is_last = statement is children.SUSPEND_PARENT
        if is_last and moment == "before the last statement":
            strike(fault)
        rows = run(using, statement, *values, **options)
        if is_last and moment == "before the commit":
            strike(fault)
        elif is_last and moment == "after the commit":
            transaction.on_commit(lambda: strike(fault))
        return rows

    children.run = struck


def strike(fault):
    """Kill this process, or freeze it with those that have started it, so that nobody replaces it."""
    if fault == signal.SIGSTOP:
        starter = os.getppid()
        for pid in (parent_of(starter), starter):
            os.kill(pid, fault)
    os.kill(os.getpid(), fault)
    if fault == signal.SIGSTOP:
        # Another thread may take the signal, and this one would continue for a moment.
        time.sleep(1)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@task(takes_context=True)
def book_and_charge(context):
    context.step("charge", effect, "charge")
    context.atomic_step("book", effect, "book")
