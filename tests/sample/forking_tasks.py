"""Task functions that fork, and what their children do."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
import warnings

from django.db import connection, connections

from django_pglock import Lease, LockNotAvailable, lock, task, try_lock
from tests.sample.models import Effect


def backend_pid():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


def fork():
    """Fork a process with threads, on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def live(parents_session):
    """Do in a child what a program does with its database, and leave a note when all of it went well."""
    from tests.sample import tasks

    assert backend_pid() != parents_session
    assert not connection.in_atomic_block
    assert not try_lock("of the parent").acquire()
    try:
        Lease("of the parent", ttl=30).acquire()
    except LockNotAvailable:
        pass
    else:
        raise AssertionError("the child got its parent's lease")
    with lock("of the child"), Lease("of the child", ttl=30) as lease:
        lease.assert_held()
    asyncio.run(live_async())
    tasks.record.enqueue("from the child", os.getpid())
    Effect.objects.create(name="lived", pid=os.getpid())
    connections.close_all()


async def live_async():
    async with lock("of the child"):
        pass


def by_multiprocessing(function, *args):
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(60)
    return process.exitcode


def by_fork(function, *args):
    if pid := fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        function(*args)
        code = 0
    finally:
        os._exit(code)


WAYS = {"multiprocessing": by_multiprocessing, "fork": by_fork}


@task
def fork_a_child(way):
    """Fork while a session lock and a lease are held, and see that the parent has not changed."""
    before = backend_pid()
    with lock("of the parent") as handle, Lease("of the parent", ttl=30) as lease:
        code = WAYS[way](live, before)
        handle.assert_held()
        lease.extend()
    assert backend_pid() == before
    return code


@task(atomic=True)
def fork_in_transaction(way):
    """A child that works is not in its parent's transaction, and does not end it."""
    before = backend_pid()
    Effect.objects.create(name="of the parent")
    with lock("of the parent"), Lease("of the parent", ttl=30):
        code = WAYS[way](live, before)
    assert backend_pid() == before
    raise ValueError(f"undo it; the child ended with {code}")


def end(how):
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("of the child")
    return how


@task(atomic=True)
def fork_and_come_back(how):
    """The child comes back out of the function, as if it were the worker."""
    if pid := fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return end(how)


@task
async def fork_in_coroutine(how):
    if pid := fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return end(how)


@task
def terminate_a_child(number):
    """End a child by a signal that has another meaning for the worker."""
    read, write = os.pipe()
    if pid := fork():
        os.read(read, 1)  # CPython forgets a signal that comes while it forks
        os.kill(pid, number)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(write, b"!")
    # No system call that the signal could interrupt.
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass
    os._exit(0)


@task
def leave_a_child():
    """Continue beside a child that outlives the worker."""
    if pid := fork():
        Effect.objects.create(name="left", pid=pid)
        signal.pause()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        time.sleep(60)
