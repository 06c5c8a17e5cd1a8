"""Prometheus: what the database knows of tasks, in the registry of the official client; the extra ``[prometheus]``.

A worker answers with its own metrics at its probe port. These are for web processes, which run also when no worker
does. ``register()`` adds them to what the process exports already, as with django-prometheus; ``metrics`` is a view::

    urlpatterns += [path("metrics", django_pglock.contrib.prometheus.metrics)]
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

from django.db import Error as DatabaseFailure
from django.http import HttpRequest, HttpResponse
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from django_pglock.store.sql import rows_of
from django_pglock.worker.options import our_backends
from django_pglock.worker.upkeep.ready_counts import ReadyCounts

logger = logging.getLogger("django_pglock.tasks")

#: Where the metrics of several processes of one server gather. The client library reads the same variable.
MULTIPLE_PROCESSES = "PROMETHEUS_MULTIPROC_DIR"


class TaskCollector(Collector):  # type: ignore[misc]
    """The tasks and the workers of all databases that the backends in ``TASKS`` use.

    Ready tasks are counted as a worker counts them: at most every ten seconds in a process, and up to 10,000 in each
    queue.
    """

    def __init__(self) -> None:
        self._counts: dict[str, ReadyCounts] = {}

    def describe(self) -> list[Metric]:
        """Return nothing: to register the collector must not ask the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none, with a warning in the log, while a database cannot be reached."""
        databases = sorted({backend.database for backend in our_backends()})
        try:
            found = [self._ready(alias) for alias in databases]
            alive = sum(rows_of("Worker", alias).alive().count() for alias in databases)
        except DatabaseFailure as error:
            logger.warning("The metrics of tasks cannot be read: %s", str(error).strip())
            return
        ready = GaugeMetricFamily(
            "django_pglock_tasks_ready",
            "Tasks in the database that can be claimed, up to 10000 or more.",
            labels=["queue"],
        )
        oldest = GaugeMetricFamily(
            "django_pglock_oldest_ready_task_age_seconds",
            "Time for which a task has been waiting to be claimed.",
            labels=["queue"],
        )
        for queue in sorted({queue for counts in found for queue in counts}):
            here = [counts[queue] for counts in found if queue in counts]
            ready.add_metric([queue], sum(count for count, _ in here))
            oldest.add_metric([queue], max(age for _, age in here))
        yield from (ready, oldest)
        yield GaugeMetricFamily(
            "django_pglock_workers_alive", "Workers with a heartbeat within its limit.", value=alive
        )

    def _ready(self, alias: str) -> dict[str, tuple[int, float]]:
        counts = self._counts.setdefault(alias, ReadyCounts(alias))
        counts.ask()
        counts.look()
        return counts.ask()


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
