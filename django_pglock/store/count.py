"""What there is in the queues, counted only so far: nobody waits for ten million rows to learn that they are many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from django.db import connections
from django.db.models.functions import Now

from django_pglock.store import statements
from django_pglock.store.plans import kept
from django_pglock.store.prune import PruneQuerySet
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from typing_extensions import Self

#: Tasks of one status that are counted at most.
MOST_COUNTED = 10_000
#: Tasks that are looked through at most for what no index knows.
MOST_SEARCHED = 100_000


#: What is counted; ``COUNT_OTHERS`` names them again.
COUNTED = ("READY", "BLOCKED", "SCHEDULED", "RUNNING", "FAILED")


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """One queue: its tasks by status, the seconds for which the oldest has been ready, and since when it is paused.

    Of the statuses in ``at_least`` there are as many or more; the oldest ready one may then be older, too.
    """

    queue: str
    counts: Mapping[str, int]
    oldest_ready: float | None
    paused_at: datetime | None
    at_least: frozenset[str]


class CountQuerySet(PruneQuerySet):
    """Tasks, and how many there are."""

    def in_status(self, status: str) -> Self:
        """Tasks of one status. To be ordered by it, and then by id: so an index has them."""
        if status == TaskStatus.SUCCESSFUL:
            # Most tasks are, so whoever walks the key meets them at once.
            return self.filter(status=status)
        # COUNT_OTHERS says why a range.
        return self.filter(status__range=(status, status)).exclude(status=TaskStatus.SUCCESSFUL)

    def search_end(self) -> int | None:
        """Return the id behind the first ``MOST_SEARCHED`` of these tasks, None when there are no more than that."""
        return next(iter(self.values_list("pk", flat=True)[MOST_SEARCHED : MOST_SEARCHED + 1]), None)

    def ready_queues(self) -> list[str]:
        """Return the names of the queues that have something ready, one index probe each."""
        with connections[self.db].cursor() as cursor:
            statement = self._sql(statements.READY_QUEUES)
            cursor.execute(kept(cursor, statement) or statement)
            return [queue for (queue,) in cursor.fetchall()]

    def ready_counts(self, *, most: int = MOST_COUNTED) -> dict[str, tuple[int, float | None]]:
        """Return for each queue that has something ready how much that is, and the age of the oldest in seconds.

        No more than ``most`` tasks of a queue are counted.
        """
        return self._count_ready(self.ready_queues(), most)

    def queue_counts(self, *, most: int = MOST_COUNTED) -> list[QueueCounts]:
        """Return what is in each queue that has something unfinished or failed, or is paused, by name.

        No more than ``most`` tasks are counted: of what is ready, in each queue; of each other status, in all.
        """
        ready = self.ready_counts(most=most)
        others, capped = self._count_others(most)
        paused = self.paused_queues()
        found = []
        for queue in sorted({*ready, *others, *paused}):
            count, oldest = ready.get(queue, (0, None))
            counts = {**dict.fromkeys(COUNTED, 0), **others.get(queue, {}), "READY": count}
            at_least = capped | {"READY"} if count >= most else capped
            found.append(QueueCounts(queue, counts, oldest, paused.get(queue), frozenset(at_least)))
        return found

    def count_workable(self, queues: Collection[str] = (), *, most: int = MOST_COUNTED) -> int:
        """Return how many tasks of these queues (none: of all) a worker could begin now: ready, or due.

        What is paused is not counted, and no more than ``most`` of each queue, or of what is due.
        """
        paused = self.paused_queues()
        wanted = [queue for queue in queues or self.ready_queues() if queue not in paused]
        due = self.filter(status=TaskStatus.SCHEDULED, run_after__lte=Now()).exclude(queue__in=paused)
        if queues:
            due = due.filter(queue__in=queues)
        return int(due.order_by("run_after")[:most].count()) + sum(
            count for count, _ in self._count_ready(wanted, most).values()
        )

    def _count_ready(self, queues: Collection[str], most: int) -> dict[str, tuple[int, float | None]]:
        rows = self._run(statements.COUNT_READY, sorted(set(queues)), most, most)
        return {queue: (min(count, most), oldest) for queue, count, oldest in rows}

    def _count_others(self, most: int) -> tuple[dict[str, dict[str, int]], set[str]]:
        """Return the counts by queue and status, and the statuses of which there may be more."""
        by_queue: dict[str, dict[str, int]] = {}
        totals: Counter[str] = Counter()
        for status, queue, count in self._run(statements.COUNT_OTHERS, most):
            by_queue.setdefault(queue, {})[status] = count
            totals[status] += count
        return by_queue, {status for status, total in totals.items() if total >= most}

    def paused_queues(self) -> dict[str, datetime]:
        """Return the queues that are paused, and since when."""
        queues = self.model._meta.apps.get_model("django_pglock", "Queue").objects.using(self.db)
        return {row.name: row.paused_at for row in queues.paused()}
