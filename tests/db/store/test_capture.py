"""The tasks of a captured statement: which changed rows count, and the contents of the rows of tasks."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, models, transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.test.utils import isolate_apps

from django_pglock import Unique
from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from tests.sample import captured_tasks as tasks
from tests.sample.models import Effect, Product, Shelf

pytestmark = pytest.mark.django_db


def run(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)


def products(count, **fields):
    return Product.objects.bulk_create(Product(name=f"product {number}", **fields) for number in range(count))


def captured():
    """Return the arguments of all tasks, in order."""
    return [task.kwargs for task in Task.objects.order_by("id")]


def forget():
    Task.objects.all().delete()


def test_each_statement_of_any_client_is_captured(capture):
    capture(tasks.note)
    first = Product.objects.create(name="a").pk
    run("INSERT INTO sample_product (name, price) SELECT 'b', 0 FROM generate_series(1, 2)")
    with connection.cursor() as cursor, cursor.copy("COPY sample_product (name, price) FROM STDIN") as lines:
        lines.write("c\t5\n")
    Product.objects.filter(name="b").update(price=1)
    run(
        "INSERT INTO sample_product (id, name, price) VALUES (%s, 'a', 1), (%s, 'd', 1)"
        " ON CONFLICT (id) DO UPDATE SET price = 2",
        *(first, first + 10),
    )
    Product.objects.filter(name="b").delete()
    b = [first + 1, first + 2]
    assert captured() == [
        {"ids": [first], "operation": "insert"},
        {"ids": b, "operation": "insert"},
        {"ids": [first + 3], "operation": "insert"},
        {"ids": b, "operation": "update"},
        {"ids": [first], "operation": "update"},
        {"ids": [first + 10], "operation": "insert"},
        {"ids": b, "operation": "delete"},
    ]


def test_a_statement_that_changes_no_row_enqueues_nothing(capture):
    capture(tasks.reindex)
    Product.objects.update(price=1)
    Product.objects.all().delete()
    assert captured() == []


def test_a_capture_of_many_rows_enqueues_a_task_for_each_thousand(capture):
    capture(tasks.reindex)
    run("INSERT INTO sample_product (name, price) SELECT 'a', 0 FROM generate_series(1, 100000)")
    calls = captured()
    assert [len(call["ids"]) for call in calls] == [1000] * 100
    assert [id_ for call in calls for id_ in call["ids"]] == sorted(Product.objects.values_list("pk", flat=True))


def test_the_size_of_a_task_can_be_chosen(capture):
    capture(tasks.reindex, batch_size=2)
    products(5)
    assert [len(call["ids"]) for call in captured()] == [2, 2, 1]


def test_a_function_without_ids_is_called_once_for_a_statement(capture):
    capture(tasks.refresh)
    products(5)
    Product.objects.filter(price=-1).delete()
    assert captured() == [{}]


def test_a_rolled_back_change_leaves_nothing(capture):
    capture(tasks.note)
    with transaction.atomic():
        [kept] = products(1)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            products(1)
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        Product.objects.all().delete()
        raise ZeroDivisionError
    assert captured() == [{"ids": [kept.pk], "operation": "insert"}]


# Which rows count


def test_an_update_counts_if_one_of_the_fields_changes(capture):
    """NULL, and types without an operator "=", are compared like other values."""
    first, second, _third = products(3, wanted={"a": 1})
    capture(tasks.reindex, on="update", fields=["price", "wanted"])
    Product.objects.update(name="another", price=F("price"))
    assert captured() == []
    Product.objects.update(price=-F("pk") * (F("pk") - second.pk) * 0)
    assert captured() == []
    Product.objects.filter(pk__lte=second.pk).update(price=F("pk") - second.pk)
    Product.objects.filter(pk=second.pk).update(wanted=None)
    Product.objects.filter(pk=second.pk).update(wanted={"a": 2})
    assert [call["ids"] for call in captured()] == [[first.pk], [second.pk], [second.pk]]


def test_a_change_of_the_primary_key_captures_both_keys(capture):
    [product] = products(1)
    capture(tasks.reindex, on="update", fields=["price"])
    run("UPDATE sample_product SET id = id + 50")
    assert [call["ids"] for call in captured()] == [[product.pk, product.pk + 50]]


def test_an_update_reads_the_old_rows_only_where_it_needs_them(capture):
    """PostgreSQL stores all rows of each transition table. This is most of the cost of a capture of UPDATE."""
    options = [{}, {"ids": "id"}, {"fields": ["price"]}, {"when": Q(price=1)}, {"ids": "shelf"}]
    read = []
    for each in options:
        capture(tasks.reindex, on="update", **each)
        read.append(tables_of_update())
    assert read == [("new_rows",)] * 2 + [("old_rows", "new_rows")] * 3


def tables_of_update():
    """Return the transition tables of the statement trigger of UPDATE."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tgoldtable, tgnewtable FROM pg_trigger"
            " WHERE tgrelid = 'sample_product'::regclass AND tgname LIKE 'pgtrigger_capture_update_%'"
        )
        [names] = cursor.fetchall()
    return tuple(filter(None, names))


def test_a_changed_primary_key_is_captured_with_its_old_and_new_value(capture):
    """The table of old rows is not read: a trigger for each row gets the rows whose key has changed."""
    first, second = (each.pk for each in products(2))
    capture(tasks.note, on="update")
    run(f"UPDATE sample_product SET id = CASE id WHEN {second} THEN id + 100 ELSE id END, price = 5")
    assert [call["ids"] for call in captured()] == [[second], [first, second + 100]]
    forget()
    run("UPDATE sample_product SET id = id + 1000")
    ids = [call["ids"] for call in captured()]
    assert sorted(ids[:2]) == [[first], [second + 100]]
    assert ids[2:] == [[first + 1000, second + 1100]]
    assert {call["operation"] for call in captured()} == {"update"}


def test_an_upsert_that_changes_the_primary_key_captures_both_values(capture):
    """A row whose key is set to the same value is captured once."""
    [product] = products(1)
    capture(tasks.reindex, on="update")
    upsert = "INSERT INTO sample_product (id, name, price) VALUES (%s, 'a', 0) ON CONFLICT (id) DO UPDATE SET"
    run(f"{upsert} id = EXCLUDED.id, price = 1", product.pk)
    run(f"{upsert} id = EXCLUDED.id + 10", product.pk)
    assert [call["ids"] for call in captured()] == [[product.pk], [product.pk], [product.pk + 10]]


def test_a_changed_primary_key_with_a_unique_key_and_without_ids(capture):
    first, second = (each.pk for each in products(2))
    capture(tasks.ship, on="update")
    run("UPDATE sample_product SET id = id + 10")
    ids = [first, second, first + 10, second + 10]
    assert captured() == [{"id": id_} for id_ in ids]
    assert set(Task.objects.values_list("lock_key", "unique_key")) == {
        (f"product:{id_}", f"{tasks.ship.module_path} {id_}") for id_ in ids
    }
    forget()
    capture(tasks.refresh, on="update")
    run("UPDATE sample_product SET id = id + 100")
    assert captured() == [{}]


@isolate_apps("tests.sample")
def test_a_primary_key_changed_by_on_update_cascade_captures_both_values(capture):
    """ON UPDATE CASCADE in the database. Django makes no such foreign keys, other programs do."""

    class Detail(models.Model):
        product = models.OneToOneField(Product, models.CASCADE, primary_key=True)

        class Meta:
            app_label = "sample"

    first, second = products(2)
    key = "bigint PRIMARY KEY REFERENCES sample_product ON UPDATE CASCADE"
    run(f"CREATE TABLE sample_detail (product_id {key}, text text)")
    run("INSERT INTO sample_detail SELECT id, 'a' FROM sample_product")
    capture(tasks.reindex, model=Detail, on="update")
    run("UPDATE sample_product SET id = id + 1000")
    ids = [call["ids"] for call in captured()]
    assert sorted(ids[:-1]) == [[first.pk], [second.pk]]
    assert ids[-1] == [first.pk + 1000, second.pk + 1000]


def test_a_primary_key_changed_by_another_trigger_needs_a_capture_of_that_field(capture):
    """PostgreSQL does not count such a column as updated, so the trigger of the old key does not run."""
    [product] = products(1)
    body = "BEGIN NEW.id := NEW.id + 10; RETURN NEW; END"
    run(f"CREATE FUNCTION move() RETURNS trigger LANGUAGE plpgsql AS '{body}'")
    run("CREATE TRIGGER move BEFORE UPDATE ON sample_product FOR EACH ROW EXECUTE FUNCTION move()")
    capture(tasks.reindex, on="update")
    Product.objects.update(price=1)
    capture(tasks.reindex, on="update", fields=["id"])
    Product.objects.update(price=2)
    assert [call["ids"] for call in captured()] == [[product.pk + 10], [product.pk + 10, product.pk + 20]]


def test_a_row_counts_if_it_matches_before_or_after(capture):
    """A row that no longer matches must be removed from data derived from it, such as a search index."""
    capture(tasks.note, when=Q(price__gt=5) & ~Q(name="%s {id} 'quoted' \\"))
    products(1)
    [row] = products(1, price=6)
    Product.objects.create(name="%s {id} 'quoted' \\", price=9)
    Product.objects.filter(pk=row.pk).update(price=7)
    Product.objects.filter(pk=row.pk).update(price=0)
    Product.objects.filter(pk=row.pk).update(price=1)
    Product.objects.all().delete()
    operations = [call["operation"] for call in captured()]
    assert operations == ["insert", "update", "update"]
    assert {id_ for call in captured() for id_ in call["ids"]} == {row.pk}


def test_the_ids_may_be_those_of_another_table_each_once(capture):
    """A product that moves captures both shelves, also if no other field changes."""
    one, other = Shelf.objects.create(name="one"), Shelf.objects.create(name="other")
    capture(tasks.note, ids="shelf", fields=["name"])
    products(3, shelf=one)
    products(1)
    Product.objects.filter(shelf=one).update(price=5)
    Product.objects.filter(shelf=one).update(shelf=other)
    Product.objects.filter(shelf=other).delete()
    assert captured() == [
        {"ids": [one.pk], "operation": "insert"},
        {"ids": [one.pk, other.pk], "operation": "update"},
        {"ids": [other.pk], "operation": "delete"},
    ]


@pytest.mark.django_db(transaction=True)
def test_truncate_is_captured_if_it_is_asked_for(capture):
    capture(tasks.note)
    products(1)
    forget()
    run("TRUNCATE sample_product")
    assert captured() == []
    capture(tasks.note, on=["truncate"])
    run("TRUNCATE sample_product")
    assert captured() == [{"ids": [], "operation": "truncate"}]


@pytest.mark.parametrize("options", [{}, {"fields": ["price"]}], ids=["new rows", "old and new rows"])
def test_rows_of_partitions_are_captured_by_their_table(capture, options):
    """A row that moves to another partition counts as updated."""
    run("ALTER TABLE sample_product RENAME TO whole")
    run("CREATE TABLE sample_product (LIKE whole INCLUDING DEFAULTS) PARTITION BY RANGE (price)")
    for first, end in ((0, 10), (10, 20)):
        run(f"CREATE TABLE part{first} PARTITION OF sample_product FOR VALUES FROM ({first}) TO ({end})")
    capture(tasks.note, **options)
    run("INSERT INTO sample_product (id, name, price) VALUES (1, 'a', 5), (2, 'b', 15)")
    run("UPDATE sample_product SET price = price + 8 WHERE id = 1")
    run("INSERT INTO part0 (id, name, price) VALUES (3, 'c', 5)")
    run("DELETE FROM sample_product")
    assert [(call["operation"], call["ids"]) for call in captured()] == [
        ("insert", [1, 2]),
        ("update", [1]),
        ("delete", [1, 2, 3]),
    ]


# What the row of the task contains

#: Each with the arguments with which a call enqueues what the capture of a new product does.
SAME = [
    (tasks.follow, ("ids", "operation", "model", "schema")),
    (tasks.publish, ("id", "operation", "schema")),
    (tasks.ship, ("id",)),
    (tasks.publish_in_order, ("id", "model", "schema")),
    (tasks.announce, ("model",)),
    (tasks.digest, ("ids", "operation", "model", "schema")),
    (tasks.digest_each, ("id", "operation", "model", "schema")),
    (tasks.reindex.using(queue_name="search", run_after=timedelta(hours=1), timeout=5, fair="some"), ("ids",)),
]
#: What differs between two calls. A captured one with a lock key is promoted before it is admitted.
OWN = {"id", "enqueued_at", "run_after", "status"}


@pytest.mark.parametrize(("task", "names"), SAME, ids=lambda value: getattr(value, "name", ""))
def test_a_captured_call_is_the_row_that_enqueue_writes(capture, task, names):
    capture(task)
    product = Product.objects.create(name="a")
    values = {"id": product.pk, "ids": [product.pk], "operation": "insert", "model": "sample.product"}
    values["schema"] = "public"
    kwargs = {name: values[name] for name in names}
    [by_trigger] = Task.objects.values()
    forget()
    task.enqueue(**kwargs)
    [by_call] = Task.objects.values()
    assert {name: by_trigger[name] for name in by_trigger.keys() - OWN} == {
        name: by_call[name] for name in by_call.keys() - OWN
    }
    is_keyed = by_call["lock_key"] is not None
    assert by_trigger["status"] == ("SCHEDULED" if is_keyed else by_call["status"])
    if by_call["run_after"] or is_keyed:
        due = by_call["run_after"] or by_call["enqueued_at"]
        assert by_trigger["run_after"] - by_trigger["enqueued_at"] == due - by_call["enqueued_at"]


# Unique calls


def test_a_unique_capture_enqueues_one_task_for_several_changes_of_a_row(capture):
    capture(tasks.note_price)
    first, second = products(2)
    for price in range(5):
        Product.objects.filter(pk=first.pk).update(price=price)
    assert sorted(call["id"] for call in captured()) == [first.pk, second.pk]


@pytest.mark.parametrize("length", [100, 101])
def test_a_captured_call_has_the_unique_key_of_enqueue_at_any_length_of_its_arguments(capture, length):
    capture(tasks.publish_once, ids="name")
    Product.objects.create(name="x" * (length - len('["","sample.product","insert","public"]')))
    assert tasks.publish_once.enqueue(**captured()[0]).id == str(Task.objects.get().pk)


@pytest.mark.django_db(transaction=True)
def test_a_waiting_task_reused_by_a_captured_change_is_not_claimed_before_the_commit(capture, claim):
    """Otherwise the task would run before the change is visible, and no later task would process the change."""
    capture(tasks.note_price)
    [product] = products(1)
    [waiting] = Task.objects.all()
    with transaction.atomic():
        Product.objects.update(price=5)
        assert in_other_session("SELECT id FROM django_pglock_task FOR NO KEY UPDATE SKIP LOCKED") == []
        # Other transactions that reuse the task do not wait for each other.
        assert in_other_session("SELECT id FROM django_pglock_task FOR SHARE NOWAIT") == [(waiting.pk,)]
    assert [each.id for each in claim(5)] == [waiting.pk]
    Product.objects.update(price=6)
    assert captured() == [{"id": product.pk}] * 2


def in_other_session(statement):
    session = dedicated_connection("default")
    try:
        with session.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()
    finally:
        session.close()


# Workers


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task", [tasks.note, tasks.note_in_order, tasks.note_price], ids=lambda task: task.name)
def test_a_captured_change_wakes_a_sleeping_worker_at_the_commit(capture, worker, eventually, settings, task):
    """Also with a lock key. Without a notification the worker would poll ten minutes later."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0, "HEARTBEAT_INTERVAL": 600.0}
    capture(task)
    running = worker()
    eventually(lambda: running.sleep.since)
    products(1)
    eventually(Effect.objects.exists)


@pytest.mark.parametrize("unique", [Unique("{id}", while_="unfinished"), Unique("{id}", period=timedelta(hours=1))])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_change_is_not_missed_if_a_task_of_another_scope_has_its_key(capture, unique, is_running):
    """The task is of an earlier deploy, or of ``using()``. It may have read the row, so another task is added."""
    capture(tasks.ship)
    first, second = products(2)
    forget()
    tasks.ship.using(unique=unique).enqueue(id=first.pk)
    if is_running:
        Task.objects.update(status="RUNNING", attempts=1, worker=uuid4(), started_at=Now(), last_attempted_at=Now())
    run("SET LOCAL statement_timeout = '60s'")
    Product.objects.update(price=F("price") + 1)
    Product.objects.filter(pk=first.pk).update(price=F("price") + 1)
    new = Task.objects.filter(status="SCHEDULED").order_by("kwargs__id")
    found = [(task.kwargs["id"], task.unique_key is None) for task in new]
    assert found == [(first.pk, True), (first.pk, True), (second.pk, False)]
