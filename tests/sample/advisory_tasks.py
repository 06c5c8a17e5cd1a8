"""Task functions that exclude code outside of tasks. What they prove with is a lock of the kernel's on a file."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django_pglock import TaskContext, task


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Note in ``PATH.together`` if somebody else is inside, in this process or another. A kill ends it, too."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with open(f"{path}.together", "a") as together:
                together.write("two were inside\n")
        yield


def wait_for(path: str) -> None:
    """Wait until a test lets the function go on."""
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
