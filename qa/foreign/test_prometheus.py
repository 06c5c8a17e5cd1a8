"""django-prometheus: its cursor class counts each statement, and its backend class each connection.

The class comes in by ``cursor_factory`` in ``get_connection_params()``, so a statement below the cursor is not counted.

The official client's parser reads the metrics of a worker, and its registry has those of tasks for all exporters.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.test import Client, RequestFactory, override_settings
from django_prometheus.exports import ExportToDjangoView
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as families_of_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from django_pglock import Lease, enqueue_many, lock, lock_all, semaphore
from django_pglock.contrib import prometheus
from django_pglock.models import Number, Queue
from qa.foreign.sample.tasks import nothing
from tests.in_process import InProcessWorker

LABELS = {"alias": "default", "vendor": "postgresql"}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"django_db_{name}", {**LABELS, **labels}) or 0.0


def counted(function: Callable[[], object], name: str = "execute_total", **labels: str) -> float:
    """Return by how much a counter grows."""
    connection.ensure_connection()
    before = value(name, **labels)
    function()
    return value(name, **labels) - before


def take(number: int = 0) -> None:
    with lock("counted", number):
        pass


def take_in_transaction() -> None:
    with transaction.atomic(), lock("counted"):
        pass


def take_several() -> None:
    with lock_all("counted", "and this"), semaphore("slots", limit=2):
        pass


@pytest.mark.parametrize(
    ("function", "statements"),
    [
        (take, 2),
        (take_in_transaction, 1),
        (take_several, 4),
        (nothing.enqueue, 1),
        (lambda: enqueue_many(nothing, [{"number": number} for number in range(10)]), 1),
    ],
    ids=["lock", "lock in a transaction", "several locks", "enqueue", "enqueue_many"],
)
def test_statements_are_counted(function, statements):
    function()  # cached queries, such as whether a worker sleeps, are sent here
    assert counted(function) >= statements


def test_each_session_is_counted():
    async def take_it() -> None:
        async with lock("asynchronous"):
            pass

    def take_lease() -> None:
        with Lease("counted", ttl=60):
            pass

    assert counted(take_lease, "new_connections_total") >= 1
    assert counted(lambda: asyncio.run(take_it()), "new_connections_total") == 1


@pytest.fixture
def counted_anew():
    """Count at each scrape, as at the first scrape after a pause."""
    Number.objects.all().delete()
    yield
    Queue.objects.all().delete()


def metrics_of(text: str, parse: Callable = text_string_to_metric_families) -> dict[str, Metric]:
    return {family.name: family for family in parse(text) if family.name.startswith("django_pglock_")}


def test_the_official_parser_reads_the_metrics_of_a_worker(counted_anew):
    worker = InProcessWorker(threads=1, probe_port="127.0.0.1:0")
    worker.start()
    try:
        result = nothing.using(queue_name="let-ters").enqueue()
        result.wait()
        kind = text = ""
        # Now, instead of within a minute.
        worker.settler.history._write_at = 0.0
        worker.settler.wake()
        while 'outcome="succeeded"} 1' not in text:
            with urllib.request.urlopen(f"http://127.0.0.1:{worker.server.port}/metrics") as answer:
                kind, text = answer.headers["Content-Type"], answer.read().decode()
            time.sleep(0.1)
    finally:
        worker.shutdown()
    assert kind.startswith("text/plain; version=0.0.4")
    families = metrics_of(text)
    # The parser takes a sample whose name is of no family for one of an unknown type.
    assert {family.type for family in families.values()} <= {"counter", "gauge", "histogram"}
    assert all(family.documentation for family in families.values())
    # One rule of alerts serves both: a web process gives the metrics of queues by the names that a worker gives.
    of_web = {family.name: family.documentation for family in prometheus.TaskCollector().collect()}
    del of_web["django_pglock_workers_alive"]
    assert {name: families[name].documentation for name in of_web} == of_web


def test_django_prometheus_exports_the_metrics_of_tasks(counted_anew):
    with connection.execute_wrapper(refuse):
        prometheus.register()
    prometheus.register()
    enqueue_many(nothing.using(queue_name="letters"), [{}, {}])
    nothing.using(queue_name="letters", run_after=timedelta(hours=1)).enqueue()
    Queue.objects.pause("letters")
    page = ExportToDjangoView(RequestFactory().get("/metrics")).content.decode()
    families = metrics_of(page)
    [ready] = families["django_pglock_tasks_ready"].samples
    assert (ready.labels, ready.value) == ({"queue": "letters"}, 2)
    [age] = families["django_pglock_oldest_ready_task_age_seconds"].samples
    assert age.value >= 0
    assert [each.value for each in families["django_pglock_workers_alive"].samples] == [0]
    tasks = {sample.labels["status"]: sample.value for sample in families["django_pglock_tasks"].samples}
    assert tasks == {"ready": 2, "blocked": 0, "scheduled": 1, "running": 0, "failed": 0}
    [paused] = families["django_pglock_queue_paused"].samples
    assert (paused.labels, paused.value) == ({"queue": "letters"}, 1)
    assert "django_db_execute_total" in page


def test_the_view_answers_in_the_format_that_is_asked_for(counted_anew):
    nothing.enqueue()
    request = RequestFactory().get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    answer = prometheus.metrics(request)
    assert answer["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    families = metrics_of(answer.content.decode(), families_of_openmetrics)
    assert [sample.value for sample in families["django_pglock_tasks_ready"].samples] == [1]
    assert prometheus.metrics(RequestFactory().get("/metrics"))["Content-Type"].startswith("text/plain; version=0.0.4")


def test_the_view_is_one_line_of_urls(counted_anew):
    with override_settings(ROOT_URLCONF="qa.foreign.snippets.prometheus_urls"):
        answer = Client().get("/metrics")
    assert "django_pglock_workers_alive" in metrics_of(answer.content.decode())


def test_the_view_serves_several_processes_of_a_server(counted_anew, monkeypatch, tmp_path):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    page = prometheus.metrics(RequestFactory().get("/metrics")).content.decode()
    assert "django_pglock_workers_alive" in metrics_of(page)


def test_without_the_database_the_other_metrics_are_still_there(counted_anew, caplog):
    with connection.execute_wrapper(refuse):
        page = prometheus.metrics(RequestFactory().get("/metrics")).content.decode()
    assert not metrics_of(page)
    assert "django_db_execute_total" in page
    assert "cannot be read: the database is away" in caplog.text


def refuse(*args: object) -> None:
    raise OperationalError("the database is away")
