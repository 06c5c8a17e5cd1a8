"""django-tenants, tables of tasks in the public schema: any tenant enqueues there, and any worker runs for all.

The backend's ``_cursor()`` sends ``SET search_path`` for the schema that ``schema_context`` chose, when a cursor is
made and not before. A statement that is sent below Django's cursor meets the schema of the last user of the session.
"""

from __future__ import annotations

import re
import sys
import types
from contextlib import suppress
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client, override_settings
from django_tenants.utils import schema_context

from django_pglock import enqueue_many, lock, task
from django_pglock.models import AdvisoryLock, Task
from django_pglock.tasks import registry
from django_pglock.testing import assert_locked
from qa.foreign.customers.models import Customer, Domain
from qa.foreign.sample import models
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing, session_settings

ROOT = Path(__file__).resolve().parents[2]


@task
def write_for(schema: str, text: str) -> None:
    """Write a letter of a tenant: a worker begins each task in the public schema."""
    with schema_context(schema):
        Letter.objects.create(text=text)


@task
def leave_switched(schema: str) -> None:
    """Switch to a tenant and forget to switch back."""
    connection.set_schema(schema)


@pytest.fixture(scope="module", autouse=True)
def tenants():
    for name in ("alpha", "beta"):
        customer = Customer.objects.create(schema_name=name, name=name)
        Domain.objects.create(domain=f"{name}.test", tenant=customer, is_primary=True)


@pytest.fixture(params=[False, True], ids=["each cursor sets it", "set once"])
def limit_set_calls(request):
    with override_settings(TENANT_LIMIT_SET_CALLS=request.param):
        yield


def letters(schema: str) -> list[str]:
    with schema_context(schema):
        return [*Letter.objects.order_by("id").values_list("text", flat=True)]


def test_every_tenant_enqueues_into_the_public_schema(limit_set_calls):
    for schema in ("alpha", "beta", "public", "alpha"):
        with schema_context(schema):
            Letter.objects.exists()
        with schema_context(schema):
            nothing.enqueue(schema)
            enqueue_many(nothing, [{"schema": schema}])
    assert Task.objects.count() == 8
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM public.django_pglock_task")
        assert cursor.fetchone() == (8,)


def test_statements_of_a_tenant_run_under_its_schema(limit_set_calls):
    for schema in ("alpha", "beta", "alpha"):
        with schema_context(schema):
            with lock("any"):
                assert AdvisoryLock.objects.for_name("any").held().exists()
                Letter.objects.create(text="locked")
            with transaction.atomic(), lock("any"):
                Letter.objects.create(text="in a transaction")
                nothing.enqueue()
            with suppress(ZeroDivisionError), transaction.atomic(), lock("any"):
                nothing.enqueue()
                Letter.objects.create(text="rolled back")
                raise ZeroDivisionError
            Letter.objects.create(text="afterwards")
    for schema, times in (("alpha", 2), ("beta", 1)):
        assert letters(schema)[-3 * times :] == ["locked", "in a transaction", "afterwards"] * times
    assert letters("public") == []
    assert Task.objects.count() == 3


def test_a_worker_runs_the_tasks_of_all_tenants(limit_set_calls, drain):
    for schema in ("alpha", "beta"):
        with schema_context(schema):
            write_for.enqueue(schema, f"from {schema}")
    drain()
    assert letters("alpha")[-1] == "from alpha"
    assert letters("beta")[-1] == "from beta"
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}


def test_a_task_begins_in_the_public_schema(drain):
    with schema_context("alpha"):
        result = session_settings.enqueue("search_path")
    drain()
    result.refresh()
    assert result.return_value == ["public"]


def test_a_task_that_leaves_its_schema_behind_is_settled(drain):
    with schema_context("alpha"):
        results = [leave_switched.enqueue("beta") for _ in range(3)]
    drain()
    for result in results:
        result.refresh()
        assert result.status == "SUCCESSFUL"


def test_a_lock_is_the_databases_and_not_the_tenants():
    with schema_context("alpha"), lock("report"), schema_context("beta"):
        assert_locked("report")
    with schema_context("alpha"), lock("alpha", "report"), schema_context("beta"), lock("beta", "report", timeout=0):
        pass


@pytest.fixture
def page(monkeypatch):
    """The tasks and the view of the how-to page, as modules of the shop that it is about."""
    text = (ROOT / "docs" / "worker.md").read_text()
    files = dict(re.findall(r"^:caption: shop/(\w+)\.py\n\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    shop = types.ModuleType("shop")
    shop.models = models
    for name, module in (("shop", shop), ("shop.models", models)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))
    for name in ("settings", "tasks", "views"):
        module = types.ModuleType(f"shop.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(shop, name, module)
        exec(files[name], vars(module))
    return shop


def test_the_code_of_the_page_about_tenants_works(page, drain):
    for name in ("SHARED_APPS", "TENANT_APPS"):
        assert ("django_pglock" in getattr(page.settings, name)) == ("django_pglock" in getattr(settings, name))
    assert page.settings.DATABASE_ROUTERS == settings.DATABASE_ROUTERS
    before = {schema: letters(schema) for schema in ("alpha", "beta")}
    with schema_context("alpha"):
        page.views.order(None)
    page.tasks.write_daily_letters.enqueue()
    drain()
    written = {schema: letters(schema)[len(before[schema]) :] for schema in before}
    assert {schema: sorted(texts) for schema, texts in written.items()} == {
        "alpha": ["Good morning", "Thank you"],
        "beta": ["Good morning"],
    }
    assert letters("public") == []


def test_requests_of_tenants_write_into_their_schema(limit_set_calls):
    for schema in ("alpha", "beta", "alpha"):
        before = letters(schema)
        client = Client(headers={"host": f"{schema}.test"})
        assert client.get("/post/", {"text": schema}).status_code == 200
        assert letters(schema) == [*before, schema]
        exported = b"".join(client.get("/export/").streaming_content).decode().split("\n")
        assert exported[-2] == schema
        assert len(exported) == len(before) + 2
    assert Task.objects.count() == 3


def test_migrating_all_schemas_finds_our_tables_once():
    call_command("migrate_schemas", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("SELECT schemaname FROM pg_tables WHERE tablename = 'django_pglock_task'")
        assert cursor.fetchall() == [("public",)]
