"""The archive with concurrency: two processes that move, a killed one, and claims, results and waits meanwhile.

``test_a_live_table_is_converted_while_workers_claim`` moves two thousand tasks. ``PGLOCK_ARCHIVE_ROWS=1000000`` makes
it a million, and prints what it has measured.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from django_pglock.models import ArchivedTask, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import archive, archive_days
from django_pglock.store.archive import archive_window
from django_pglock.store.archive_days import drop_days
from django_pglock.store.archive_state import archive_state, turn_off, turn_on
from django_pglock.worker.upkeep import archive_keeping
from tests.conftest import NEVER
from tests.db.conftest import drop_archive
from tests.db.store.archiving import TWO_HOURS, walk
from tests.db.store.test_prune import make
from tests.sample import tasks
from tests.warm.process import start

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = int(os.environ.get("PGLOCK_ARCHIVE_ROWS", "2000"))
#: Finished tasks of the last days, each tenth of them failed.
FILL = """
INSERT INTO django_pglock_task (status, queue, task_path, backend, args, kwargs, attempts, worker, enqueued_at,
                                started_at, last_attempted_at, finished_at, result)
SELECT CASE WHEN n %% 10 = 0 THEN 'FAILED' ELSE 'SUCCESSFUL' END, 'default', 'tests.sample.tasks.echo', 'default',
       jsonb_build_array(n), '{"customer": "some name", "amount": 12.5}', 1, gen_random_uuid(),
       at.moment, at.moment, at.moment, at.moment, to_jsonb(n)
FROM generate_series(1, %s) AS n
CROSS JOIN LATERAL (SELECT now() - interval '2 hours' - (%s - n) * interval '4 days' / %s AS moment) AS at
"""


@pytest.fixture(autouse=True)
def own_archive(transactional_db):
    yield
    drop_archive()


def fill(count):
    with connection.cursor() as cursor:
        cursor.execute(FILL, [count, count, count])
        cursor.execute("VACUUM ANALYZE django_pglock_task")


def everything():
    """Return the ids in the table of tasks and those in the archive, after a check that none is in both."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        here = set(Task.objects.values_list("pk", flat=True))
        there = list(ArchivedTask.objects.values_list("pk", flat=True))
    assert len(there) == len(set(there)), "none twice"
    assert here.isdisjoint(there)
    return here, set(there)


def test_two_concurrent_moves_archive_each_task_once(in_threads):
    fill(1000)
    before, _ = everything()
    counts = in_threads(lambda _number: walk(batch=25), 2)
    count = sum(counts) + walk()
    here, there = everything()
    assert here | there == before
    assert count == len(there) == 900


KILLED = """
import django
django.setup()
from django_pglock.store import archive
statement = archive.MOVE_TO_ARCHIVE
archive.MOVE_TO_ARCHIVE = statement.replace("count(*) FROM kept", "count(*) FROM kept, pg_sleep(600)")
archive.archive_window("default", 0, None)
"""


def test_a_mover_that_is_killed_in_the_middle_loses_nothing(eventually):
    fill(500)
    before, _ = everything()
    url = f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{connection.settings_dict['NAME']}"
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    mover = start([sys.executable, "-c", KILLED], env=environment)
    try:
        sleeping = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

        def pids():
            with connection.cursor() as cursor:
                cursor.execute(sleeping)
                return cursor.fetchall()

        [(pid,)] = eventually(pids)
        assert everything() == (before, set()), "not committed yet"
        mover.send_signal(signal.SIGKILL)
        mover.wait(NEVER)
        with connection.cursor() as cursor:
            # The server notices the end of the process when it answers. Here, now.
            cursor.execute("SELECT pg_terminate_backend(%s)", [pid])
        eventually(lambda: not pids())
    finally:
        mover.kill()
    assert everything() == (before, set())
    assert walk() == 450
    here, there = everything()
    assert here | there == before


def test_a_result_is_found_at_each_moment_of_the_move(in_threads):
    """A reader queries the table of tasks, the task moves, and the reader queries the archive."""
    turn_on("default")
    rows = [make(days=TWO_HOURS, task_path=tasks.echo.module_path, result=number) for number in range(40)]
    ended = threading.Event()

    def work(number):
        if number == 0:
            try:
                return sum(archive_window("default", row.pk - 1, None, batch=1)[0] for row in rows)
            finally:
                ended.set()
        looks = 0
        while not ended.is_set() or looks < len(rows):
            row = rows[looks % len(rows)]
            result = tasks.echo.get_result(str(row.pk))
            assert result.is_finished
            assert result.return_value == looks % len(rows)
            looks += 1
        return looks

    moved, *looks = in_threads(work, 3)
    assert moved == len(rows)
    assert min(looks) >= len(rows)


def test_a_wait_for_a_task_that_moves_meanwhile_ends():
    turn_on("default")
    row = make(days=TWO_HOURS, task_path=tasks.echo.module_path, result=7)
    result = tasks.echo.get_result(str(row.pk))
    walk()
    assert result.wait(NEVER).return_value == 7


def test_a_task_does_not_wait_for_a_dependency_that_moves_to_the_archive(in_threads):
    """The enqueue and the move lock the same row. Neither of them cancels the new task."""
    turn_on("default")
    rows = [make(days=TWO_HOURS) for _ in range(40)]

    def work(number):
        if number:
            return sum(archive_window("default", row.pk - 1, None, batch=1)[0] for row in rows)
        return [int(tasks.echo.using(after=[row.pk]).enqueue(1).id) for row in reversed(rows)]

    ids, _ = in_threads(work, 2)
    assert set(Task.objects.filter(pk__in=ids).values_list("status", flat=True)) == {"READY"}
    walk()
    assert moved_ids() >= {row.pk for row in rows}


def moved_ids():
    return everything()[1]


def test_turning_the_archive_off_during_a_move_leaves_the_remaining_tasks(monkeypatch):
    monkeypatch.setattr(archive_keeping, "UNTIL_FIRST_MOVE", 0.0)
    monkeypatch.setattr(archive_keeping, "TIME_TO_MOVE", 0.0)
    monkeypatch.setattr(archive_keeping, "MOVED_AT_ONCE", 50)
    fill(200)
    before, _ = everything()
    turn_on("default")
    keeping = archive_keeping.ArchiveKeeping("default")
    keeping.run_if_due()
    turn_off("default")
    for _ in range(3):
        keeping._check_at = 0.0
        assert keeping.run_if_due() is None, "there is nothing to continue soon"
    here, there = everything()
    assert here | there == before
    assert 0 < len(there) <= 50
    one = min(there)
    assert tasks.echo.get_result(str(one)).is_finished, "the archive is read while it has days"


def test_a_long_reader_of_the_archive_delays_only_the_drop():
    make(days=9), make(days=TWO_HOURS)
    walk(days=30)
    reader = dedicated_connection("default")
    try:
        with reader.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT count(*) FROM django_pglock_archivedtask")
            began = time.monotonic()
            assert drop_days("default", 7) == []
            assert len(archive_state("default").days) == 2
            make(days=TWO_HOURS)
            assert walk() == 1, "nothing queues behind the drop"
            assert time.monotonic() - began < NEVER / 2
            cursor.execute("COMMIT")
    finally:
        reader.close()
    assert len(drop_days("default", 7)) == 1


def test_a_drop_that_a_reader_stops_halfway_is_finished_later(monkeypatch):
    """The reader begins between the check for readers and the drop."""
    make(days=9)
    walk(days=30)
    monkeypatch.setattr(archive_days, "ARCHIVE_IS_USED", "SELECT false")
    monkeypatch.setattr(archive_days, "LIMITS", {**archive_days.LIMITS, "lock_timeout": "200ms"})
    reader = dedicated_connection("default")
    try:
        with reader.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT count(*) FROM django_pglock_archivedtask")
            assert drop_days("default", 7) == []
            assert archive_state("default").days == (), "nobody who begins now sees it"
            cursor.execute("COMMIT")
    finally:
        reader.close()
    assert len(drop_days("default", 7)) == 1
    assert drop_days("default", 7) == []


def test_a_live_table_is_converted_while_workers_claim(worker, eventually, monkeypatch, capsys):
    monkeypatch.setattr(archive_keeping, "UNTIL_FIRST_MOVE", 0.0)
    monkeypatch.setattr(archive_keeping, "CHECK_INTERVAL", 0.0)
    began = time.monotonic()
    fill(ROWS)
    filled = time.monotonic() - began
    before, _ = everything()
    sizes = [size("django_pglock_task")]
    worker()
    # In the long form as many as during the move, so that both are measured under the same load of the machine.
    delays = [delay() for _ in range(max(20, ROWS // 200 if "PGLOCK_ARCHIVE_ROWS" in os.environ else 0))]
    call_command("locktasks", "archive", "on", verbosity=0)
    began, beside = time.monotonic(), []
    left: int | None = 1
    while left is not None and time.monotonic() - began < NEVER * max(1, ROWS / 20_000):
        beside.append(delay())
        if len(beside) % 10 == 0:
            left = first_from(left)
    seconds = time.monotonic() - began
    assert left is None
    here, there = everything()
    assert here | there >= before
    assert len(there) == ROWS - ROWS // 10
    assert Task.objects.filter(pk__in=before, status="FAILED").count() == ROWS // 10
    with connection.cursor() as cursor:
        cursor.execute("VACUUM django_pglock_task")
    sizes.append(size("django_pglock_task"))
    partitions = sum(size(name) for name in partition_names())
    days, dropped_from = archive_state("default").days, time.monotonic()
    today = datetime.now(timezone.utc).date()
    dropped = drop_days("default", 0)
    seconds_to_drop = time.monotonic() - dropped_from
    # In the first hours of a day, no task of that day has been moved yet.
    assert {day for day in days if day < today} <= set(dropped) <= set(days) - {datetime.now(timezone.utc).date()}
    with capsys.disabled(), suppress(OSError):
        if "PGLOCK_ARCHIVE_ROWS" in os.environ:
            print(
                f"\n{ROWS:,} rows in {len(days)} days: filled in {filled:.0f} s, moved in {seconds:.1f} s "
                f"({len(there) / seconds:,.0f} a second); tasks table {sizes[0] / 1e6:,.0f} MB before, "
                f"{sizes[1] / 1e6:,.0f} MB after VACUUM; archive {partitions / 1e6:,.0f} MB; "
                f"{len(dropped)} days dropped in {seconds_to_drop:.2f} s; from enqueue to result: "
                f"{described(delays)} before, {described(beside)} beside the move ({len(beside)} tasks)"
            )


def delay():
    """Return how long it takes from enqueueing a task until its result is there: a claim and a settle."""
    began = time.monotonic()
    tasks.echo.enqueue(1).wait(NEVER)
    return time.monotonic() - began


def described(delays):
    ordered = sorted(delays)
    shares = {"median": 0.5, "99 of 100 within": 0.99, "longest": 1.0}
    places = {name: min(len(ordered) - 1, int(len(ordered) * share)) for name, share in shares.items()}
    return ", ".join(f"{name} {ordered[place] * 1000:.0f} ms" for name, place in places.items())


def first_from(id_):
    """Return the first task from this id on that is to be moved."""
    return archive.movable("default", 7.0).filter(pk__gte=id_).values_list("pk", flat=True).first()


def size(table):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_total_relation_size(%s::regclass)", [table])
        return cursor.fetchone()[0]


def partition_names():
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname FROM pg_class WHERE relname ~ '^django_pglock_archivedtask_[0-9]{8}$'")
        return [name for (name,) in cursor.fetchall()]
