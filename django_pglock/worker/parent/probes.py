"""The probes: tell orchestrators over HTTP whether the worker lives and works, and its metrics for Prometheus.

Each request has a thread of its own and a time limit, and only the metrics of the tasks in the database need the
database. The answers contain nothing secret: no arguments, no errors, no addresses. Most workers answer no probes, and
need no memory for an HTTP server, so they do not import this module.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from itertools import accumulate, chain
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from django.db import connections

from django_pglock.error_reading import one_line
from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import CONNECTION_ERRORS
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.count import COUNTED, QueueCounts
from django_pglock.store.numbers import BOUNDS, OUTCOMES, STEPS, TIMEOUTS, Counts, counters, depths, suspended
from django_pglock.worker.options import probe_address
from django_pglock.worker.parent.health import Health

logger = get_logger(WORKER)

#: Seconds for which a request may wait for its client.
LONGEST_WAIT = 5.0
PLAIN = "text/plain; charset=utf-8"

PREFIX = "django_pglock_"
#: The characters that Prometheus requires to be escaped in the value of a label.
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: The buckets that are shown. Their bounds grow by a factor of 4, up to 70 minutes. They are few,
#: because each bucket is a time series for each function, queue and process.
SHOWN = {**{bucket: str(BOUNDS[bucket]) for bucket in range(0, 45, 4)}, len(BOUNDS): "+Inf"}
#: Metrics of what the children do now: the name, the name in their reports, and the text.
GAUGES = (
    ("processes", "processes", "Number of processes that run tasks."),
    ("threads", "threads", "Number of threads that run tasks."),
    ("tasks_in_flight", "in_flight", "Tasks claimed and not settled yet."),
    ("tasks_running", "running", "Tasks that run now."),
    ("outcomes_waiting", "unsettled", "Outcomes that wait for the database."),
)


class ProbeServer(ThreadingTCPServer):
    """An HTTP server. Not that of http.server, which queries the DNS for its name when it starts.

    It listens at ``port`` or ``"ADDRESS:PORT"``; port 0 takes any free one. Raises ``ConfigurationError`` if that is
    not possible.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, health: Health, given: int | str) -> None:
        self.health = health
        host, port = probe_address(given)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"Probes cannot be answered at {host} port {port}: {error}.") from None
        self.port: int = self.server_address[1]
        logger.info("Answering probes at %s port %d.", host, self.port)

    def start(self) -> None:
        """Answer in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.25,), name="lockworker-probes", daemon=True).start()

    def stop(self) -> None:
        """Stop listening. Does not wait for requests that are being answered."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("A probe was not answered.", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = LONGEST_WAIT
    server: ProbeServer

    def do_GET(self) -> None:
        """Answer with header and body."""
        status, kind, text = self._response()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - named by the library

    def _response(self) -> tuple[HTTPStatus, str, str]:
        match urlsplit(self.path).path:
            case "/livez":
                return _verdict(self.server.health.hung())
            case "/readyz":
                return _verdict(self.server.health.unready())
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE, exposition(self.server.health)
            case _:
                return HTTPStatus.NOT_FOUND, PLAIN, "There are /livez, /readyz and /metrics.\n"

    def version_string(self) -> str:
        """Return a name without versions."""
        return "django_pglock"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the library
        logger.debug("Probe: " + format, *args)


def _verdict(trouble: str | None) -> tuple[HTTPStatus, str, str]:
    if trouble is None:
        return HTTPStatus.OK, PLAIN, "ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, f"{trouble}\n"


# The metrics, in Prometheus' text format 0.0.4.


class Sample(NamedTuple):
    """A number with its labels. ``part`` is what a histogram adds to the name."""

    number: float
    labels: dict[str, str] = {}
    part: str = ""


class Family(NamedTuple):
    """A metric with its samples."""

    name: str
    text: str
    samples: Iterable[Sample]
    kind: str = "gauge"


#: Held while a request reads the numbers of the tasks.
_reading = threading.Lock()


def exposition(health: Health) -> str:
    """Return what the children of a worker do now, and what is in its databases, as text."""
    return "".join(line for family in chain(gauges(health), of_databases(health)) for line in _lines(family))


def gauges(health: Health) -> Iterator[Family]:
    """Yield the metrics of the worker itself."""
    is_ready = Sample(int(health.unready() is None))
    yield Family("worker_ready", "1 while the worker claims tasks, else 0.", [is_ready])
    now = health.now
    for name, counted, text in GAUGES:
        yield Family(name, text, [Sample(now[counted])])
    if (age := health.beat_age()) is not None:
        yield Family("heartbeat_age_seconds", "Time since the last heartbeat that was written.", [Sample(age)])


def of_databases(health: Health) -> list[Family]:
    """Return the metrics of the tasks in the databases. None, if the last request for them still waits there."""
    if not _reading.acquire(blocking=False):
        return []
    queues: list[QueueCounts] = []
    waiting: list[tuple[str, str, int]] = []
    attempts: dict[tuple[str, str], Counts] = {}
    try:
        for crew in health.crews:
            connections[crew.using] = dedicated_connection(crew.using, application_name="lockworker metrics")
            queues += depths(crew.using)
            waiting += suspended(crew.using)
            for each in counters(crew.using):
                attempts.setdefault((each.queue, each.task_path), Counts()).add(each.counts)
    except CONNECTION_ERRORS as error:
        logger.warning("The metrics of tasks cannot be read: %s", one_line(error))
        return []
    finally:
        connections.close_all()
        _reading.release()
    return [*depth_families(queues), suspended_family(waiting), *attempt_families(attempts)]


def depth_families(queues: Iterable[QueueCounts]) -> Iterator[Family]:
    """Yield the metrics of the queues, which are the same from each worker and from the view for web processes.

    Queues of the same name in several databases are one.
    """
    by_name: dict[str, list[QueueCounts]] = {}
    for queue in queues:
        by_name.setdefault(queue.queue, []).append(queue)
    found = [({"queue": name}, by_name[name]) for name in sorted(by_name)]

    ready = [Sample(sum(each.counts["READY"] for each in several), labels) for labels, several in found]
    ages = [Sample(max(each.oldest_ready or 0.0 for each in several), labels) for labels, several in found]
    tasks = [
        Sample(sum(each.counts[status] for each in several), {**labels, "status": status.lower()})
        for labels, several in found
        for status in COUNTED
    ]
    paused = [Sample(int(any(each.paused_at for each in several)), labels) for labels, several in found]
    yield Family("tasks_ready", "Tasks in the database that can be claimed. Counting stops at 10000.", ready)
    yield Family("oldest_ready_task_age_seconds", "Time for which a task has been waiting to be claimed.", ages)
    yield Family("tasks", "Tasks in the database by queue and status. Counting stops at 10000.", tasks)
    yield Family("queue_paused", "1 while the queue is paused, else 0.", paused)


def suspended_family(waiting: Iterable[tuple[str, str, int]]) -> Family:
    """Return the metric of the tasks that are suspended between two of their steps. Queues of one name are one."""
    counts: Counter[tuple[str, str]] = Counter()
    for queue, kind, count in waiting:
        counts[queue, kind.lower()] += count
    text = "Suspended tasks by queue and kind, among the newest 10000 scheduled and 10000 blocked ones."
    samples = [Sample(number, {"queue": queue, "kind": kind}) for (queue, kind), number in sorted(counts.items())]
    return Family("tasks_suspended", text, samples)


def attempt_families(attempts: dict[tuple[str, str], Counts]) -> Iterator[Family]:
    """Yield the metrics of all attempts, by queue and function."""
    found = [({"queue": queue, "function": path}, counts) for (queue, path), counts in attempts.items()]
    ends = [Sample(getattr(counts, end), {**labels, "outcome": end}) for labels, counts in found for end in OUTCOMES]
    text = "Attempts of all workers that ended, by queue, function and outcome."
    yield Family("attempts_total", text, ends, "counter")
    for name, kind, text in (
        ("steps_recorded_total", STEPS, "Steps of tasks that were recorded, by queue and function."),
        ("waits_timed_out_total", TIMEOUTS, "Waits for an event that ended by their timeout, by queue and function."),
    ):
        # Most functions have no steps.
        yield Family(name, text, [Sample(n, labels) for labels, each in found if (n := getattr(each, kind))], "counter")
    for name, text in (
        ("wait", "Time from ready to claimed, by queue and function."),
        ("run", "Time for which the function ran, by queue and function."),
    ):
        samples = [
            sample
            for labels, counts in found
            for sample in _histogram(labels, getattr(counts, name), getattr(counts, f"{name}_seconds"))
        ]
        yield Family(f"task_{name}_seconds", text, samples, "histogram")


def _histogram(labels: dict[str, str], buckets: Iterable[int], total: float) -> Iterator[Sample]:
    ends = list(accumulate(buckets))
    for bucket, bound in SHOWN.items():
        yield Sample(ends[bucket], {**labels, "le": bound}, "_bucket")
    yield Sample(total, labels, "_sum")
    yield Sample(ends[-1], labels, "_count")


def _lines(family: Family) -> Iterator[str]:
    name = PREFIX + family.name
    yield f"# HELP {name} {family.text}\n# TYPE {name} {family.kind}\n"
    for number, labels, part in family.samples:
        text = ",".join(f'{label}="{value.translate(ESCAPES)}"' for label, value in labels.items())
        yield f"{name}{part}{f'{{{text}}}' if text else ''} {number}\n"
