"""Unique captured calls beside claims and beside each other."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from django.db import connection, connections, transaction

from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from tests.conftest import NEVER
from tests.sample.captured_tasks import note_price
from tests.sample.models import Effect, Product

pytestmark = pytest.mark.django_db(transaction=True)

#: How many sessions wait for a lock of another one.
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def value(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


def test_a_change_beside_the_claim_of_the_waiting_task_is_not_missed(capture, eventually):
    """The claim gets the row of the waiting task first. This task may not see the change, so another one is needed."""
    product = Product.objects.create(name="a")
    capture(note_price)
    Product.objects.update(price=1)
    with closing(dedicated_connection("default")) as worker, worker.cursor() as cursor:
        # The two steps of a claim, which are one statement of a worker.
        cursor.execute("BEGIN")
        cursor.execute("SELECT FROM django_pglock_task FOR NO KEY UPDATE SKIP LOCKED")

        def change():
            Product.objects.update(price=2)
            connections.close_all()

        writer = threading.Thread(target=change, daemon=True)
        writer.start()
        eventually(lambda: value(WAITING) == 1)
        cursor.execute("UPDATE django_pglock_task SET attempts = 1")
        cursor.execute("COMMIT")
    writer.join(NEVER)
    assert list(Task.objects.order_by("id").values_list("attempts", "kwargs")) == [
        (1, {"id": product.pk}),
        (0, {"id": product.pk}),
    ]


def test_the_last_price_of_each_row_is_seen(capture, worker, in_threads, eventually):
    """Four writers change rows in transactions, while a worker runs the captured tasks."""
    rows = Product.objects.bulk_create(Product(name="a") for _ in range(3))
    capture(note_price)
    worker()

    def write(number):
        for price in range(25):
            with transaction.atomic():
                Product.objects.filter(pk=rows[(number + price) % 3].pk).update(price=100 * number + price)
                value("SELECT pg_sleep(0.001)")

    in_threads(write, 4)
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists())
    for row in rows:
        row.refresh_from_db()
        assert Effect.objects.filter(name="price", number=row.price).exists()
