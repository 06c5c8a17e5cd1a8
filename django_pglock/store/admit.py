"""Keys at which tasks wait, and how they get through.

A task with a key is BLOCKED until it is *admitted*: made READY, for any worker to claim. So the claims know nothing of
keys, and a hundred thousand tasks that wait for one are in nobody's way.

Two things let a task through, and each commits before it looks: whoever enqueues commits the task and then admits;
whoever finishes one commits the end and then admits. Admitting to a key is done by one at a time, so the later of the
two sees what the other has committed. What a crash leaves undone between the two, upkeep does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from django.db import OperationalError, connections, models, transaction
from psycopg import ClientCursor
from psycopg.errors import LockNotAvailable

from django_pglock.store import statements
from django_pglock.store import wake as wakeup
from django_pglock.store.claim_manager import ClaimQuerySet
from django_pglock.tasks.states import TaskStatus

#: Keys that are admitted to in one transaction.
KEYS_AT_ONCE = 1000
#: What a key begins with at which tasks wait for tokens.
RATED = "%rate "
#: Who has one of these statuses will finish, and admit to its key then.
ADMITTED = (TaskStatus.READY, TaskStatus.RUNNING)


class GateQuerySet(ClaimQuerySet[Any]):
    """Tasks that wait for a key."""

    def admit(self, keys: Iterable[str | None]) -> int:
        """Make READY what these keys have room for, first come, first served. Returns how many tasks that were."""
        wanted = sorted({key for key in keys if key is not None})
        queues: list[str] = []
        for start in range(0, len(wanted), KEYS_AT_ONCE):
            queues += self._admit(wanted[start : start + KEYS_AT_ONCE])
        self.wake(queues)
        return len(queues)

    def _admit(self, keys: list[str]) -> list[str]:
        rated = [key for key in keys if key.startswith(RATED)]
        plain = [key for key in keys if not key.startswith(RATED)]
        rows = self._admit_by(statements.ADMIT_NEXT, plain) if plain else []
        queues = [queue for queue, _ in rows if queue is not None]
        # Those of which the small statement says that they are not as simple as that.
        others = sorted(rated + [key for _, key in rows if key is not None])
        return queues + [queue for (queue,) in self._admit_by(statements.ADMIT, others)] if others else queues

    def _admit_by(self, statement: str, keys: list[str], values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        # Nobody waits for this to be on the disk: what a crash of the server takes, upkeep does again.
        is_own = not connections[self.db].in_atomic_block
        unsynced = [("SET LOCAL synchronous_commit = off", ())] if is_own else []
        # Two statements, so that the second one's snapshot is younger than the lock.
        return self._run_together(*unsynced, (statements.LOCK_KEYS, [keys]), (statement, values or [keys]))

    def admit_own(self, id_: int, key: str, *, is_alone: bool) -> None:
        """Admit to the key of one task that was enqueued, after its commit. ``is_alone``: nobody runs beside it.

        By a statement that is cheaper than ``admit``, and in most cases enough.
        """
        values = (key, key, id_, id_)
        try:
            [(queue, other)] = self._admit_by(statements.ADMIT_OWN, [key], values)
        except OperationalError as error:
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            # Somebody has it locked already, as to cancel it.
            queue, other = None, None
        if queue is not None:
            self.wake([queue])
        elif not (is_alone and other in ADMITTED):
            self.admit([key])

    def admit_on_commit(self, keys: Collection[str | None]) -> None:
        """Admit once the current transaction is committed."""
        if any(key is not None for key in keys):
            transaction.on_commit(partial(self.admit, keys), using=self.db, robust=True)

    def open_rates(self, *, limit: int = KEYS_AT_ONCE) -> list[str]:
        """Return the keys whose next token has come. Whoever asks has to admit to them."""
        return [key for (key,) in self._run(statements.OPEN_RATES, limit)]

    def forget_rates(self, *, limit: int = KEYS_AT_ONCE) -> int:
        """Delete buckets of keys that nobody has used for a day, some at a time. Returns how many."""
        return len(self._run(statements.FORGET_RATES, limit))

    def blocked_keys(self, after: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
        """Return the next keys behind ``after`` at which somebody waits, in order."""
        return [key for (key,) in self._run(statements.BLOCKED_KEYS, after, limit)]

    def holders(self, key: str, *, limit: int) -> list[int]:
        """Return the ids of the tasks that ``key`` is with, ``limit`` at most, the oldest first."""
        return [id_ for (id_,) in self._run(statements.HOLDERS, key, key, limit)]

    def wake(self, queues: Iterable[str], channel: str = wakeup.READY_CHANNEL) -> None:
        """Wake sleeping workers for these queues, once the current transaction is committed."""
        for queue in set(queues):
            wakeup.wake_on_commit(self.db, channel, queue, self._sql(statements.WAKE))

    def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with connections[self.db].cursor() as cursor:
            cursor.execute(self._sql(statement), values or None)
            return cursor.fetchall() if cursor.description else []

    def _run_together(self, *parts: tuple[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Run statements as one transaction, or within the one there is; return the rows of the last.

        In one message: a process that is frozen between two would keep what the first has locked from everybody, for as
        long as its session may stand still. PostgreSQL makes one transaction of a message, and takes a new snapshot for
        each statement: https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-MULTI-STATEMENT.
        At the level of isolation at which it does, whatever the role's default is.
        """
        with connections[self.db].cursor() as cursor:
            cursor.execute(self._message(*parts))
            while cursor.nextset():
                pass
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def _message(self, *parts: tuple[str, Sequence[Any]]) -> str:
        """Return statements with their values as one message. The connection has to be open."""
        connection = connections[self.db]
        bind = ClientCursor(connection.connection).mogrify
        begin = [] if connection.in_atomic_block else ["SET TRANSACTION ISOLATION LEVEL READ COMMITTED"]
        return ";".join(begin + [bind(self._sql(statement), values or None) for statement, values in parts])

    def _sql(self, statement: str) -> str:
        model: Any = self.model
        return _formatted(model, statement)


#: The tables besides the tasks' own that the statements name.
OTHERS = ("attempt", "queue", "rate_limit", "waiter", "worker")

#: What a claiming statement returns; the order is that of ``Claim``'s fields, less the worker.
CLAIM_COLUMNS = (
    "id",
    "attempts",
    "backend",
    "queue",
    "priority",
    "task_path",
    "args",
    "kwargs",
    "meta",
    "retries",
    "max_retries",
    "rescues",
    "run_after",
    "enqueued_at",
    "started_at",
    "last_attempted_at",
    "lock_key",
    "uncounted",
)
#: Those that are returned as seconds since the epoch: a text takes the server ten times as long, a date the worker, and
#: few are looked at. A double has room for the microseconds of the next two centuries.
DATES = ("run_after", "enqueued_at", "started_at", "last_attempted_at")


def claim_columns(quote: Callable[[str], str], prefix: str = "") -> str:
    """Return the columns of a claim as SQL."""
    columns = [f"{prefix}{quote(each)}" for each in CLAIM_COLUMNS]
    return ", ".join(
        f"date_part('epoch', {column})" if name in DATES else column
        for name, column in zip(CLAIM_COLUMNS, columns, strict=True)
    )


def array_of_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as PostgreSQL writes an array: for long ones, many times faster than to bind a list."""
    return "{" + ",".join(map(str, numbers)) + "}"


@lru_cache(maxsize=256)
def _formatted(model: type[models.Model], statement: str) -> str:
    """Return a statement with the names of its tables; how PostgreSQL quotes them is the same on every connection."""
    get_model = model._meta.apps.get_model
    others = {name: QUOTED % get_model("django_pglock", name.replace("_", ""))._meta.db_table for name in OTHERS}
    columns = claim_columns(QUOTED.__mod__, "task.")
    parts = {"claim_columns": columns, "expires_at": statements.EXPIRES_AT, "by_index": statements.BY_INDEX}
    return statement.format(task=QUOTED % model._meta.db_table, **parts, **others)


QUOTED = '"%s"'
