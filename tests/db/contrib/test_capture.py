"""Captured changes of a table: which count, what the function gets, in which order, and what migrations do."""

from __future__ import annotations

import random

import pytest
from django.apps import apps
from django.core.management.commands.makemigrations import Command
from django.db import connection, models, transaction
from django.db.migrations import AddConstraint, AlterField, RemoveConstraint
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.db.models import F
from django.test.utils import isolate_apps
from psycopg import errors

from django_pglock.contrib import capture as contrib
from django_pglock.contrib.capture import Capture, check_captures
from django_pglock.errors import TaskOptionError
from django_pglock.models import Attempt, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.testing import run_tasks
from tests.sample import captured_tasks as tasks
from tests.sample.models import Effect, Product, Shelf
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db


@pytest.fixture
def capture(monkeypatch):
    """Declare captures, and install their triggers without a migration."""
    installed = []

    def install(task, *, model=Product, name="capture", **options):
        declared = Capture(task, name=name, **options)
        monkeypatch.setattr(model._meta, "constraints", [*model._meta.constraints, declared])
        with connection.schema_editor(atomic=False) as editor:
            editor.add_constraint(model, declared)
        installed.append((model, declared))
        return declared

    yield install
    with connection.schema_editor(atomic=False) as editor:
        for model, declared in installed:
            editor.remove_constraint(model, declared)


def run(statement, *values):
    execute_sql(statement, values or None)


def products(count, **fields):
    return Product.objects.bulk_create(Product(name=f"product {number}", **fields) for number in range(count))


def rows():
    """Return what the triggers have inserted, in order."""
    return [task.kwargs for task in Task.objects.filter(task_path=contrib.captured.module_path).order_by("id")]


def captured():
    """Return the operation and the ids of each row that a trigger has inserted."""
    return [(row["operation"], row["ids"]) for row in rows()]


def calls():
    """Do what a worker does with the rows of the triggers. Return the arguments of the calls of functions, in order."""
    contrib.captured.func(rows())
    return [task.kwargs for task in Task.objects.exclude(task_path=contrib.captured.module_path).order_by("id")]


# Which rows count


def test_each_statement_of_any_client_is_captured(capture):
    capture(tasks.reindex)
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
        ("insert", [first]),
        ("insert", b),
        ("insert", [first + 3]),
        ("update", b),
        ("update", [first]),
        ("insert", [first + 10]),
        ("delete", b),
    ]


def test_a_statement_that_changes_no_row_enqueues_nothing(capture):
    capture(tasks.reindex)
    Product.objects.update(price=1)
    Product.objects.all().delete()
    assert rows() == []


def test_a_capture_of_many_rows_enqueues_a_task_for_each_thousand(capture):
    capture(tasks.reindex)
    run("INSERT INTO sample_product (name, price) SELECT 'a', 0 FROM generate_series(1, 100000)")
    assert [len(ids) for _, ids in captured()] == [1000] * 100
    assert [id_ for _, ids in captured() for id_ in ids] == sorted(Product.objects.values_list("pk", flat=True))


def test_a_rolled_back_change_leaves_nothing(capture):
    capture(tasks.reindex)
    with transaction.atomic():
        [kept] = products(1)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            products(1)
            raise ZeroDivisionError
    assert captured() == [("insert", [kept.pk])]


def test_an_update_counts_if_one_of_the_fields_changes(capture):
    """NULL, and types without an operator "=", are compared like other values."""
    first, second, _third = products(3, wanted={"a": 1})
    capture(tasks.reindex, on="update", fields=["price", "wanted"])
    Product.objects.update(name="another", price=F("price"))
    assert rows() == []
    Product.objects.filter(pk__lte=second.pk).update(price=F("pk") - second.pk)
    Product.objects.filter(pk=second.pk).update(wanted=None)
    Product.objects.filter(pk=second.pk).update(wanted={"a": 2})
    assert captured() == [("update", [first.pk]), ("update", [second.pk]), ("update", [second.pk])]


@pytest.mark.parametrize("options", [{}, {"fields": ["price"]}], ids=["any field", "one field"])
def test_a_changed_primary_key_is_captured_with_its_old_and_new_value(capture, options):
    [product] = products(1)
    capture(tasks.reindex, on="update", **options)
    run("UPDATE sample_product SET id = id + 50")
    assert captured() == [("update", [product.pk, product.pk + 50])]


def test_a_primary_key_changed_by_another_trigger_is_captured_with_both_values(capture):
    [product] = products(1)
    run(
        "CREATE FUNCTION move() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.id := NEW.id + 10; RETURN NEW; END';"
        "CREATE TRIGGER move BEFORE UPDATE ON sample_product FOR EACH ROW EXECUTE FUNCTION move()"
    )
    capture(tasks.reindex)
    Product.objects.update(price=1)
    assert captured() == [("update", [product.pk, product.pk + 10])]


@isolate_apps("tests.sample")
def test_a_primary_key_changed_by_on_update_cascade_is_captured_with_both_values(capture):
    """ON UPDATE CASCADE in the database. Django makes no such foreign keys, other programs do."""

    class Detail(models.Model):
        product = models.OneToOneField(Product, models.CASCADE, primary_key=True)

        class Meta:
            app_label = "sample"

    [product] = products(1)
    run("CREATE TABLE sample_detail (product_id bigint PRIMARY KEY REFERENCES sample_product ON UPDATE CASCADE)")
    run("INSERT INTO sample_detail SELECT id FROM sample_product")
    capture(tasks.reindex, model=Detail, on="update")
    run("UPDATE sample_product SET id = id + 1000")
    assert captured() == [("update", [product.pk, product.pk + 1000])]


def test_the_ids_may_be_those_of_another_table_each_once(capture):
    """A product that moves captures both shelves, also if no other field changes."""
    one, other = Shelf.objects.create(name="one"), Shelf.objects.create(name="other")
    capture(tasks.reindex, ids="shelf", fields=["name"])
    products(3, shelf=one)
    products(1)
    Product.objects.filter(shelf=one).update(price=5)
    Product.objects.filter(shelf=one).update(shelf=other)
    run(
        "UPDATE sample_product SET name = CASE name WHEN 'product 1' THEN 'product 2' ELSE 'product 1' END"
        " WHERE name <> 'product 0'"
    )
    Product.objects.filter(shelf=other).delete()
    assert captured() == [
        ("insert", [one.pk]),
        ("update", [one.pk, other.pk]),
        ("update", [other.pk]),  # two rows have exchanged their names
        ("delete", [other.pk]),
    ]


@pytest.mark.parametrize("options", [{}, {"fields": ["price"]}], ids=["any field", "one field"])
def test_rows_of_partitions_are_captured_by_their_table(capture, options):
    """A row that moves to another partition counts as updated."""
    run("ALTER TABLE sample_product RENAME TO whole")
    run("CREATE TABLE sample_product (LIKE whole INCLUDING DEFAULTS) PARTITION BY RANGE (price)")
    for first, end in ((0, 10), (10, 20)):
        run(f"CREATE TABLE part{first} PARTITION OF sample_product FOR VALUES FROM ({first}) TO ({end})")
    capture(tasks.reindex, **options)
    run("INSERT INTO sample_product (id, name, price) VALUES (1, 'a', 5), (2, 'b', 15)")
    run("UPDATE sample_product SET price = price + 8 WHERE id = 1")
    run("INSERT INTO part0 (id, name, price) VALUES (3, 'c', 5)")
    run("DELETE FROM sample_product")
    assert captured() == [("insert", [1, 2]), ("update", [1]), ("delete", [1, 2, 3])]


# What the function gets

#: Each with the arguments that it gets.
SAME = [
    (tasks.follow, ("ids", "operation", "model", "schema")),
    (tasks.rebuild, ("id",)),
    (tasks.publish_in_order, ("id", "model", "schema")),
    (tasks.announce, ("model",)),
    (tasks.refresh, ()),
    (tasks.digest_each, ("id", "operation", "model", "schema")),
    (tasks.take_everything, ("ids", "operation", "model", "schema")),
    (tasks.reindex.using(queue_name="search", fair="some"), ("ids",)),
]


@pytest.mark.parametrize(("task", "names"), SAME, ids=lambda value: getattr(value, "name", ""))
def test_a_captured_call_is_the_row_that_enqueue_writes(capture, task, names):
    """All options apply, and need no migration."""
    capture(task)
    product = Product.objects.create(name="a")
    values = {"id": product.pk, "ids": [product.pk], "operation": "insert", "model": "sample.product"}
    values["schema"] = "public"
    [kwargs] = calls()
    assert kwargs == {name: values[name] for name in names}
    [by_capture] = Task.objects.filter(task_path=task.module_path).values()
    Task.objects.filter(task_path=task.module_path).delete()
    task.enqueue(**kwargs)
    [by_call] = Task.objects.filter(task_path=task.module_path).values()
    differing = {name for name in by_call if by_call[name] != by_capture[name]}
    # A test's transaction has no commit after which a call at a key could be admitted.
    assert differing <= {"id", "enqueued_at", "status"}


def test_a_unique_function_is_enqueued_once_for_several_changes_of_a_row(capture):
    capture(tasks.rebuild)
    first, second = products(2)
    for price in range(5):
        Product.objects.filter(pk=first.pk).update(price=price)
    assert calls() == [{"id": first.pk}, {"id": second.pk}]


def test_several_functions_may_capture_a_table(capture):
    capture(tasks.reindex, name="first")
    capture(tasks.follow, name="second", on="insert", ids="name")
    products(1)
    reindexed, followed = sorted(calls(), key=len)
    assert reindexed == {"ids": [Product.objects.get().pk]}
    assert followed["ids"] == ["product 0"]


# Order, and how often


@pytest.mark.django_db(transaction=True)
def test_the_changes_of_each_row_keep_their_order(capture, worker, in_threads, eventually):
    """Four writers insert, update and delete a few rows, in transactions, while two workers run the functions."""
    capture(tasks.note)
    expected = {number: [] for number in range(1, 5)}
    for _ in range(2):
        worker()

    def write(seed):
        chance = random.Random(seed)
        for _ in range(15):
            with transaction.atomic():
                number = chance.choice([*expected])
                execute_sql("SELECT pg_advisory_xact_lock(%s)", [number])
                if not Product.objects.filter(pk=number).exists():
                    Product.objects.create(pk=number, name="a")
                    said = "insert"
                elif chance.random() < 0.3:
                    Product.objects.filter(pk=number).delete()
                    said = "delete"
                else:
                    Product.objects.filter(pk=number).update(price=F("price") + 1)
                    said = "update"
                expected[number].append(said)

    in_threads(write, 4)
    eventually(lambda: not Task.objects.filter(finished_at=None).exists())
    for number, operations in expected.items():
        done = Effect.objects.filter(number=number).order_by("id").values_list("name", flat=True)
        assert list(done) == operations


@pytest.mark.django_db(transaction=True)
def test_a_call_that_fails_enqueues_nothing_and_keeps_its_place(capture, monkeypatch):
    """As on a worker of an earlier deploy, whose code does not know the capture."""
    capture(tasks.note)
    [product] = products(1)
    with monkeypatch.context() as patch:
        patch.setattr(Product._meta, "constraints", [])
        run_tasks(until="due")
    Product.objects.update(price=1)
    assert not Task.objects.filter(task_path=tasks.note.module_path).exists()
    assert "declares no Capture 'capture'" in Attempt.objects.get().traceback
    Task.objects.filter(attempts=1).run_now()
    run_tasks()
    done = Effect.objects.order_by("id").values_list("name", "number")
    assert list(done) == [("insert", product.pk), ("update", product.pk)]


@pytest.mark.django_db(transaction=True)
def test_a_captured_change_wakes_a_sleeping_worker_at_the_commit(capture, worker, eventually, settings):
    """Without a notification the worker would poll ten minutes later."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0, "HEARTBEAT_INTERVAL": 600.0}
    capture(tasks.note)
    running = worker()
    eventually(lambda: running.feeder.asks)
    products(1)
    eventually(Effect.objects.exists)


# Declarations and checks


@isolate_apps("tests.sample")
def test_tables_of_all_children_of_an_abstract_model_are_captured():
    class Searched(models.Model):
        class Meta:
            app_label = "sample"
            abstract = True
            constraints = [Capture(tasks.reindex.using(priority=5), name="%(class)s_changes")]

    class Book(Searched):
        pass

    class Film(Searched):
        class Meta(Searched.Meta):
            constraints = []

    [declared] = Book._meta.constraints
    assert (declared.name, declared.task.priority) == ("book_changes", 5)
    assert Film._meta.constraints == []


@isolate_apps("tests.sample")
def test_tables_of_other_packages_are_captured_by_a_proxy(capture, monkeypatch):
    class Changed(Shelf):
        class Meta:
            app_label = "sample"
            proxy = True

    declared = capture(tasks.follow, model=Changed, fields=["name"])
    monkeypatch.setattr(contrib, "declared", lambda: [(Changed, declared)])
    Shelf.objects.create(name="a")
    [call] = calls()
    assert call["model"] == "sample.shelf"


WRONG = [({"on": ()}, "on is"), ({"on": "select"}, "on is 'select'")]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_an_invalid_option_of_a_capture_is_refused_at_definition(options, message):
    with pytest.raises(TaskOptionError, match=message):
        Capture(tasks.reindex, name="capture", **options)


#: Each with a text that the message must contain.
IMPOSSIBLE = [
    ("sample.nothing", {}, "No module named 'sample'"),
    ("tests.sample.models.Product", {}, "is not a task; decorate"),
    (tasks.needs_more, {}, "missing a required argument: 'price'"),
    (tasks.has_both, {}, "missing a required argument: 'ids'"),
    (tasks.locked_by_ids, {}, "A list cannot be part"),
    (tasks.unique_while_unfinished, {}, "to be unique only while it waits"),
    (tasks.raising, {}, "to be unique only while it waits"),
    (tasks.reindex, {"fields": ["colour"]}, "no field named 'colour'"),
    (tasks.reindex, {"name": "Capture 1"}, "name is 'Capture 1'"),
]


@pytest.mark.parametrize(("task", "options", "message"), IMPOSSIBLE)
def test_a_system_check_reports_what_a_capture_cannot_do(task, options, message, monkeypatch):
    monkeypatch.setattr(Product._meta, "constraints", [Capture(task, **{"name": "capture", **options})])
    [problem] = check_captures()
    assert (problem.id, problem.obj) == ("django_pglock.E008", Product)
    assert message in problem.msg


@isolate_apps("tests.sample")
def test_a_field_of_the_parent_is_in_another_table(monkeypatch):
    class Novel(Shelf):
        class Meta:
            app_label = "sample"
            constraints = [Capture(tasks.reindex, name="novel", fields=["name"])]

    monkeypatch.setattr(contrib, "declared", lambda: [(Novel, Novel._meta.constraints[0])])
    [problem] = check_captures()
    assert "name is not a column of the table sample_novel" in problem.msg


def test_a_check_reports_a_table_in_a_database_without_tasks(monkeypatch, settings):
    monkeypatch.setattr(Product._meta, "constraints", [Capture(tasks.reindex, name="capture")])
    assert check_captures() == []
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"database": "elsewhere"}}}
    [problem] = [each for each in check_captures() if each.obj is Product]
    assert problem.id == "django_pglock.E008"
    assert "in 'default', the database of the model" in problem.msg


# Migrations


def state_of(*captures):
    """Return the state of a project whose Shelf has these captures."""
    state = ProjectState.from_apps(apps)
    state.models["sample", "shelf"] = ModelState.from_model(Shelf)
    state.models["sample", "shelf"].options["constraints"] = list(captures)
    return state


def migrated(before, after):
    """Return the operations that makemigrations writes, as the file would contain them."""
    changes = Command.autodetector(before, after)._detect_changes(convert_apps={"sample"})
    if not changes.get("sample"):
        return []
    namespace = {}
    exec(MigrationWriter(changes["sample"][0]).as_string(), namespace)
    return namespace["Migration"].operations


def applied(operations, before):
    """Apply operations to the database; return the state after them."""
    state = before.clone()
    for operation in operations:
        old = state.clone()
        operation.state_forwards("sample", state)
        with connection.schema_editor() as editor:
            operation.database_forwards("sample", editor, old, state)
    return state


def in_database():
    """Return the names of the captures' triggers and functions in the database."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tgname FROM pg_trigger WHERE tgrelid = 'sample_shelf'::regclass AND NOT tgisinternal")
        triggers = sorted(name for (name,) in cursor.fetchall())
        cursor.execute("SELECT proname FROM pg_proc WHERE proname LIKE 'capture%%'")
        assert sorted(name for (name,) in cursor.fetchall()) == triggers
    return triggers


def test_migrations_make_change_and_drop_the_triggers():
    capture = Capture(tasks.reindex, name="capture")
    operations = migrated(state_of(), state_of(capture))
    assert [type(each) for each in operations] == [AddConstraint]
    state = applied(operations, state_of())
    assert in_database() == ["capture_delete", "capture_insert", "capture_update"]
    assert migrated(state, state_of(Capture(tasks.follow.using(priority=5), name="capture"))) == []

    other = Capture(tasks.reindex, name="capture", on=("insert", "update"), fields=["name"])
    operations = migrated(state, state_of(other))
    assert [type(each) for each in operations] == [RemoveConstraint, AddConstraint]
    state = applied(operations, state)
    assert in_database() == ["capture_insert", "capture_update"]
    Shelf.objects.create(name="a")
    assert len(rows()) == 1

    applied(migrated(state, state_of()), state)
    assert in_database() == []
    Shelf.objects.create(name="b")
    assert len(rows()) == 1


def test_the_type_of_a_captured_primary_key_can_be_altered_and_the_way_back_drops_the_triggers():
    operations = migrated(state_of(), state_of(Capture(tasks.reindex, name="capture", fields=["name"])))
    state = applied(operations, state_of())
    applied([AlterField("Shelf", "id", models.AutoField(primary_key=True))], state)
    assert in_database() == ["capture_delete", "capture_insert", "capture_update"]
    with connection.schema_editor() as editor:
        operations[0].database_backwards("sample", editor, state, state_of())
    assert in_database() == []


# Rights and schemas


@pytest.fixture
def clerk(transactional_db):
    """Run SQL in a session of a role that may write to the captured table and nothing else."""
    execute_sql(
        "CREATE ROLE clerk; GRANT SELECT, INSERT, UPDATE, DELETE ON sample_product TO clerk;"
        "GRANT USAGE ON SEQUENCE sample_product_id_seq TO clerk;"
        "CREATE SCHEMA clerks AUTHORIZATION clerk"
    )
    session = dedicated_connection("default")
    try:
        with session.cursor() as cursor:
            cursor.execute("SET ROLE clerk")
            yield cursor.execute
    finally:
        session.close()
        execute_sql("DROP SCHEMA clerks CASCADE; DROP OWNED BY clerk; DROP ROLE clerk")


@pytest.mark.django_db(transaction=True)
def test_a_writer_needs_no_rights_on_the_tasks(clerk, capture):
    """A program that knows nothing of tasks still works when its table is captured."""
    capture(tasks.reindex)
    clerk("INSERT INTO sample_product (name, price) VALUES ('a', 0)")
    clerk("UPDATE sample_product SET price = 1")
    clerk("DELETE FROM sample_product")
    assert [operation for operation, _ in captured()] == ["insert", "update", "delete"]
    with pytest.raises(Exception, match="permission denied"):
        clerk("SELECT FROM django_pglock_task")


@pytest.mark.django_db(transaction=True)
def test_a_trigger_does_not_use_tables_or_functions_that_the_writer_created(clerk, capture):
    """A function in the schema of the writer would run with the rights of the owner of the trigger function."""
    clerk("CREATE TEMP TABLE django_pglock_task AS SELECT 'a'::text AS queue")
    clerk("CREATE TEMP TABLE django_pglock_worker AS SELECT true AS is_sleeping")
    clerk("CREATE TABLE clerks.django_pglock_task AS SELECT 'a'::text AS queue")
    function = "clerks.jsonb_build_object(VARIADIC text[]) RETURNS jsonb LANGUAGE sql"
    clerk(f"CREATE FUNCTION {function} AS $$SELECT to_jsonb(1 / 0)$$")
    clerk("SET search_path = clerks, pg_temp, public, pg_catalog")
    capture(tasks.reindex)
    clerk("INSERT INTO public.sample_product (name, price) VALUES ('a', 0)")
    clerk("SET search_path = ''")
    clerk("INSERT INTO public.sample_product (name, price) VALUES ('a', 0)")
    assert len(rows()) == 2


@pytest.mark.django_db(transaction=True)
def test_other_roles_cannot_create_a_trigger_with_the_function(clerk, capture):
    """Such a trigger would enqueue the rows of any table of that role."""
    capture(tasks.reindex)
    clerk("CREATE TABLE clerks.mine (id bigint)")
    with pytest.raises(Exception, match="permission denied for function") as refused:
        clerk(
            "CREATE TRIGGER mine AFTER INSERT ON clerks.mine REFERENCING NEW TABLE AS new_rows"
            " FOR EACH STATEMENT EXECUTE FUNCTION public.capture_insert()"
        )
    assert isinstance(refused.value.__cause__, errors.InsufficientPrivilege)


def test_each_schema_has_a_trigger_of_its_own(capture):
    """As with a schema for each tenant and one table of tasks for all: the task gets the name of the schema."""
    names = ["tenant1", "tenant2"]
    declared = Capture(tasks.follow, name="capture", on="insert")
    with connection.cursor() as cursor, connection.schema_editor(atomic=False) as editor:
        for name in names:
            cursor.execute(f"CREATE SCHEMA {name}")
            cursor.execute(f"CREATE TABLE {name}.sample_product (LIKE sample_product INCLUDING ALL)")
            cursor.execute(f"SET LOCAL search_path = {name}, public")
            editor.add_constraint(Product, declared)
        cursor.execute("SET LOCAL search_path = public")
        for name in names:
            cursor.execute(f"INSERT INTO {name}.sample_product (id, name, price) VALUES (1, 'a', 0)")
    assert [row["schema"] for row in rows()] == names
