"""The table of verbs: how each is called in a world, by whom, and where it matters.

``people.py``, ``workers.py`` and ``schedules.py`` fill it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from django.db import transaction

from django_pglock.store.outcome import Outcome
from django_pglock.tasks.claim import Claim
from qa.interleavings.worlds import FIRST, SECOND, THIRD, World

EVERYWHERE = frozenset({"plain", "key", "concurrent", "unique", "after", "group", "shared", "family", "waits", "steps"})


class Results:
    """The results of the verbs of one case: claims, accepted outcomes, and rescued claims."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.accepted: list[tuple[Claim, Outcome]] = []
        self.taken_back: set[int] = set()
        self.workers: Iterator[UUID] = iter((FIRST, SECOND, THIRD))
        #: How many tasks each redrive has retried, by its own progress.
        self.redriven: list[int] = []
        #: The ids of tasks that people have enqueued by a schedule.
        self.enqueued: list[int] = []
        self._lock = threading.Lock()

    def worker(self) -> UUID:
        """Return a different worker for each verb that claims."""
        with self._lock:
            return next(self.workers)


@dataclass(frozen=True)
class Verb:
    """``call`` is what it does in a world. ``is_workers``: a worker's session is READ COMMITTED whatever the role says.

    ``worlds``: where it meets others; a verb that does nothing in a world is left out by itself. ``retries`` and
    ``prunes``: it may move finished tasks, or delete them.
    """

    name: str
    call: Callable[[World, Results], Any]
    is_workers: bool = False
    worlds: frozenset[str] = EVERYWHERE
    retries: bool = False
    prunes: bool = False
    is_in_transaction: bool = False


VERBS: dict[str, Verb] = {}
#: The end of the names of verbs inside of the caller's transaction.
IN_A_TRANSACTION = "_in_a_transaction"


def verb(*worlds: str, **facts: Any) -> Callable[[Callable[[World, Results], Any]], Callable[[World, Results], Any]]:
    """Add a function to the table."""

    def add(call: Callable[[World, Results], Any]) -> Callable[[World, Results], Any]:
        VERBS[call.__name__] = Verb(call.__name__, call, worlds=frozenset(worlds) or EVERYWHERE, **facts)
        return call

    return add


def in_a_transaction(name: str) -> None:
    """Add the same verb inside of the caller's transaction."""
    plain = VERBS[name]

    def call(world: World, results: Results) -> None:
        with transaction.atomic():
            plain.call(world, results)

    inside = f"{name}{IN_A_TRANSACTION}"
    VERBS[inside] = replace(plain, name=inside, call=call, is_in_transaction=True)
