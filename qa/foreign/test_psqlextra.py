"""django-postgres-extra: a backend over a backend, here over django-prometheus', which counts.

Its class changes operations, introspection and schema, and leaves cursors to the class below it. So which class is
Django's own is to be looked for along all bases.
"""

from __future__ import annotations

import django
import psqlextra.query
from django.db import connection, transaction
from prometheus_client import REGISTRY
from psqlextra.manager import PostgresManager

from django_pglock import Lease, enqueue_many, lock
from django_pglock.models import AdvisoryLock, Task
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing, write


class Extra(Letter):
    """The same letters, with the manager of django-postgres-extra."""

    objects = PostgresManager()

    class Meta:
        proxy = True
        app_label = "sample"


def statements() -> float:
    labels = {"alias": "default", "vendor": "postgresql"}
    return REGISTRY.get_sample_value("django_db_execute_total", labels) or 0.0


def test_psqlextra_runs_on_django_52():
    assert django.VERSION[:2] == (5, 2)
    assert "psqlextra" in psqlextra.query.__name__


def test_locks_and_calls_are_counted_by_the_backend_below():
    nothing.enqueue()
    before = statements()
    with lock("extra"):
        assert AdvisoryLock.objects.for_name("extra").held().exists()
    with transaction.atomic(), lock("extra"):
        nothing.enqueue("100%")
        enqueue_many(nothing, [{"number": 1}])
    assert statements() - before >= 6
    assert Task.objects.count() == 3


def test_inserts_of_psqlextra_work_under_a_lock():
    with lock("letters", timeout=1):
        first = Extra.objects.insert_and_get(text="100%")
    assert Letter.objects.get(pk=first.pk).text == "100%"


def test_a_worker_and_a_lease_work_on_psqlextra(drain):
    result = write.enqueue("by the worker")
    drain()
    result.refresh()
    assert Letter.objects.get(pk=result.return_value).text == "by the worker"
    with Lease("nightly", ttl=60) as lease:
        lease.extend(60)


def test_the_schema_editor_is_theirs_and_knows_our_tables():
    with connection.schema_editor() as editor:
        assert type(editor).__module__.startswith("psqlextra")
    assert "django_pglock_task" in connection.introspection.table_names()
