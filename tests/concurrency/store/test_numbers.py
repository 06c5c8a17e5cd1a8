"""Workers that add to the same rows of numbers, while others delete old ones, and that are asked for depths at once."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection, transaction

from django_pglock.models import Number, Task
from django_pglock.store import numbers
from django_pglock.store.numbers import KEPT, Counts, add_numbers, depths, prune_numbers, series
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

WORKERS, ROUNDS, FUNCTIONS = 4, 15, 40


def test_workers_that_write_the_same_rows_lose_nothing_and_never_deadlock(in_threads, monkeypatch):
    """Each worker has run the functions in a different order, and locks the rows that it writes until its commit."""
    monkeypatch.setattr("django_pglock.store.numbers.LONGEST_WAIT", "0")
    now = datetime.now(timezone.utc)
    minute = int(now.timestamp() // 60 * 60)

    def write(worker):
        for _ in range(ROUNDS):
            functions = range(FUNCTIONS) if worker % 2 else reversed(range(FUNCTIONS))
            counts = {(minute, "mail", f"app.task_{number}"): Counts(succeeded=1) for number in functions}
            add_numbers("default", counts)

    in_threads(write, WORKERS)
    [point, *_] = series("default", now, now + timedelta(minutes=1), 60)
    assert point.counts.succeeded == WORKERS * ROUNDS * FUNCTIONS
    rows = Number.objects.exclude(task_path="").values_list("count", flat=True)
    assert set(rows) == {WORKERS * ROUNDS}


def test_a_row_that_is_locked_does_not_delay_the_deletion_of_others(somebody):
    old = int(datetime.now(timezone.utc).timestamp() // 3600 * 3600 - 2 * KEPT[3600])
    add_numbers("default", {(old, "mail", "app.send"): Counts(succeeded=1)})
    somebody.connection.set_autocommit(False)
    somebody.ask("SELECT id FROM django_pglock_number WHERE seconds > 0 LIMIT 1 FOR UPDATE")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '10s'")
        assert prune_numbers("default") == 2 * 3 - 1
    somebody.connection.rollback()
    assert prune_numbers("default") == 1


def test_of_several_processes_that_ask_for_depths_one_counts(in_threads, monkeypatch):
    counted = []
    count = numbers.queue_counts
    monkeypatch.setattr(numbers, "queue_counts", lambda using: counted.append(1) or count(using))
    for _ in range(3):
        tasks.nothing.using(queue_name="mail").enqueue()
    found = in_threads(lambda _: [(each.queue, each.counts["READY"]) for each in depths("default")], 6)
    assert found == [[("mail", 3)]] * 6
    assert len(counted) == 1
    Task.objects.all().delete()
    Number.objects.filter(kind="counted").update(total=0)
    assert in_threads(lambda _: depths("default"), 6) == [[]] * 6
    assert len(counted) == 2


def test_a_count_that_began_while_another_process_waited_is_new_enough_for_it(somebody, eventually, in_threads):
    """The time that a statement has read before its wait is before the count for which it has waited."""
    depths("default")
    set_count = "UPDATE django_pglock_number SET total = {} WHERE kind = 'counted' RETURNING total"
    waiting = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted)"
    somebody.connection.set_autocommit(False)
    somebody.ask(set_count.format(0))

    def count_or_be_counted_before(number):
        if number == 0:
            return numbers.count_depths("default", 60.0)
        with connection.cursor() as cursor:
            eventually(lambda: cursor.execute(waiting).fetchone() == (True,))
        counted_at = somebody.ask(set_count.format("date_part('epoch', clock_timestamp())"))
        somebody.connection.commit()
        return counted_at

    _, counted_at = in_threads(count_or_be_counted_before, 2)
    assert Number.objects.get(kind="counted").total == counted_at
