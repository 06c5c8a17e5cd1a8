"""The search table follows 17 tables, whatever changes them, also while workers are killed or down."""

from __future__ import annotations

import random

import pytest
from django.db import connection, transaction

from django_pglock.models import Task
from django_pglock.worker import Worker
from example_project.systems.handoff.scenario import WRONG_ENTRIES
from example_project.systems.handoff.search import PARTS, Entry, Order
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)


def value(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


def run(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


def change_everything():
    """Change all tables in the ways that there are."""
    orders = Order.objects.bulk_create(Order(text=f"order {number}") for number in range(30))
    first = orders[0].pk
    for part in PARTS:
        table = part._meta.db_table
        part.objects.create(order=orders[0], text=f"one {table}")
        part.objects.bulk_create(part(order=order, text=f"many {table}") for order in orders)
        with connection.cursor() as cursor, cursor.copy(f'COPY "{table}" (order_id, text) FROM STDIN') as lines:
            lines.write(f"{first + 1}\tcopied {table}\n")
        run(f"UPDATE \"{table}\" SET text = 'changed {table}' WHERE (order_id - {first}) % 3 = 0")
        part.objects.filter(order_id=first + 4).update(order=first + 5)
        run(f'DELETE FROM "{table}" WHERE (order_id - {first}) % 7 = 0')
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            part.objects.update(text="never")
            raise ZeroDivisionError
    Order.objects.filter(pk__gt=first + 25).delete()


def test_nothing_is_missed_while_no_worker_runs():
    change_everything()
    assert Task.objects.count() < 150
    assert not Entry.objects.exists()
    Worker(drain=True).run()
    assert value(WRONG_ENTRIES) == 0
    assert Entry.objects.count() == Order.objects.count() == 26
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    found = Entry.objects.filter(text__contains="copied handoff_warranty")
    assert found.count() == 1


def write(seed, count):
    """Change rows at random, in transactions of which some are rolled back."""
    chance = random.Random(seed)
    ids = list(Order.objects.values_list("pk", flat=True))
    for number in range(count):
        part = chance.choice(PARTS)
        with transaction.atomic():
            part.objects.create(order_id=chance.choice(ids), text=f"text {seed} {number}")
            # One statement that locks rows of others: two could deadlock.
            changes = chance.choice(({"text": f"changed {seed} {number}"}, {"order": chance.choice(ids)}))
            part.objects.filter(order_id=chance.choice(ids)).update(**changes)
            transaction.set_rollback(chance.random() < 0.1)


def test_the_entries_follow_while_workers_are_killed(fleet, process, eventually):
    Order.objects.bulk_create(Order(text=f"order {number}") for number in range(20))
    workers = [fleet.start("runlockworker", "--threads", "2", "--no-reload") for _ in range(2)]
    writers = [process(write, seed, 40) for seed in range(2)]
    eventually(lambda: Entry.objects.count() > 5)
    workers[0].kill()
    assert [writer.wait(NEVER) for writer in writers] == [0, 0]
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why=fleet.output())
    assert value(WRONG_ENTRIES) == 0
