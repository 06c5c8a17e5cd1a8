"""django-tenants, tables of tasks in each tenant's schema: a call is written where the tenant's cursor would write it.

No worker serves such a set-up: its threads have connections of their own, which begin in the public schema. What is
shown here is that no call of a tenant is found in the schema of another.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django_tenants.utils import schema_context

from django_pglock import Unique, enqueue_many, lock, task
from django_pglock.models import Task
from qa.foreign.customers.models import Customer, Domain
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing

SCHEMAS = ("alpha", "beta", "public")


@task(unique=Unique(while_="unfinished"))
def only_once() -> None:
    """Do nothing, once for each schema."""


@task(lock="order:{order}")
def with_key(order: int) -> None:
    """Do nothing, one at a time for each order."""


@pytest.fixture(scope="module", autouse=True)
def tenants():
    for name in ("alpha", "beta"):
        customer = Customer.objects.create(schema_name=name, name=name)
        Domain.objects.create(domain=f"{name}.test", tenant=customer, is_primary=True)


@pytest.fixture(autouse=True, params=[False, True], ids=["each cursor sets it", "set once"])
def limit_set_calls(request):
    with override_settings(TENANT_LIMIT_SET_CALLS=request.param):
        yield


@pytest.fixture(autouse=True)
def no_tasks_of_tenants(no_tasks):
    for schema in SCHEMAS:
        with schema_context(schema):
            Task.objects.all().delete()


def counts() -> dict[str, int]:
    """Return how many tasks each schema has, asked for by full names."""
    with connection.cursor() as cursor:
        found = {}
        for schema in SCHEMAS:
            cursor.execute(f"SELECT count(*) FROM {schema}.django_pglock_task")
            [found[schema]] = cursor.fetchone()
    return found


def test_each_way_to_enqueue_writes_into_the_schema_of_the_tenant():
    for schema in SCHEMAS:
        with schema_context(schema):
            Letter.objects.count() if schema != "public" else None
        others = [other for other in SCHEMAS if other != schema]
        for other in others:
            with schema_context(other):
                nothing.using(priority=5).enqueue(schema)
                enqueue_many(nothing, [{"number": number} for number in range(3)])
                only_once.enqueue()
                only_once.enqueue()
                with_key.enqueue(order=1)
    assert counts() == {"alpha": 11, "beta": 11, "public": 11}


def test_after_a_rollback_the_next_call_is_written_into_its_own_schema():
    with schema_context("alpha"):
        nothing.enqueue()
        with suppress(ZeroDivisionError), transaction.atomic(), schema_context("beta"):
            nothing.enqueue("rolled back")
            raise ZeroDivisionError
        nothing.enqueue()
    with schema_context("beta"):
        with suppress(ZeroDivisionError), transaction.atomic(), transaction.atomic():
            nothing.enqueue("rolled back")
            raise ZeroDivisionError
        nothing.enqueue()
    assert counts() == {"alpha": 2, "beta": 1, "public": 0}


def test_a_first_lock_does_not_prevent_the_switch_to_the_schema_of_the_tenant():
    with schema_context("alpha"):
        Letter.objects.exists()
    with schema_context("beta"), lock("report"):
        nothing.enqueue()
        Letter.objects.create(text="beta's")
    with schema_context("alpha"):
        assert not Letter.objects.filter(text="beta's").exists()
    assert counts() == {"alpha": 0, "beta": 1, "public": 0}
