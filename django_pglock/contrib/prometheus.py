"""Prometheus: metrics of the tasks in the database, in the registry of the official client; extra ``[prometheus]``.

A worker answers with its own metrics at its probe port. These are for web processes, which run also when no worker
does. ``register()`` adds them to what the process exports already, as with django-prometheus; ``metrics`` is a view::

    urlpatterns += [path("metrics", django_pglock.contrib.prometheus.metrics)]
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import chain, groupby
from operator import attrgetter

from django.db import Error as DatabaseFailure
from django.http import HttpRequest, HttpResponse
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from django_pglock.error_reading import one_line
from django_pglock.loggers import get_logger
from django_pglock.store.shared_counts import shared_counts
from django_pglock.store.statements import rows_of
from django_pglock.tasks.backends import our_backends
from django_pglock.worker.probes.metrics import STATUSES

logger = get_logger("django_pglock.tasks")

#: Where the metrics of several processes of one server gather. The client library reads the same variable.
MULTIPLE_PROCESSES = "PROMETHEUS_MULTIPROC_DIR"


class TaskCollector(Collector):  # type: ignore[misc]
    """The queues and the workers of all databases that the backends in ``TASKS`` use.

    Queues are counted as a worker counts them: one process counts for all, every ten seconds at most, and up to 10,000
    tasks of a kind.
    """

    def describe(self) -> list[Metric]:
        """Return nothing: to register the collector must not ask the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none, with a warning in the log, while a database cannot be reached."""
        databases = {backend.database for backend in our_backends()}
        try:
            # Queues of the same name in several databases are one.
            counts = sorted(chain(*map(shared_counts, databases)), key=attrgetter("queue"))
            workers = sum(rows_of("Worker", alias).alive().count() for alias in databases)
        except DatabaseFailure as error:
            logger.warning("The metrics of tasks cannot be read: %s", one_line(error))
            return
        ready = _gauge("tasks_ready", "Tasks in the database that can be claimed. Counting stops at 10000.", "queue")
        oldest = _gauge(
            "oldest_ready_task_age_seconds", "Time for which a task has been waiting to be claimed.", "queue"
        )
        others = _gauge(
            "tasks", "Tasks in the database by queue and status. Counting stops at 10000.", "queue", "status"
        )
        paused = _gauge("queue_paused", "1 while the queue is paused, else 0.", "queue")
        for queue, group in groupby(counts, attrgetter("queue")):
            here = list(group)
            ready.add_metric([queue], sum(each.ready for each in here))
            oldest.add_metric([queue], max(each.oldest_ready or 0.0 for each in here))
            for status in STATUSES:
                others.add_metric([queue, status], sum(getattr(each, status) for each in here))
            paused.add_metric([queue], any(each.is_paused for each in here))
        alive = _gauge("workers_alive", "Workers with a heartbeat within its limit.")
        alive.add_metric([], workers)
        yield from (ready, oldest, others, paused, alive)


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"django_pglock_{name}", help_text, labels=labels)


_collector = TaskCollector()
_registering = threading.Lock()
_is_registered = False


def register() -> None:
    """Add the metrics of tasks to the client's default registry. A second call does nothing."""
    global _is_registered
    with _registering:
        if not _is_registered:
            REGISTRY.register(_collector)
            _is_registered = True


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
