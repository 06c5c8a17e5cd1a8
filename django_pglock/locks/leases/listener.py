"""Wakes the waiters of a lease when it is released, by LISTEN in a separate session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from django.db import Error as DatabaseFailure

from django_pglock.locks.leases.statements import CHANNEL
from django_pglock.postgres.async_sessions import AsyncSession

#: Seconds between two attempts to listen again after the session for that has ended.
LISTEN_AGAIN = 1.0


class ReleaseListener:
    """Receives notifications of released leases. Behind a pooler no notification arrives, and waiters only poll.

    ``lend_session`` lends a session of the database with the leases.
    """

    def __init__(self, lend_session: Callable[[], AbstractAsyncContextManager[AsyncSession]]) -> None:
        self._lend_session = lend_session
        self._waiting: dict[int, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self, key: int, seconds: float) -> None:
        """Wait until the lease ``key`` is released, up to ``seconds``."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._listen())
        released = self._waiting.setdefault(key, asyncio.Event())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(released.wait(), seconds)

    def stop(self) -> None:
        """Stop listening, because there are no waiters."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _listen(self) -> None:
        while True:
            with suppress(DatabaseFailure):
                async with self._lend_session() as session:
                    await session.send(f"LISTEN {CHANNEL}")
                    # There was no notification of leases that were released before the LISTEN.
                    self._wake_all()
                    async for payload in session.notifications():
                        self._wake(payload)
            await asyncio.sleep(LISTEN_AGAIN)

    def _wake(self, payload: str) -> None:
        with suppress(KeyError, ValueError):
            self._waiting.pop(int(payload)).set()

    def _wake_all(self) -> None:
        while self._waiting:
            self._waiting.popitem()[1].set()
