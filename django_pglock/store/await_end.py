"""Waits until a task has ended, in a thread or in a coroutine."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from contextlib import suppress
from typing import Any

from django_pglock.errors import TaskError
from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.store.result_listener import WaitingCaller, listening


def await_end(task_id: int, using: str, timeout: float | None) -> bool | None:
    """Wait until a task has ended, for ``timeout`` seconds at most (None: as long as it takes).

    Returns True when it has, False when there is no such task, None when the time is over. Raises ``TaskError`` inside
    a transaction: no worker sees the task before the commit, so the caller would wait for itself.
    """
    if in_transaction(connection_for(using)):
        raise TaskError("wait() inside atomic() would never return: no worker sees the task before the commit.")
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
    """Do the same for a coroutine. It occupies no thread while it waits."""
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


def _settle(answer: asyncio.Future[Any], said: bool | BaseException) -> None:
    if answer.done():
        return
    if isinstance(said, BaseException):
        answer.set_exception(said)
    else:
        answer.set_result(said)
