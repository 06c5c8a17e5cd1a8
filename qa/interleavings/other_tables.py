"""The table of numbers: of attempts, and of the depths of the queues."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from django.db.models import F
from django.db.models.functions import Now

from django_pglock.models import Number
from django_pglock.store.count import queue_counts
from django_pglock.store.numbers import ATTEMPT_KINDS, KEPT, WRITE_DEPTHS, add_rescued, depths, prune_numbers
from django_pglock.store.statements import filled
from qa.interleavings.judge import Judge, law
from qa.interleavings.verbs import Results, verb
from qa.interleavings.worlds import World
from tests.sample import tasks

#: The age of the old rows is twice as much.
LONG = timedelta(days=180)


def other_tables(world: World) -> None:
    """The depths are out of date, and there are rows that are too old."""
    tasks.nothing.enqueue()
    add_rescued("default", [("default", "old", "READY")])
    Number.objects.filter(seconds=0).delete()
    Number.objects.update(started_at=F("started_at") - 2 * LONG)
    depths("default")
    Number.objects.filter(kind="READY").update(count=99)
    Number.objects.filter(kind="counted").update(total=0)


RESCUED = [("default", "first", "READY"), ("mail", "second", "FAILED")]


@verb("other_tables", is_workers=True)
def write_numbers(world: World, results: Results) -> None:
    add_rescued("default", RESCUED)
    results.counted.append(1)


@verb("other_tables", is_workers=True)
def write_numbers_backwards(world: World, results: Results) -> None:
    """As another worker that has counted the same functions in another order."""
    add_rescued("default", RESCUED[::-1])
    results.counted.append(1)


@verb("other_tables", is_workers=True)
def delete_old_numbers(world: World, results: Results) -> None:
    prune_numbers("default")


@verb("other_tables", is_workers=True)
def count_for_all(world: World, results: Results) -> None:
    depths("default")


@law("other_tables")
def whatever_is_counted_is_in_the_sums(judge: Judge) -> None:
    sums = {(seconds, *row): Counter() for seconds in KEPT for row in ((False, False), (True, False), (True, True))}
    for row in Number.objects.filter(started_at__gt=Now() - LONG, kind__in=ATTEMPT_KINDS):
        sums[row.seconds, bool(row.queue), bool(row.task_path)][row.kind] += row.count
    [counted, *others] = sums.values()
    assert all(each == counted for each in others), "the rows and their sums differ"
    written = len(judge.results.counted)
    assert judge.has_died or (counted["lost"], counted["failed"]) == (written, written), "counts were lost"


@law("other_tables")
def old_rows_are_deleted(judge: Judge) -> None:
    has_old = Number.objects.filter(seconds__gt=0, started_at__lt=Now() - LONG).exists()
    has_to_be_deleted = "delete_old_numbers" in {each.name for each in judge.verbs}
    assert has_old != has_to_be_deleted or judge.has_died


@law("other_tables")
def one_counts_for_all(judge: Judge) -> None:
    written = [run for run in judge.runs if filled(WRITE_DEPTHS) in run.statements]
    assert len(written) <= 1 or judge.has_died, "two have counted at the same time"
    if written and not judge.has_died:
        found = {each.queue: each.counts["READY"] for each in queue_counts("default")}
        assert found == dict(Number.objects.filter(kind="READY").values_list("queue", "count"))
