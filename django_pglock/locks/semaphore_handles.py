"""Handles of semaphores. A handle has one of several keys: that of the granted slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from django_pglock.conf import key_function
from django_pglock.errors import LockError
from django_pglock.keys import Key
from django_pglock.locks.async_handle import AsyncHandle
from django_pglock.locks.handle import Handle
from django_pglock.locks.options import Request
from django_pglock.locks.session_locks import LockRecord
from django_pglock.locks.statements.fragments import comment
from django_pglock.locks.statements.semaphore import acquire_slot
from django_pglock.locks.statements.steps import Steps
from django_pglock.postgres.connections import in_transaction

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper


class Slots:
    """The common part of both handles: they request all slots, and hold the granted one."""

    request: Request
    key: int

    @property
    def name(self) -> str:
        """The semaphore's name: the name of a slot without its number."""
        return self.request.keys[0].name.rpartition("#")[0]

    def _build_request(self, held: Callable[[], AbstractSet[int]]) -> Request:
        # Without the slots that this session holds: PostgreSQL would grant them again, and the count would be wrong.
        slots = self.request.without(held())
        if not slots.keys:
            raise LockError(f"This session already holds all slots of {self.name!r}.", name=self.name, key=self.key)
        return slots

    def _note_granted(self, record: LockRecord, row: Sequence[Any]) -> None:
        self.request = record.request = self.request.only(row[0])
        record.comment = comment(record.request.keys)

    @property
    def _queue(self) -> Key:
        """The lock for which all waiters queue."""
        name = f"{self.name}#queue"
        return Key(name, key_function()(name))


class SlotHandle(Slots, Handle):
    """One of several slots of a semaphore. ``key`` is the slot's once it is held."""

    def _steps(self, connection: DatabaseWrapper, record: LockRecord) -> Steps:
        inside = connection.in_atomic_block or in_transaction(connection)
        if inside:
            record.queue = self._queue
        return acquire_slot(record.request, record.scope, self._queue, inside=inside)


class AsyncSlotHandle(Slots, AsyncHandle):
    """One of several slots of a semaphore. ``key`` is the slot's once it is held."""

    def _may_request(self, request: Request) -> bool:
        return bool(self.request.without(self._session.numbers()).keys)

    def _steps(self, record: LockRecord) -> Steps:
        return acquire_slot(record.request, record.scope, self._queue, inside=record.scope == "transaction")
