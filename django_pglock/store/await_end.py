"""Waits until a task has ended, in a thread or in a coroutine."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from contextlib import suppress
from typing import Any

from asgiref.sync import sync_to_async

from django_pglock.errors import TaskError
from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.store.result_listener import WaitingCaller, listening
from django_pglock.store.statements import run
from django_pglock.tasks import registry
from django_pglock.tasks.claim import running_claim
from django_pglock.tasks.queues import is_served

#: An unfinished task, and the queues that one worker serves.
AWAITED_IN_WORKER = """
SELECT task.task_path, task.queue, (SELECT worker.queues FROM {worker} AS worker WHERE worker.id = %s LIMIT 1)
FROM {task} AS task WHERE task.id = %s AND task.finished_at IS NULL
"""


def await_end(task_id: int, using: str, timeout: float | None) -> bool | None:
    """Wait until a task has ended, for ``timeout`` seconds at most (None: as long as it takes).

    Returns True when it has, False when there is no such task, None when the time is over. Raises ``TaskError`` inside
    a transaction: no worker sees the task before the commit, so the caller would wait for itself. Raises it also inside
    of a task, if its own worker may have to run the awaited task.
    """
    if in_transaction(connection_for(using)):
        raise TaskError("wait() inside atomic() would never return: no worker sees the task before the commit.")
    _refuse_in_worker(task_id, using)
    answer: Future[bool] = Future()

    def tell(said: bool | BaseException) -> None:
        if isinstance(said, BaseException):
            answer.set_exception(said)
        else:
            answer.set_result(said)

    with listening(using, WaitingCaller(task_id, tell, is_abandoned=lambda: False)):
        try:
            return answer.result(timeout)
        except WaitedTooLong:
            return None


async def await_end_async(task_id: int, using: str, timeout: float | None) -> bool | None:
    """Do the same for a coroutine. It occupies no thread while it waits, so it may wait for a sync function."""
    if running_claim.get() is not None:
        await sync_to_async(_refuse_in_worker)(task_id, using, only_async=True)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bool] = loop.create_future()

    def tell(said: bool | BaseException) -> None:
        # The loop may have been closed while the coroutine waited.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, answer, said)

    with listening(using, WaitingCaller(task_id, tell, is_abandoned=loop.is_closed)):
        try:
            await asyncio.wait([answer], timeout=timeout)
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()


def _refuse_in_worker(task_id: int, using: str, *, only_async: bool = False) -> None:
    """Raise ``TaskError`` inside of a task whose worker serves the queue of the awaited task.

    Once such tasks wait in all threads of the workers, each waits for one that cannot begin.
    """
    claim = running_claim.get()
    for path, queue, asked in () if claim is None else run(using, AWAITED_IN_WORKER, claim.worker, task_id):
        is_of_kind = registry.is_async(path) or not only_async
        if is_of_kind and asked is not None and is_served(queue, json.loads(asked)):
            raise TaskError(
                f"{claim} waits for {path} (task {task_id}), which its own worker may have to run: the queue is "
                f"{queue!r}. If such tasks wait in all threads, none of the awaited ones can begin. Enqueue what "
                "follows with using(after=result), or let other workers, and not this one, serve the queue of the "
                "awaited task."
            )


def _settle(answer: asyncio.Future[Any], said: bool | BaseException) -> None:
    if answer.done():
        return
    if isinstance(said, BaseException):
        answer.set_exception(said)
    else:
        answer.set_result(said)
