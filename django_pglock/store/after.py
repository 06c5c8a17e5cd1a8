"""Tasks that run after others (``after=``): what they wait for, when they are enqueued and when they are retried."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from django_pglock.store import statements
from django_pglock.store.release import release_on_commit
from django_pglock.store.sql import array_of_numbers, run

#: Retried tasks that one statement blocks again: the planner may compare each with each.
WAIT_AT_ONCE = 200


def lock_awaited(using: str, ids: Collection[int]) -> list[int]:
    """Keep these tasks from being pruned until the end of the transaction; return those of the ids that no task has."""
    known = {id_ for (id_,) in run(using, statements.LOCK_AWAITED, array_of_numbers(ids))}
    return [each for each in ids if each not in known]


def wait_again(using: str, ids: Sequence[int]) -> None:
    """Block those of these retried tasks whose ``after=`` has not succeeded, until it has.

    Has to be called in the transaction that has retried them. Tasks whose ``after=`` has failed, and is not retried
    with them, are cancelled again after the commit.
    """
    waiting = [id_ for (id_,) in run(using, statements.HAVE_AWAITED, array_of_numbers(ids))] if ids else []
    for start in range(0, len(waiting), WAIT_AT_ONCE):
        some = array_of_numbers(waiting[start : start + WAIT_AT_ONCE])
        release_on_commit(using, [awaited for (awaited,) in run(using, statements.WAIT_AGAIN, some)])
