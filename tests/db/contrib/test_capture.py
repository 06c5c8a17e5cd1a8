"""Declaring a capture on a model: migrations, inheritance, checks, rights, schemas."""

from __future__ import annotations

import pgtrigger
import pytest
from django.apps import apps
from django.core.management.commands.makemigrations import Command
from django.db import connection, models
from django.db.migrations import AlterField
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.db.models import Q
from django.test.utils import isolate_apps
from psycopg import errors

from django_pglock.contrib.capture import Capture, CaptureTrigger, check_captures
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.capture import identifier
from tests.db.store.test_capture import captured
from tests.sample import captured_tasks as tasks
from tests.sample.models import Product, Shelf

pytestmark = pytest.mark.django_db


@pytest.fixture
def declared(monkeypatch):
    """Forget after the test what its models have declared."""
    monkeypatch.setattr(pgtrigger.registry._registry, "data", dict(pgtrigger.registry._registry.data))
    with isolate_apps("tests.sample"):
        yield


def triggers_of(model):
    return sorted(trigger.name for each, trigger in pgtrigger.registered() if each is model)


# Declarations


def test_a_model_declares_its_capture(declared):
    class Book(models.Model):
        capture = Capture(tasks.reindex, on=("insert", "delete"))

        class Meta:
            app_label = "sample"

    assert triggers_of(Book) == ["capture_delete", "capture_insert"]


def test_an_update_has_a_second_trigger_if_it_is_asked_for_primary_keys_only(declared):
    class Book(models.Model):
        title = models.CharField(max_length=10)
        shelf = models.OneToOneField(Shelf, models.CASCADE, primary_key=True)
        keys = Capture(tasks.reindex, on="update")
        same = Capture(tasks.reindex, on="update", ids="shelf_id")
        some = Capture(tasks.reindex, on="update", fields=["title"])
        when = Capture(tasks.reindex, on="update", when=Q(title="a"))
        others = Capture(tasks.reindex, on="update", ids="title")

        class Meta:
            app_label = "sample"

    names = ["keys_key", "keys_update", "others_update", "same_key", "same_update", "some_update", "when_update"]
    assert triggers_of(Book) == names


def test_tables_of_all_children_of_an_abstract_model_are_captured(declared):
    class Searched(models.Model):
        changes = Capture(tasks.reindex, on="insert")

        class Meta:
            app_label = "sample"
            abstract = True

    class Book(Searched):
        class Meta:
            app_label = "sample"

    class Film(Searched):
        changes = None

        class Meta:
            app_label = "sample"

    class Novel(Book):
        class Meta:
            app_label = "sample"

    class Proxy(Book):
        class Meta:
            app_label = "sample"
            proxy = True

    assert triggers_of(Book) == ["changes_insert"]
    assert triggers_of(Film) == triggers_of(Novel) == triggers_of(Proxy) == []


def test_a_table_that_has_also_a_table_as_parent_is_captured(declared):
    class Searched(models.Model):
        title = models.CharField(max_length=10)
        changes = Capture(tasks.follow, on="insert")

        class Meta:
            app_label = "sample"
            abstract = True

    class Place(models.Model):
        class Meta:
            app_label = "sample"

    class Restaurant(Searched, Place):
        class Meta:
            app_label = "sample"

    assert triggers_of(Restaurant) == ["changes_insert"]
    assert triggers_of(Place) == []


def test_tables_of_other_packages_are_captured_by_a_proxy(declared, capture):
    class Changed(Shelf):
        class Meta:
            app_label = "sample"
            proxy = True

    capture(tasks.follow, model=Changed, fields=["name"])
    Shelf.objects.create(name="a")
    assert captured()[0]["model"] == "sample.shelf"


WRONG = [
    ({"on": ()}, "on is"),
    ({"on": "select"}, "on is 'select'"),
    ({"fields": "name"}, "give a list"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"batch_size": True}, "batch_size is True"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_an_invalid_option_of_a_capture_is_refused_at_definition(options, message):
    with pytest.raises(TaskOptionError, match=message):
        Capture(tasks.reindex, **options)


#: Each with a text that the message must contain.
IMPOSSIBLE = [
    (("sample.nothing", {}), "the task 'sample.nothing' cannot be imported"),
    (("tests.sample.models.Product", {}), "is not a task; decorate"),
    ((tasks.needs_more, {}), "those of id, ids, model, operation, schema"),
    ((tasks.has_both, {}), "either id or ids"),
    ((tasks.unique_by_ids, {}), "Use the parameter id"),
    ((tasks.unique_without_operation, {}), "a unique key without operation"),
    ((tasks.unique_and_redacted, {}), "Name the key, as in Unique(key='{id}')"),
    ((tasks.unique_while_unfinished, {}), "unique only while it waits"),
    ((tasks.replacing, {}), "unique only while it waits"),
    ((tasks.locked_by_ids, {}), "A list cannot be part"),
    ((tasks.locked_by_id, {"ids": "name"}), "neither a number nor a UUID"),
    ((tasks.reindex.using(after=[1]), {}), "options of a single call"),
    ((tasks.reindex.using(lock="x" * 400), {}), "one of its keys may become too long"),
    ((tasks.reindex, {"on": "truncate"}), "cannot get an id from TRUNCATE"),
    ((tasks.reindex, {"fields": ["colour"]}), "no field named 'colour'"),
    ((tasks.reindex, {"when": Q(shelf__name="a")}), "Joined field references"),
    ((tasks.reindex, {"when": Q(name="$capture$")}), "may contain"),
]


@pytest.mark.parametrize(("declaration", "message"), IMPOSSIBLE)
def test_a_system_check_reports_task_options_that_a_trigger_cannot_apply(declaration, message, monkeypatch):
    trigger = CaptureTrigger(Capture(declaration[0], **declaration[1]), "capture_insert", "insert")
    monkeypatch.setattr(pgtrigger, "registered", lambda: [(Product, trigger)])
    [problem] = check_captures()
    assert (problem.id, problem.obj) == ("django_pglock.E008", Product)
    assert message in problem.msg


def test_an_id_that_is_a_text_is_passed_where_it_is_in_no_key(capture):
    capture(tasks.publish_in_order, ids="name")
    shelf = Shelf.objects.create(name="a")
    Product.objects.create(shelf=shelf, name="pen")
    assert [each["id"] for each in captured()] == ["pen"]


def test_a_field_of_the_parent_is_in_another_table(declared):
    class Novel(Shelf):
        capture = Capture(tasks.reindex, fields=["name"])

        class Meta:
            app_label = "sample"

    [problem] = [each for each in check_captures() if each.obj is Novel]
    assert "sample.Novel.name is not a column of the table sample_novel" in problem.msg


def test_a_check_reports_triggers_that_will_not_be_created(monkeypatch, settings):
    trigger = CaptureTrigger(Capture(tasks.reindex), "capture_insert", "insert")
    monkeypatch.setattr(pgtrigger, "registered", lambda: [(Product, trigger)])
    assert check_captures() == []
    for missing, number in (("pgtrigger", "E009"), ("django_pglock", "E007")):
        monkeypatch.setattr(apps, "is_installed", lambda name, missing=missing: name != missing)
        assert [problem.id for problem in check_captures()] == [f"django_pglock.{number}"]


def test_a_check_reports_a_table_in_another_database_than_the_tasks(monkeypatch, settings):
    trigger = CaptureTrigger(Capture(tasks.reindex), "capture_insert", "insert")
    monkeypatch.setattr(pgtrigger, "registered", lambda: [(Product, trigger)])
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"database": "elsewhere"}}}
    [problem] = check_captures()
    assert problem.id == "django_pglock.E010"
    assert "'default'" in problem.msg
    assert "'elsewhere'" in problem.msg


# Migrations


def state_of(capture):
    """Return the state of a project whose Shelf has this capture, or none."""
    state = ProjectState.from_apps(apps)
    shelf = ModelState.from_model(Shelf)
    if capture is not None:
        shelf.options["triggers"] = capture.triggers(Shelf, "capture")
    state.models["sample", "shelf"] = shelf
    return state


def migrated(before, after):
    """Return the operations that makemigrations writes, as the file would contain them, and the state after them."""
    changes = Command.autodetector(before, after)._detect_changes(convert_apps={"sample"})
    if not changes.get("sample"):
        return [], before
    [migration] = changes["sample"]
    namespace = {}
    exec(MigrationWriter(migration).as_string(), namespace)
    return namespace["Migration"].operations, after


def applied(operations, before):
    """Apply operations to the database; return the state after them."""
    state = before.clone()
    for operation in operations:
        old = state.clone()
        operation.state_forwards("sample", state)
        with connection.schema_editor() as editor:
            operation.database_forwards("sample", editor, old, state)
    return state


def in_database(capture):
    """Return which of the triggers and functions of a capture of Shelf there are in the database."""
    names = {trigger.get_pgid(Shelf): trigger.name for trigger in capture.triggers(Shelf, "capture")}
    with connection.cursor() as cursor:
        cursor.execute("SELECT tgname FROM pg_trigger WHERE tgname = ANY (%s)", [list(names)])
        triggers = sorted(names[name] for (name,) in cursor.fetchall())
        cursor.execute("SELECT proname FROM pg_proc WHERE proname = ANY (%s)", [list(names)])
        functions = sorted(names[name] for (name,) in cursor.fetchall())
    assert triggers == functions
    return triggers


def test_migrations_make_change_and_drop_the_triggers():
    """A change of an option of the task is noticed as well: the row that the trigger writes contains it."""
    capture = Capture(tasks.reindex)
    operations, made = migrated(state_of(None), state_of(capture))
    assert [type(each).__name__ for each in operations] == ["AddTrigger"] * 4
    state = applied(operations, state_of(None))
    assert in_database(capture) == ["capture_delete", "capture_insert", "capture_key", "capture_update"]
    assert migrated(state, made)[0] == []

    other = Capture(tasks.reindex.using(priority=50), on=("insert", "update"), fields=["name"])
    operations, _ = migrated(state, state_of(other))
    assert [type(each).__name__ for each in operations] == ["RemoveTrigger"] * 4 + ["AddTrigger"] * 2
    state = applied(operations, state)
    assert in_database(capture) == ["capture_insert", "capture_update"]
    Shelf.objects.create(name="a")
    assert Task.objects.get().priority == 50

    operations, _ = migrated(state, state_of(None))
    applied(operations, state)
    assert in_database(capture) == []
    Shelf.objects.create(name="b")
    assert Task.objects.count() == 1


def test_the_type_of_a_captured_primary_key_can_be_altered_and_the_way_back_drops_the_triggers():
    """A trigger names the column, so django-pgtrigger has to drop it for a moment."""
    capture = Capture(tasks.reindex, on="update")
    operations, made = migrated(state_of(None), state_of(capture))
    state = applied(operations, state_of(None))
    applied([AlterField("Shelf", "id", models.AutoField(primary_key=True))], state)
    assert in_database(capture) == ["capture_key", "capture_update"]
    with connection.schema_editor() as editor:
        for operation in reversed(operations):
            operation.database_backwards("sample", editor, made, state_of(None))
    assert in_database(capture) == []


def test_a_new_model_is_created_with_its_triggers():
    before = state_of(None)
    del before.models["sample", "shelf"], before.models["sample", "product"]
    operations, _ = migrated(before, state_of(Capture(tasks.reindex, on="insert")))
    assert {"CreateModel", "AddTrigger"} <= {type(each).__name__ for each in operations}


def test_a_capture_can_be_switched_off_for_a_block(capture):
    """In the session, by django-pgtrigger's own word; or by a superuser, for a restore."""
    declared = capture(tasks.reindex, on="insert")
    trigger = CaptureTrigger(declared, "capture_insert", "insert")
    with trigger.register(Product), pgtrigger.ignore("sample.Product:capture_insert"):
        Product.objects.create(name="a")
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        Product.objects.create(name="b")
        cursor.execute("RESET session_replication_role")
    assert captured() == []
    Product.objects.create(name="c")
    assert len(captured()) == 1


# Rights and schemas


@pytest.fixture
def clerk(transactional_db):
    """Run SQL in a session of a role that may write to the captured table and nothing else."""
    with connection.cursor() as cursor:
        cursor.execute(
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
        with connection.cursor() as cursor:
            cursor.execute("DROP SCHEMA clerks CASCADE; DROP OWNED BY clerk; DROP ROLE clerk")


@pytest.mark.django_db(transaction=True)
def test_a_writer_needs_no_rights_on_the_tasks(clerk, capture):
    """A program that knows nothing of tasks still works when its table is captured."""
    capture(tasks.note)
    clerk("INSERT INTO sample_product (name, price) VALUES ('a', 0)")
    clerk("UPDATE sample_product SET price = 1")
    clerk("DELETE FROM sample_product")
    assert [call["operation"] for call in captured()] == ["insert", "update", "delete"]
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
    assert len(captured()) == 2


@pytest.mark.django_db(transaction=True)
def test_other_roles_cannot_create_a_trigger_with_the_function(clerk, capture):
    """Such a trigger would enqueue the rows of any table of that role."""
    declared = capture(tasks.reindex, on="insert")
    name = CaptureTrigger(declared, "capture_insert", "insert").get_pgid(Product)
    clerk("CREATE TABLE clerks.mine (id bigint)")
    with pytest.raises(Exception, match="permission denied for function") as refused:
        clerk(
            f"CREATE TRIGGER mine AFTER INSERT ON clerks.mine REFERENCING NEW TABLE AS new_rows"
            f" FOR EACH STATEMENT EXECUTE FUNCTION public.{name}()"
        )
    assert isinstance(refused.value.__cause__, errors.InsufficientPrivilege)


def test_each_schema_has_a_trigger_of_its_own(capture):
    """As with a schema for each tenant and one table of tasks for all: the task gets the name of the schema."""
    names = ["tenant1", 'tenant2; "100%" {id}']
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"CREATE SCHEMA {identifier(name)}")
            cursor.execute(f"CREATE TABLE {identifier(name)}.sample_product (LIKE sample_product INCLUDING ALL)")
            cursor.execute(f"SET LOCAL search_path = {identifier(name)}, public")
            capture(tasks.follow, on="insert")
        cursor.execute("SET LOCAL search_path = public")
        for name in names:
            cursor.execute(f"INSERT INTO {identifier(name)}.sample_product (id, name, price) VALUES (1, 'a', 0)")
    assert [call["schema"] for call in captured()] == names
