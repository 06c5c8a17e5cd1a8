"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest
from django.db import Error as DatabaseFailure
from django.db import connection, connections
from django.db.backends.postgresql.base import DatabaseWrapper
from django.test import TransactionTestCase
from psycopg.pq import TransactionStatus

from django_pglock import loggers
from django_pglock.postgres.stopping import stopping_wrapper
from django_pglock.store import statements
from django_pglock.store import wake as wakeup
from django_pglock.tasks import registry
from example_project.postgres import PrivatePostgres
from tests import clusters
from tests.db.locks.sessions import Somebody
from tests.distribution import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401
from tests.in_process import InProcessWorker
from tests.warm.process import start

ROOT = Path(__file__).resolve().parent.parent
#: The Python that made our environment. In Python 3.10 ``sys._base_executable`` is the environment's own Python.
BASE_PYTHON = f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}"
#: Seconds after which something counts as never happening. Only what is broken takes so long, on any machine.
NEVER = 120.0

# The time that an example takes depends on the machine.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")

#: Deletes all rows that a test has written. Rows of small tables are deleted, because TRUNCATE takes as long as many
#: tests.
EMPTY = """
DO $$ DECLARE filled record; BEGIN
    -- No trigger captures the DELETEs.
    PERFORM set_config('session_replication_role', 'replica', true);
    -- Otherwise a test that leaves an open transaction stops all tests that follow.
    PERFORM set_config('lock_timeout', '120s', true);
    FOR filled IN
        SELECT oid::regclass AS name, pg_relation_size(oid) AS size FROM pg_class
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND pg_relation_size(oid) > 0
          AND relname NOT IN ('auth_permission', 'django_content_type', 'django_migrations')
    LOOP
        EXECUTE format(
            CASE WHEN filled.size > 1000000 THEN 'TRUNCATE %s CASCADE' ELSE 'DELETE FROM %s' END, filled.name);
    END LOOP;
END $$
"""


def empty(self: TransactionTestCase) -> None:
    for alias in self._databases_names(include_mirrors=False):
        with connections[alias].cursor() as cursor:
            cursor.execute(EMPTY)


def keep_sessions(self: TransactionTestCase) -> bool:
    """Let the next test use the session of this one, after a reset: a new session takes as long as many tests."""
    for each in connections.all(initialized_only=True):
        if can_be_kept(each):
            each.connection.execute("DISCARD ALL")
            each.ensure_timezone()
        else:
            each.close()
    return False


def can_be_kept(connection: DatabaseWrapper) -> bool:
    """Return whether a test has left nothing in Django's connection but what ``DISCARD ALL`` removes."""
    raw = connection.connection
    return (
        raw is not None
        and raw.info.transaction_status == TransactionStatus.IDLE
        and connection.get_autocommit()
        and not (connection.run_on_commit or connection.savepoint_ids)
        and set(connection.execute_wrappers) <= {stopping_wrapper}
        and vars(connection).keys().isdisjoint({"close", "_django_pglock_locks"})
        and raw not in statements._prepared
        and not (raw._notify_handlers or raw._notice_handlers)
    )


def report_or_raise(record: logging.LogRecord) -> None:
    """Report that the log has raised. But raise if the text of a record does not fit its values: this is our error."""
    record.getMessage()
    report(record)


report, loggers.report = loggers.report, report_or_raise
clusters.share()

# Django's own also makes all content types and permissions anew, after each test.
TransactionTestCase._fixture_teardown = empty
TransactionTestCase._should_reload_connections = keep_sessions


# Modules and thousands of tests stay: the garbage collector would read them again and again, and find nothing.
gc.disable()


def pytest_collection_finish() -> None:
    """Start the garbage collector. It reads only what is made from here on."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """Wait until a function returns something true, and return that; fail with the reason after a while."""

    def wait(function: Callable[[], Any], *, seconds: float = NEVER, why: str = "it never came true") -> Any:
        deadline, pause = time.monotonic() + seconds, 0.01
        while time.monotonic() < deadline:
            if value := function():
                return value
            # Most conditions query the database. The pauses between two calls grow.
            time.sleep(pause)
            pause = min(1.4 * pause, 0.2)
        pytest.fail(why)

    return wait


def wait_until(is_true: Callable[[], Any], why: str) -> None:
    """Wait outside of tests until something is true, also while the database cannot be reached."""
    deadline = time.monotonic() + NEVER
    while time.monotonic() < deadline:
        try:
            if is_true():
                return
        except DatabaseFailure:
            connection.close()
        time.sleep(0.1)
    raise TimeoutError(why)


@pytest.fixture
def in_threads() -> Callable[..., list[Any]]:
    """Run a function in several threads at once, each with a connection of its own, and return what they return."""

    def run(function: Callable[..., Any], count: int) -> list[Any]:
        start = threading.Barrier(count)
        results: list[Any] = [None] * count

        def work(number: int) -> None:
            try:
                start.wait(NEVER)
                results[number] = function(number)
            except BaseException as error:
                results[number] = error
            finally:
                connections.close_all()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NEVER)
            assert not thread.is_alive(), "a thread hangs"
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run


@pytest.fixture
def in_kept_threads() -> Iterator[Callable[..., list[Any]]]:
    """Like ``in_threads``, for many rounds: the threads and their connections are kept until the end of the test.

    A new connection takes more time than most statements. Then the rounds have less of a race.
    """
    pools: dict[int, ThreadPoolExecutor] = {}

    def run(function: Callable[..., Any], count: int) -> list[Any]:
        # Each thread waits until all have begun, so none gets two calls.
        start = threading.Barrier(count)

        def work(number: int) -> Any:
            start.wait(NEVER)
            return function(number)

        pool = pools.setdefault(count, ThreadPoolExecutor(count))
        running = [pool.submit(work, number) for number in range(count)]
        return [each.result(NEVER) for each in running]

    yield run
    for count, pool in pools.items():
        run(lambda _: connections.close_all(), count)
        pool.shutdown()


@pytest.fixture(scope="module", autouse=True)
def sessions_of_this_module() -> Iterator[None]:
    """Let a session that a test has lost, and has not closed, fail the last test of its module, and not a later one."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def notifications_of_this_test() -> None:
    """Clear the caches of earlier tests: rows that were rolled back, and the answer that no worker sleeps."""
    wakeup._no_worker_slept_at.clear()
    for each in connections.all(initialized_only=True):
        each.__dict__.pop(wakeup._PENDING, None)


@pytest.fixture(autouse=True)
def wrappers_of_this_test() -> None:
    """Take away wrappers that a test before this one left: it may have run a task, or a worker, in this thread."""
    for each in connections.all(initialized_only=True):
        kept = (wrapper for wrapper in each.execute_wrappers if wrapper is stopping_wrapper)
        each.execute_wrappers[:] = [wrapper for wrapper in kept if wrapper is not stopping_wrapper]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the functions that this test decorates: the workers of other tests would enqueue their schedules."""
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has another process number than the server, as behind PgBouncer: so a worker does not listen."""
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda info: 1))


@pytest.fixture
def worker(transactional_db: None) -> Iterator[Callable[..., InProcessWorker]]:
    """Start a worker in threads of this process; it is shut down at the end."""
    started: list[InProcessWorker] = []

    def start(**options: Any) -> InProcessWorker:
        worker = InProcessWorker(**{"threads": 2, "grace": 5, **options})
        worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.shutdown()
        # The process continues, and so do functions that exceed the grace period, with their sessions.
        deadline = time.monotonic() + 3
        while not worker.executor.is_idle and time.monotonic() < deadline:
            time.sleep(0.01)


def database_url(name: str = "") -> str:
    """Return the address of a database on the tests' server: by default, of the one that the tests have made there."""
    return f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{name or connection.settings_dict['NAME']}"


def environment_at(url: str = "", **environment: str) -> dict[str, str]:
    """Return the environment of a process on a database, by default on that of the tests."""
    path = [*filter(None, [environment.pop("PYTHONPATH", None), os.environ.get("PYTHONPATH")]), str(ROOT)]
    return {
        **os.environ,
        "DATABASE_URL": url or database_url(),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": os.pathsep.join(path),
        **environment,
    }


def session_at(server: PrivatePostgres, **options: str) -> psycopg.Connection[Any]:
    """Return a session of the superuser of a server of our own."""
    return psycopg.connect(host=str(server.folder), user="postgres", dbname="postgres", autocommit=True, **options)


def ask(server: PrivatePostgres, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    """Run one statement in a session of its own, and return its rows."""
    with session_at(server) as session:
        answer = session.execute(sql, params or None)
        return answer.fetchall() if answer.description else []


def make_tables(server: PrivatePostgres, **environment: str) -> None:
    """Migrate a server of one's own, by a process with the warm parent of the workers that it will have."""
    command = [sys.executable, str(ROOT / "manage.py"), "migrate", "-v0", "--run-syncdb"]
    process = start(command, env=environment_at(server.url, **environment))
    assert process.wait(NEVER) == 0


class WorkerProcess:
    """``manage.py runlockworker`` as users run it, on the tests' database.

    It is a new interpreter, unless ``is_forked``.
    """

    def __init__(self, *arguments: str, url: str = "", is_forked: bool = True, **environment: str) -> None:
        # The autoreloader starts the process again, with its original command line.
        self.process = (start if is_forked and "--reload" not in arguments else subprocess.Popen)(
            [sys.executable, str(ROOT / "manage.py"), "runlockworker", *arguments],
            env=environment_at(url, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + NEVER
        while text not in self.output:
            if self.process.poll() is not None:
                self._reader.join(30)  # its last output may not have been read yet
                assert text in self.output, f"the worker ended:\n{self.output}"
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.output}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """End the process in any state. A parent passes SIGTERM on to its child, which SIGKILL would orphan."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        # The second signal ends running tasks. One that comes too soon after another is lost.
        for _ in range(60):
            if self.process.poll() is not None:
                break
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        else:
            self.process.kill()
        self.process.wait(60)
        self._reader.join(5)
        if self.process.stdout is not None and not self._reader.is_alive():
            self.process.stdout.close()

    def wait(self) -> int:
        code = self.process.wait(NEVER)
        self._reader.join(30)
        return code


@pytest.fixture
def worker_process(transactional_db: None) -> Iterator[Callable[..., WorkerProcess]]:
    """Start ``manage.py runlockworker`` and wait until it is ready; whatever is left is killed at the end."""
    started: list[WorkerProcess] = []

    def start(*arguments: str, **options: Any) -> WorkerProcess:
        process = WorkerProcess(*arguments, **options)
        started.append(process)
        process.wait_for("is ready")
        return process

    yield start
    for process in started:
        process.end()


@pytest.fixture
def somebody() -> Iterator[Somebody]:
    """Another session, which frees its locks at the end."""
    other = Somebody()
    yield other
    other.leaves()
