"""Every few seconds: rate, latency, memory, threads, sessions, dead rows and sizes. One line of JSON each."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg

from qa.soak.deployment import Deployment

#: Seconds between two samples.
EVERY = 10.0

SESSIONS = """
SELECT CASE WHEN application_name LIKE 'lockworker %%' THEN 'services of workers'
            WHEN application_name IN ('soak', 'dba') THEN 'soak' ELSE 'threads and clients' END, count(*)
FROM pg_stat_activity WHERE backend_type = 'client backend' GROUP BY 1
"""
TABLES = """
SELECT relname, n_live_tup, n_dead_tup, pg_table_size(relid), pg_indexes_size(relid)
FROM pg_stat_user_tables WHERE relname LIKE 'django_pglock_%%'
"""
RATE = """
SELECT count(*) FROM django_pglock_task WHERE finished_at >= to_timestamp(%s) AND finished_at < to_timestamp(%s)
"""
# Of atomic tasks: they wait for no other task, for no key and for no time.
LATENCY = """
SELECT percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY date_part('epoch', started_at - enqueued_at))
FROM django_pglock_task
WHERE finished_at >= to_timestamp(%s) AND finished_at < to_timestamp(%s)
  AND task_path = 'tests.sample.chaos_tasks.work_atomically' AND status = 'SUCCESSFUL' AND attempts = 1
"""


class Sampler(threading.Thread):
    """Write samples into a file until ``stop()``. Without a database, a sample has only the processes."""

    def __init__(self, deployment: Deployment, path: Path) -> None:
        super().__init__(name="sampler", daemon=True)
        self._deployment = deployment
        self._path = path
        self._end = threading.Event()
        self._session: psycopg.Connection[Any] | None = None

    def stop(self) -> None:
        """End the samples."""
        self._end.set()
        self.join()

    def run(self) -> None:
        """Take samples."""
        since = time.time()
        while not self._end.wait(EVERY):
            until = time.time()
            sample = {"at": until, "seconds": until - since, "processes": processes(self._deployment)}
            with contextlib.suppress(psycopg.Error):
                sample.update(self._database(since, until))
            with self._path.open("a") as file:
                file.write(json.dumps(sample) + "\n")
            since = until
        if self._session is not None:
            self._session.close()

    def _database(self, since: float, until: float) -> Mapping[str, Any]:
        if self._session is None or self._session.closed:
            self._session = psycopg.connect(
                host=str(self._deployment.server.folder), user="postgres", dbname="postgres", autocommit=True,
                application_name="soak", options="-c statement_timeout=5s", connect_timeout=5,
            )  # fmt: skip
        ask = self._session.execute
        sessions, tables = ask(SESSIONS).fetchall(), ask(TABLES).fetchall()
        [(finished,)] = ask(RATE, (since, until)).fetchall()
        [(latency,)] = ask(LATENCY, (since, until)).fetchall()
        return {
            "sessions": dict(sessions),
            "tables": {name.removeprefix("django_pglock_"): numbers for name, *numbers in tables},
            "finished": finished,
            "latency": latency,
        }


def processes(deployment: Deployment) -> dict[str, list[list[int]]]:
    """Return KiB of memory and threads of each process, by role."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for role, pid in deployment.roles():
        with contextlib.suppress(OSError, KeyError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            found[role].append([int(status["VmRSS"].split()[0]), int(status["Threads"])])
    return found
