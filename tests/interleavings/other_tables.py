"""Tables beside those of tasks: the history, and the counts of the queues."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from django.db.models import F
from django.db.models.functions import Now

from django_pglock.models import QueueCount, TaskHistory
from django_pglock.store import shared_failures
from django_pglock.store.count import queue_counts
from django_pglock.store.history import KEPT, add_rescued, prune_history
from django_pglock.store.shared_counts import WRITE_COUNTS, shared_counts
from django_pglock.store.statements import filled
from tests.interleavings.judge import Judge, law
from tests.interleavings.verbs import Results, verb
from tests.interleavings.worlds import World
from tests.sample import tasks

#: The age of the old rows is twice as much.
LONG = timedelta(days=180)


def other_tables(world: World) -> None:
    """The counts are out of date, and the history has rows that are too old."""
    tasks.nothing.enqueue()
    shared_counts("default")
    QueueCount.objects.update(ready=99, count_again_at=Now())
    QueueCount.objects.filter(queue="default").update(count_again_at=None)
    add_rescued("default", [("default", "old", "READY")])
    TaskHistory.objects.update(started_at=F("started_at") - 2 * LONG)


RESCUED = [("default", "first", "READY"), ("mail", "second", "FAILED")]


@verb("other_tables", is_workers=True)
def write_history(world: World, results: Results) -> None:
    add_rescued("default", RESCUED)
    results.counted.append(1)


@verb("other_tables", is_workers=True)
def write_history_backwards(world: World, results: Results) -> None:
    """As another worker that has counted the same functions in another order."""
    add_rescued("default", RESCUED[::-1])
    results.counted.append(1)


@verb("other_tables", is_workers=True)
def delete_old_history(world: World, results: Results) -> None:
    prune_history("default")


@verb("other_tables", is_workers=True)
def count_for_all(world: World, results: Results) -> None:
    shared_counts("default")


@verb("other_tables")
def invalidate_failures(world: World, results: Results) -> None:
    shared_failures.invalidate_failures("default")


@law("other_tables")
def whatever_is_counted_is_in_the_sums(judge: Judge) -> None:
    sums = {(seconds, *row): Counter() for seconds in KEPT for row in ((False, False), (True, False), (True, True))}
    for row in TaskHistory.objects.filter(started_at__gt=Now() - LONG):
        sums[row.seconds, bool(row.queue), bool(row.task_path)].update(lost=row.lost, failed=row.failed)
    [counted, *others] = sums.values()
    assert all(each == counted for each in others), "the rows and their sums differ"
    written = len(judge.results.counted)
    assert judge.has_died or (counted["lost"], counted["failed"]) == (written, written), "counts were lost"


@law("other_tables")
def old_rows_are_deleted(judge: Judge) -> None:
    has_old = TaskHistory.objects.filter(started_at__lt=Now() - LONG).exists()
    has_to_be_deleted = "delete_old_history" in {each.name for each in judge.verbs}
    assert has_old != has_to_be_deleted or judge.has_died


@law("other_tables")
def one_counts_for_all(judge: Judge) -> None:
    written = [run for run in judge.runs if filled(WRITE_COUNTS) in run.statements]
    assert len(written) <= 1 or judge.has_died, "two have counted at the same time"
    if written and not judge.has_died:
        found = {each.queue: each.counts["READY"] for each in queue_counts("default")}
        assert found == dict(QueueCount.objects.exclude(queue="").values_list("queue", "ready"))
