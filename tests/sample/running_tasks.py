"""Task functions that run long enough to be cancelled, to exceed a timeout, and to report progress."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import linecache
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial

from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

from django_pglock import TaskContext, lock, task
from django_pglock.errors import TaskStopped
from tests.sample.models import Effect

#: Seconds for which no test waits: what takes so long does not end by itself.
FOREVER = 600


def note(name, number=0):
    Effect.objects.create(name=name, number=number)


def sleep_in_sql(seconds):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(%s)", (seconds,))


def sleep_in_python(seconds):
    """Sleep so that the thread comes back to Python often."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


@task(max_attempts=5, backoff=0)
def run_sql(seconds=FOREVER):
    note("begun")
    sleep_in_sql(seconds)


@task(atomic=True, max_attempts=5, backoff=0)
def run_sql_atomically(seconds=FOREVER):
    note("undone")
    sleep_in_sql(seconds)


@task(takes_context=True, max_attempts=5, backoff=0)
def ask(context: TaskContext):
    """Run until a cancel is requested."""
    note("begun")
    while True:
        context.check()
        time.sleep(0.005)


@task(takes_context=True)
def finish_anyway(context: TaskContext):
    note("begun")
    try:
        while True:
            context.check()
            time.sleep(0.005)
    except TaskStopped:
        return "done"


@task(takes_context=True)
def fail_when_asked(context: TaskContext):
    note("begun")
    while context._reason_to_stop() is None:
        time.sleep(0.005)
    raise ValueError("in the middle of stopping")


@task(max_attempts=5, backoff=0)
async def wait_in_coroutine(seconds=FOREVER):
    await asyncio.to_thread(note_and_close, "begun")
    await asyncio.sleep(seconds)


@task
async def wait_in_pool(seconds):
    """Leave the work to a thread that Python waits for before the process ends."""
    await asyncio.to_thread(note_and_close, "begun")
    await asyncio.to_thread(time.sleep, seconds)


def note_and_close(name):
    """Write a row in a thread that is not joined, and return how many rows there are."""
    note(name)
    count = Effect.objects.filter(name=name).count()
    connection.close()
    return count


@task(lock="interrupted:{key}")
def locked(key, seconds=0):
    note(f"locked {key}")
    sleep_in_sql(seconds)


@task
def keep_gil(seconds):
    """Keep all other threads of the process from running, as a C library does that does not let go of the GIL."""
    Effect.objects.create(name="begun", pid=os.getpid())
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    return "once"


@task
def keep_gil_from(name, seconds):
    keep_gil.func(seconds)


@task
async def count_in_coroutine(*, closes):
    """Use the connection of the thread in which the ORM runs for coroutines, and leave it open unless asked not to."""
    count = await Effect.objects.acount()
    if closes:
        await sync_to_async(connections.close_all)()
    return count


@task
def keep_busy(seconds):
    sleep_in_python(seconds)
    return seconds


@task(timeout=1, max_attempts=2, backoff=0, takes_context=True)
def too_long_once(context: TaskContext, kind):
    """Take too long at the first attempt only."""
    if context.attempt == 1:
        if kind == "sql":
            sleep_in_sql(FOREVER)
        while True:
            context.check() if kind == "check" else context.progress(1)
            time.sleep(0.005)
    return "second"


def write():
    Effect.objects.create(name="written")


def write_in_blocks():
    with transaction.atomic():
        write()
        with transaction.atomic():
            write()


def write_by_cursor():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(0.01)")


def write_by_raw_connection():
    """Only a cancel reaches the second statement, because Django calls no wrapper for it."""
    write_by_cursor()
    connection.connection.execute("SELECT pg_sleep(600)")


@task(timeout=0.3)
def copy_in():
    """The statement is in progress until the end of the COPY."""
    with connection.cursor() as cursor, cursor.copy("COPY sample_effect (name) FROM STDIN") as copy:
        while True:
            copy.write_row(["x" * 100_000])
            time.sleep(0.01)


def write_in_new_connection():
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            for _ in range(FOREVER):
                cursor.execute("SELECT pg_sleep(0.01)")
    finally:
        other.close()


def read_slowly():
    if not Effect.objects.exists():
        Effect.objects.bulk_create(Effect(name="row") for _ in range(FOREVER))
    for _ in Effect.objects.iterator(chunk_size=1):
        time.sleep(0.01)


def take_lock():
    with lock("over and over"):
        time.sleep(0.005)


def write_on_dead_session():
    """Django opens no other session by itself, and the next calls fail before there is a statement."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def write_under_lock():
    with lock("held by a task"):
        write_by_cursor()


def write_under_watched_lock():
    """Messages of locks pass Django's cursor, because a wrapper of the project wants to see them."""
    with connection.execute_wrapper(lambda execute, *arguments: execute(*arguments)):
        write_under_lock()


def enqueue():
    idle.enqueue()


def write_in_coroutine_of_its_own():
    asyncio.run(_write_often())


async def _write_often():
    try:
        for _ in range(FOREVER):
            await Effect.objects.acount()
            await asyncio.sleep(0.01)
    finally:
        await sync_to_async(connections.close_all)()


#: What a function may do in a loop, until its time is over.
LOOPS = {
    each.__name__: each
    for each in (
        write,
        write_in_blocks,
        write_by_cursor,
        write_by_raw_connection,
        write_in_new_connection,
        read_slowly,
        take_lock,
        write_on_dead_session,
        write_under_lock,
        write_under_watched_lock,
        enqueue,
        write_in_coroutine_of_its_own,
    )
}


@task(queue_name="idle")
def idle():
    pass


def loop(kind, swallows=Exception):
    """Swallow each error that a careful function may catch, and continue."""
    while True:
        try:
            LOOPS[kind]()
        except swallows:
            time.sleep(0.01)


@task(timeout=0.5)
def swallow(kind):
    loop(kind)


@task(timeout=0.3)
def swallow_in_block():
    with transaction.atomic(), suppress(BaseException):
        loop("write_in_blocks")
    return "done"


@task(max_attempts=5)
def swallow_until_cancelled():
    note("begun")
    loop("write_by_cursor")


@task(timeout=0.05, atomic=True)
def return_late():
    """Run no statement after the timeout."""
    write()
    time.sleep(0.2)
    return "late"


@task(timeout=0.2)
async def swallow_in_coroutine():
    while True:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            return "done"


@task(timeout=0.2)
async def leave_to_orm_thread():
    """Swallow errors where Django's ORM runs for coroutines."""
    await sync_to_async(loop)("write_by_cursor")


@task(timeout=0.3, max_attempts=2, backoff=0, retry_on=TimeoutError)
def retried_after_timeout():
    loop("write_by_cursor")


@task(timeout=0.3, max_attempts=2, backoff=0, no_retry_on=TimeoutError)
def not_retried_after_timeout():
    loop("write_by_cursor")


@task(timeout=0.1)
def sleep_in_c(seconds):
    time.sleep(seconds)
    return "asleep"


#: Ends what blocks in C for as long as it takes.
gate = threading.Event()


def an_hour(exception, task_result):
    """Ask the database, as a project's policy may."""
    return 3600 if Effect.objects.count() >= 0 else 0


@task(timeout=0.1, max_attempts=2, backoff=an_hour)
def block_in_c():
    gate.wait(FOREVER)


def compute():
    while True:
        pass


@task(timeout=1, max_attempts=2, backoff=0)
def overrun_once(kind):
    """Run no statement for long at the first attempt only, and return who has run the second."""
    if not Effect.objects.filter(name=kind).exists():
        note(kind)
        {"sleep": partial(time.sleep, FOREVER), "compute": compute}[kind]()
    return os.getpid()


@task(timeout=0.3)
async def overrun_in_coroutine():
    await sync_to_async(note)("overrun")
    time.sleep(FOREVER)


def log_to_nowhere():
    """Let all records of the process pass one handler, as in most projects, and return it."""
    root = logging.getLogger()
    handler = next((each for each in root.handlers if each.name == "nowhere"), None)
    if handler is None:
        handler = logging.FileHandler(os.devnull)
        handler.name = "nowhere"
        root.addHandler(handler)
    return handler


@task(timeout=0.3)
def log_for(seconds):
    log_to_nowhere()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        logging.getLogger("tests.loud").error("a line")


@task
def block_log():
    """Keep the lock of the handler, as a thread that an exception has struck in the middle of a call."""
    log_to_nowhere().acquire()
    note("blocked")
    raise ValueError("which the worker logs")


@task
def wait_for_note(name):
    Effect.objects.create(name="waits", pid=os.getpid())
    while not Effect.objects.filter(name=name).exists():
        time.sleep(0.05)


@task(atomic=True)
def write_and_wait_for_note(written, name):
    note(written)
    while not Effect.objects.filter(name=name).exists():
        time.sleep(0.05)


@task(timeout=0.2, atomic=True)
def write_too_long():
    note("undone")
    loop("write_in_blocks")


@task(timeout=0.02)
def end_at_deadline(number):
    sleep_in_python(0.02 - 0.0005 + number % 10 * 0.0001)


@task(takes_context=True)
def tell(context: TaskContext, count, seconds=0.0):
    for number in range(count):
        context.progress(number + 1, count)
    sleep_in_python(seconds)
    return context.meta


@task(takes_context=True, atomic=True)
def tell_atomically(context: TaskContext, seconds=0.0):
    context.progress(1, 2)
    sleep_in_python(seconds)
    context.progress(2, 2)
    return context.fencing_token


@task(takes_context=True)
def tell_and_fail(context: TaskContext, done):
    context.progress(done)
    raise ValueError("after that")


@task(takes_context=True)
def errors_so_far(context: TaskContext, fails):
    if len(context.task_result.errors) < fails:
        raise ValueError(f"number {context.attempt}")
    return [len(context.task_result.errors), context.attempt]


@task(group="together:{key}", takes_context=True)
def together(context: TaskContext, calls):
    note("begun", len(calls))
    while True:
        context.check()
        if Effect.objects.filter(name="go on").exists():
            return
        time.sleep(0.05)


@task
def compute_without_pause(card_number):
    note("begun")
    count = 0
    while count >= 0:
        count += 1


@task
def weigh():
    """Return how many objects the process has and its resident memory in bytes."""
    # The lines of each file that a traceback has passed: which ones do is chance, and each comes once.
    linecache.clearcache()
    gc.collect()
    with open("/proc/self/statm") as numbers:
        return [sys.getallocatedblocks(), int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")]


@task
def wait_for_other():
    """Wait for a task that is enqueued here."""
    return sleep_async.enqueue(FOREVER).wait(FOREVER).return_value


@task
async def await_other():
    return (await (await sleep_async.aenqueue(FOREVER)).await_(FOREVER)).return_value


@task
async def sleep_async(seconds):
    await asyncio.sleep(seconds)
    return "slept"


@task(timeout=0.2)
def stop_in_debugger(number):
    breakpoint()  # noqa: T100 - a person debugs it
    return 2 * number
