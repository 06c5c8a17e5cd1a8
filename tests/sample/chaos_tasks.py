"""Task functions that leave evidence of each run: who ran what, from when to when. qa/chaos judges by it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from django.db import Error as DatabaseFailure
from django.db import connection
from django.db.models.functions import Now

from django_pglock import TaskContext, emit, task
from django_pglock.errors import TaskStopped
from django_pglock.worker.child import in_flight
from tests.sample.models import Effect, Letter, Run

#: Seconds for which a function tries to write that it ends. Until it has, it has not ended.
LAST_WORD = 60.0
#: The timeout of the functions below, where their connections become silent.
TIMEOUT = float(os.environ.get("CHAOS_TIMEOUT", "0")) or None
# How many tasks a worker under test claims at once, where many would hide what one claim costs.
if _claim := os.environ.get("CHAOS_CLAIM"):
    in_flight.MOST_PREFETCHED = int(_claim)


def identity(context: TaskContext) -> dict[str, Any]:
    result = context.task_result
    return {
        "task": int(result.id),
        "attempt": context.fencing_token,
        "worker": result.worker_ids[-1],
        "thread": threading.current_thread().name,
    }


@contextlib.contextmanager
def recorded(context: TaskContext, key: str = "") -> Iterator[None]:
    """Write a start and an end, each committed at once."""
    me = identity(context)
    session = session_number()
    try:
        Run.objects.create(**me, key=key)
        yield
    finally:
        end(me, session)


def session_number() -> int:
    """Return the process number of this thread's session at the server, which is opened if there is none."""
    connection.ensure_connection()
    return int(connection.connection.info.backend_pid)


def end(me: dict[str, Any], session: int) -> None:
    """Write the end. ``session`` has written the start, or was lost while the server was still writing it."""
    deadline = time.monotonic() + LAST_WORD
    while True:
        try:
            if Run.objects.filter(**me).update(ended_at=Now()) or not is_at_work(session):
                return
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        except DatabaseFailure:
            if time.monotonic() > deadline:
                raise
            connection.close()
            time.sleep(0.05)
        except TaskStopped:
            end_in_another_session(me)
            raise


def end_in_another_session(me: dict[str, Any]) -> None:
    """Write the end after the timeout, when no statement of a Django connection is allowed any more."""
    parameters = connection.get_connection_params()
    names = ("host", "port", "dbname", "user", "password")
    with psycopg.connect(**{name: parameters[name] for name in names if name in parameters}) as session:
        guard = " AND ".join(f"{name} = %({name})s" for name in me)
        session.execute(f"UPDATE {Run._meta.db_table} SET ended_at = clock_timestamp() WHERE {guard}", me)


def is_at_work(session: int) -> bool:
    """Return whether the server still has the session with this process number, and it is not the present one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_stat_activity WHERE pid = %s AND pid <> pg_backend_pid()", [session])
        return bool(cursor.rowcount)


@task(takes_context=True, max_attempts=10, backoff=0.1, timeout=TIMEOUT)
def work(context: TaskContext, seconds):
    with recorded(context):
        time.sleep(seconds)
    return context.fencing_token


@task(takes_context=True, atomic=True, max_attempts=10, backoff=0.1, timeout=TIMEOUT)
def work_atomically(context: TaskContext, seconds):
    """Leave one effect, with the task's completion or not at all."""
    run = Run.objects.create(**identity(context), is_atomic=True)
    time.sleep(seconds)
    Run.objects.filter(pk=run.pk).update(ended_at=Now())
    return context.fencing_token


@task(takes_context=True, lock="chaos:{key}", max_attempts=10, backoff=0.1, timeout=TIMEOUT)
def work_alone(context: TaskContext, key, seconds):
    with recorded(context, key=key):
        time.sleep(seconds)
    return context.fencing_token


@task(takes_context=True)
def take_down(context: TaskContext, after):
    """Take the process down, as the kernel does when memory runs out."""
    with recorded(context):
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)


#: What a leak has taken, in this process and for good.
_hoard: list[bytes] = []


@task(takes_context=True, max_attempts=1)
def hoard(context: TaskContext):
    """Take all memory that there is and keep it, so that this process can begin nothing more."""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY, "the machine's is not for us"
    with recorded(context):
        for size in (16 * 1024**2, 64 * 1024, 512):
            with contextlib.suppress(MemoryError):
                while True:
                    _hoard.append(bytes(size))
    return context.fencing_token


@task
def tell_time():
    return time.time()


# A task of ten steps, struck at each of its statements


def leave(kind: str, number: int) -> int:
    Effect.objects.create(name=kind, number=number)
    return number


@task(max_attempts=20, backoff=0.05)
def leave_as_child(number):
    return leave("child", number)


@task(max_attempts=20, backoff=0.05)
def announce(number):
    emit(f"announced:{number}")


def leave_and_announce(number: int) -> int:
    """The event comes before, while or after the task begins to wait for it."""
    announce.enqueue(number)
    return leave("atomic", number)


#: The parts of ``ten_steps`` that leave effects, in order, with the kind of their effects.
ATOMIC, PLAIN, CHILDREN = "atomic", "plain", (71, 72, 73)
PARTS = {10: PLAIN, 20: ATOMIC, 31: ATOMIC, 32: ATOMIC, 33: ATOMIC, 40: PLAIN, 60: ATOMIC, 90: PLAIN, 100: ATOMIC}
#: The texts of the rows that it reads.
ROWS = ("31", "32", "33")


@task(takes_context=True, max_attempts=20, backoff=0.05)
def ten_steps(context: TaskContext):
    base = int(context.task_result.id) * 1000
    found = [context.step("pay", leave, PLAIN, base + 10)]
    found.append(context.atomic_step("book", leave, ATOMIC, base + 20))
    for rows in context.chunks("rows", Letter.objects.all(), size=2):
        with rows:
            for row in rows:
                leave(ATOMIC, base + int(row.text))
    found.append(context.step("pack", leave, PLAIN, base + 40))
    context.sleep("rest", 0.02)
    found.append(context.atomic_step("announce", leave_and_announce, base + 60))
    context.wait_for(f"announced:{base + 60}", timeout=None, name="announced")
    children = context.gather("children", [leave_as_child.call_of(base + each) for each in CHILDREN])
    found += [each.return_value for each in children]
    found.append(context.step("mail", leave, PLAIN, base + 90))
    found.append(context.atomic_step("close", leave, ATOMIC, base + 100))
    return found


@task(takes_context=True)
def import_rows(context: TaskContext):
    for rows in context.chunks("rows", Letter.objects.all(), size=20):
        with rows:
            Effect.objects.bulk_create(Effect(name="imported", number=row.pk) for row in rows)
    return context.fencing_token
