"""Task functions that exclude code outside of tasks. Locks of the kernel on a file prove the exclusion."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from django_pglock import TaskContext, task


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Note in ``PATH.together`` if another caller is inside, in this process or another. A kill ends it, too.

    The kernel may close the session of a process that was killed before it frees the process's lock on the file. So
    who finds the file locked says so in ``PATH.met``, and the one inside notes it, unless that one is dead.
    """
    met = Path(f"{path}.met")
    with open(path, "a") as file:
        deadline = time.monotonic() + 5
        while not _is_locked(file):
            met.touch()
            if time.monotonic() > deadline:
                Path(f"{path}.together").touch()
                break
            time.sleep(0.001)
        met.unlink(missing_ok=True)
        try:
            yield
        finally:
            if met.exists():
                Path(f"{path}.together").touch()


def _is_locked(file: IO[str]) -> bool:
    """Lock a file if it is not locked. Return whether it was locked by this call."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for(path: str) -> None:
    """Wait until a test lets the function continue."""
    Path(f"{path}.inside").touch()
    while not Path(path).exists():
        time.sleep(0.005)


@task(lock="shelf:{shelf}", advisory=True, max_attempts=3, backoff=0, takes_context=True)
def count_shelf(context: TaskContext, shelf, path, fails=0):
    with alone(path):
        time.sleep(0.005)
        if len(context.task_result.errors) < fails:
            raise ValueError("counted wrongly")


@task(lock="shelf:{shelf}", advisory=True, atomic=True)
def count_shelf_atomically(shelf, path):
    with alone(path):
        time.sleep(0.005)


@task(lock="shelf:{shelf}", advisory=True)
async def count_shelf_in_coroutine(shelf, path):
    with alone(path):
        await asyncio.sleep(0.005)


@task(lock="shelf:{shelf}", advisory=True)
def hold_shelf(shelf, path, go_on):
    with alone(path):
        wait_for(go_on)


@task(lock="shelf:{shelf}", advisory=True, timeout=0.2)
def count_in_time(shelf, path):
    with alone(path):
        pass


@task(lock="shelf:{shelf}")
def count_without_advisory(shelf, go_on):
    wait_for(go_on)
