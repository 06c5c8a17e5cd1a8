"""Prometheus: metrics of the tasks in the database, in the registry of the official client; extra ``[prometheus]``.

A worker answers with its own metrics at its probe port. These are for web processes, which run also when no worker
does. ``register()`` adds them to what the process exports already, as with django-prometheus; ``metrics`` is a view::

    urlpatterns += [path("metrics", django_pglock.contrib.prometheus.metrics)]
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain

from django.db import Error as DatabaseFailure
from django.http import HttpRequest, HttpResponse
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from django_pglock.error_reading import one_line
from django_pglock.loggers import get_logger
from django_pglock.store.numbers import depths, suspended
from django_pglock.store.statements import rows_of
from django_pglock.tasks.backends import our_backends
from django_pglock.worker.parent.probes import PREFIX, depth_families, suspended_family

logger = get_logger("django_pglock.tasks")

#: Where the metrics of several processes of one server gather. The client library reads the same variable.
MULTIPLE_PROCESSES = "PROMETHEUS_MULTIPROC_DIR"


class TaskCollector(Collector):  # type: ignore[misc]
    """The queues and the workers of all databases that the backends in ``TASKS`` use.

    Queues are counted as a worker counts them, up to 10,000 tasks of a kind. If no worker has counted within a minute,
    this process counts.
    """

    def describe(self) -> list[Metric]:
        """Return nothing: to register the collector must not ask the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none, with a warning in the log, while a database cannot be reached."""
        databases = {backend.database for backend in our_backends()}
        try:
            found = [*chain(*map(depths, databases))]
            waiting = suspended_family(chain(*map(suspended, databases)))
            workers = sum(rows_of("Worker", alias).alive().count() for alias in databases)
        except DatabaseFailure as error:
            logger.warning("The metrics of tasks cannot be read: %s", one_line(error))
            return
        for each in (*depth_families(found), waiting):
            family = Metric(f"{PREFIX}{each.name}", each.text, each.kind)
            for number, labels, _ in each.samples:
                family.add_sample(f"{PREFIX}{each.name}", labels, number)
            yield family
        yield GaugeMetricFamily(f"{PREFIX}workers_alive", "Workers with a heartbeat within its limit.", workers)


_collector = TaskCollector()


def register() -> None:
    """Add the metrics of tasks to the client's default registry, which has a collector once. It may be called again."""
    REGISTRY.register(_collector)


def metrics(request: HttpRequest) -> HttpResponse:
    """Answer with all metrics of the process, or of all processes of the server, in the format that is asked for."""
    if MULTIPLE_PROCESSES in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        registry.register(_collector)
    else:
        register()
        registry = REGISTRY
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)
