"""Task functions that use their thread's session at moments which the test chooses. For workers in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import closing, suppress

import psycopg
from asgiref.sync import sync_to_async
from django.db import DatabaseError, connection, connections, transaction
from psycopg.pq import TransactionStatus

from django_pglock import TaskContext, task
from django_pglock.models import Task
from django_pglock.postgres.connections import has_ended
from django_pglock.postgres.sessions import dedicated_connection
from tests.sample.models import Effect

HAS_BEGUN, GO_ON = threading.Event(), threading.Event()


def select(statement="SELECT 1", using="default"):
    with connections[using].cursor() as cursor:
        cursor.execute(statement)


def lose_session():
    """End the session of this thread behind Django's back."""
    select()
    raw = connection.connection
    with closing(dedicated_connection("default")) as other, other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 60000)", [raw.info.backend_pid])
    while not has_ended(raw):
        time.sleep(0.001)


@task
def lose_session_at_the_end():
    lose_session()


@task
def close_descriptor_at_the_end():
    select()
    os.close(connection.connection.fileno())


@task
def read():
    select()


@task
async def read_in_coroutine():
    await sync_to_async(select)()


@task
async def lose_session_of_coroutines_at_the_end():
    await sync_to_async(lose_session)()


def pause():
    HAS_BEGUN.set()
    assert GO_ON.wait(60)


@task(max_attempts=2, backoff=0)
def ask_in(using):
    select(using=using)
    pause()
    select(using=using)


@task(timeout=3, max_attempts=2, backoff=0)
def ask_twice_in_time():
    select()
    pause()
    select()


@task(atomic=True)
def write_and_pause():
    Effect.objects.create(name="atomic")
    pause()


@task(atomic=True)
def write():
    Effect.objects.create(name="atomic")


@task
def read_slowly(seconds):
    """Read rows that have all come long ago; libpq calls the session active until the last one is taken."""
    connection.ensure_connection()
    with connection.connection.cursor() as cursor:
        for _ in cursor.stream("SELECT generate_series(1, 3)"):
            time.sleep(seconds)


@task(atomic=True, takes_context=True)
def end_own_session(context: TaskContext, times):
    """Lose the connection this number of times, then succeed."""
    Effect.objects.create(name="cut off")
    if context.fencing_token <= times:
        select("SELECT pg_terminate_backend(pg_backend_pid())")


@task(atomic=True)
def pause_then_write():
    """Send the first statement after the pause, so that no limit of the role is over before."""
    pause()
    Effect.objects.create(name="atomic")


@task(atomic=True)
def set_local(name, value):
    """Change a setting for the rest of the transaction."""
    select("SELECT 1")
    select(f"SELECT set_config('{name}', '{value}', true)")


@task(atomic=True)
def write_and_sleep():
    Effect.objects.create(name="atomic")
    time.sleep(0.3)


@task(atomic=True)
def crash_server():
    """Do what a query does that meets a defect of the server or of an extension."""
    connection.ensure_connection()
    os.kill(connection.connection.info.backend_pid, signal.SIGSEGV)
    select()


def close_as_django_does():
    connections.close_all()


def close_psycopgs():
    connection.connection.close()


def fail_after_close():
    """Use a connection that is closed, as code does that does not know of it."""
    connection.close()
    select()


def idle_for_too_long():
    select("SET LOCAL idle_in_transaction_session_timeout = 50")
    time.sleep(0.4)


def ask_after_idle():
    idle_for_too_long()
    Effect.objects.create(name="too late")


def hide_end_by_idle():
    """Catch the error, as code does that can continue without the answer."""
    with suppress(DatabaseError):
        ask_after_idle()


def hide_end_on_cursor():
    """Catch the error of a cursor, of which Django does not note that the transaction is broken."""
    idle_for_too_long()
    with suppress(DatabaseError):
        select()


def close_after_idle():
    """Close the connection because of an error, as code does that tries again with a new one."""
    try:
        ask_after_idle()
    except DatabaseError:
        connection.close()
        raise


def transaction_for_too_long():
    select("SET LOCAL transaction_timeout = 50")
    time.sleep(0.4)


def replace_session():
    LEFT.append(connection.connection.close)
    connections["default"] = connections.create_connection("default")


def forget_session():
    LEFT.append(connection.connection.close)
    connection.connection = None


def leave_block_open():
    transaction.atomic().__enter__()


def leave_copy_open():
    copy = connection.connection.cursor().copy("COPY (SELECT generate_series(1, 100000)) TO STDOUT")
    copy.__enter__()
    LEFT.extend([connection.connection.close, lambda: copy.__exit__(None, None, None)])


def leave_copy_open_and_fail():
    leave_copy_open()
    raise DatabaseError("after COPY")


def hide_table():
    select(f"CREATE TEMPORARY TABLE {Task._meta.db_table} (LIKE {Task._meta.db_table} INCLUDING ALL)")


@task
def hide_table_for_the_next():
    hide_table()


def remove_row():
    select(f"DELETE FROM {Task._meta.db_table} WHERE status = 'RUNNING'")


#: Ends what functions have left open, after the test.
LEFT: list = []


@task(atomic=True, max_attempts=2, backoff=0)
def end_session_by(how):
    """End the session in one of the ways above, in each attempt."""
    Effect.objects.create(name="undone")
    globals()[how]()


@task(atomic=True, takes_context=True)
def close_after_cut(context: TaskContext):
    """Lose the connection once, close what is left of it, and succeed in the next attempt."""
    Effect.objects.create(name="cut off")
    if context.fencing_token == 1:
        try:
            select("SELECT pg_terminate_backend(pg_backend_pid())")
        except DatabaseError:
            connection.close()
            raise


def leave_begin():
    select("BEGIN")


def leave_aborted():
    select("BEGIN")
    with suppress(DatabaseError):
        select("SELECT 1 / 0")


def leave_closed():
    select()
    connection.connection.close()


def leave_in_use():
    """Give the connection to a thread that continues using it."""
    connection.ensure_connection()
    raw = connection.connection

    def use():
        with suppress(psycopg.Error):
            raw.execute("SELECT pg_sleep(60)")

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    while raw.pgconn.transaction_status != TransactionStatus.ACTIVE:
        time.sleep(0.001)


def leave_other_database():
    connections["other"].cursor().execute("BEGIN")


LEAVE = {
    "a BEGIN": leave_begin,
    "an aborted transaction": leave_aborted,
    "a closed connection": leave_closed,
    "a connection that is in use": leave_in_use,
    "a BEGIN in another database": leave_other_database,
}


@task
def leave(what):
    LEAVE[what]()


@task
def write_to(alias):
    Effect.objects.using(alias).create(name="kept")


@task
def write_late(seconds):
    """Open a connection after a while only."""
    time.sleep(seconds)
    Effect.objects.create(name="late")


@task
async def write_late_in_coroutine(seconds):
    await asyncio.sleep(seconds)
    await Effect.objects.acreate(name="late")


@task
def write_after_pause(alias):
    """Write in a session that is opened after the pause."""
    pause()
    Effect.objects.using(alias).create(name="late")


@task
async def write_after_pause_in_coroutine(alias):
    await sync_to_async(write_after_pause.func)(alias)


@task
async def write_to_in_coroutine(alias):
    await Effect.objects.using(alias).acreate(name="kept")


@task
def write_read_only(alias):
    """Fail by a transaction that can only read because the function says so."""
    with transaction.atomic(using=alias):
        connections[alias].cursor().execute("SET TRANSACTION READ ONLY")
        Effect.objects.using(alias).create(name="refused")


@task
async def forbid_writes_in_coroutine(alias):
    """Fail, and leave a read-only session."""
    await sync_to_async(forbid_writes)(alias)


def forbid_writes(alias):
    connections[alias].cursor().execute("SET default_transaction_read_only = on")
    Effect.objects.using(alias).create(name="refused")


@task
def tell_backend():
    connection.ensure_connection()
    return connection.connection.info.backend_pid


@task
def tell_backend_of(alias):
    connections[alias].ensure_connection()
    return connections[alias].connection.info.backend_pid


@task
async def tell_backend_in_coroutine():
    return await sync_to_async(tell_backend.func)()


@task(timeout=1)
async def sleep_in_server_in_coroutine(seconds):
    await sync_to_async(select)(f"SELECT pg_sleep({seconds})")


@task
async def leave_in_coroutine():
    await sync_to_async(select)("BEGIN")
    await Effect.objects.acreate(name="lost")


def close_in_block():
    with transaction.atomic():
        Effect.objects.create(name="undone")
        connection.close()


def cut_off():
    select("SELECT pg_terminate_backend(pg_backend_pid())")


def write_and_commit():
    Effect.objects.create(name="committed")
    connection.commit()


@task
async def call_in_coroutine(name):
    """Call one of the functions above in the thread of the ORM."""
    await sync_to_async(globals()[name])()


@task
async def write_in_coroutine():
    await Effect.objects.acreate(name="kept")


@task
async def occupy():
    """Keep the thread in which the ORM runs for all coroutines."""
    await sync_to_async(pause)()


@task
async def wait_until_told():
    while not GO_ON.is_set():
        await asyncio.sleep(0.01)
    return "told"


@task
def select_in_thread(name):
    """Open a session in a thread that ends."""
    thread = threading.Thread(target=select, args=(f"SET application_name = '{name}'",))
    thread.start()
    thread.join()
