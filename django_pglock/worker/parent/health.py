"""The health of a parent and its children, and their numbers: only what they have told, so no answer waits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_pglock.conf import get_settings
from django_pglock.store.liveness import silent_after
from django_pglock.worker.parent.children import counted

if TYPE_CHECKING:
    from django_pglock.store.count import QueueCounts
    from django_pglock.store.numbers import Total
    from django_pglock.worker.parent.crew import Crew

#: The numbers of a report that are true at its moment. All others only grow.
OF_NOW = ("in_flight", "running", "unsettled")


class Health:
    """Answers two questions: does the worker live, and does it work? An answer is a sentence about a problem, or None.

    A worker without a database connection does not work, but a restart would not help. The loop calls ``note_turn()``
    each second.
    """

    def __init__(self, crews: Sequence[Crew]) -> None:
        self.crews = crews
        self.is_stopping = False
        self._turned_at = time.monotonic()

    def note_turn(self) -> None:
        """Note that the loop runs."""
        self._turned_at = time.monotonic()

    def hung(self) -> str | None:
        """Return why the parent does not work any more. What hangs in a child is no reason: the child is replaced."""
        silence = time.monotonic() - self._turned_at
        return (
            f"The worker has not responded for {silence:.0f} s." if silence > get_settings().HEARTBEAT_LIMIT else None
        )

    def unready(self) -> str | None:
        """Return why no child claims tasks."""
        if self.is_stopping:
            return "The worker is stopping."
        for crew in self.crews:
            if trouble := self._unready(crew):
                return trouble
        return self.hung()

    def _unready(self, crew: Crew) -> str | None:
        heartbeat = crew.heartbeat
        if heartbeat.pending:
            return "Migrations of django_pglock are pending."
        if not heartbeat.is_connected:
            return "The worker has no connection to the database."
        if heartbeat.beat_at is None:
            return "The first heartbeat is not written yet."
        if not crew.children.all:
            return "No process of the worker runs at the moment."
        age = time.monotonic() - heartbeat.beat_at
        if age > silent_after():
            return f"The last heartbeat was written {age:.0f} s ago."
        troubles = [child.report.get("unready", "A process of the worker starts.") for child in list(crew.children.all)]
        return None if None in troubles or not troubles else str(troubles[0])

    def beat_age(self) -> float | None:
        """Return the seconds since the oldest of the last heartbeats was written; None before the first one."""
        dates = [crew.heartbeat.beat_at for crew in self.crews]
        return None if None in dates else time.monotonic() - min(date for date in dates if date is not None)

    @property
    def counted(self) -> Counter[str]:
        """What all children have counted since the start, by the names in their reports."""
        total: Counter[str] = Counter()
        for crew in self.crews:
            total["heartbeat"] += max(0, crew.heartbeat.connects - 1)
            total["upkeep"] += crew.upkeep.reconnects
            with crew.children.moving:
                total.update(crew.children.ended)
                for child in crew.children.all:
                    total.update(counted(child.report))
        return total

    @property
    def now(self) -> Counter[str]:
        """What all children do at the moment."""
        now: Counter[str] = Counter()
        for crew in self.crews:
            for child in list(crew.children.all):
                now.update({name: child.report.get(name, 0) for name in OF_NOW})
                now.update({"processes": 1, "threads": crew.children.options["threads"]})
        return now

    def readings(self) -> tuple[list[QueueCounts], list[Total]]:
        """Return the depths of the queues, and the attempts of all time, as the upkeep has read them last."""
        queues: list[QueueCounts] = []
        totals: list[Total] = []
        for crew in self.crews:
            depths, counters = crew.upkeep.readings.request()
            queues += depths
            totals += counters
        return queues, totals
