"""Verbs at once: no row or task is claimed, counted, retried or deleted twice, and none is lost."""

from __future__ import annotations

import math
from collections import Counter
from datetime import datetime, timedelta
from datetime import timezone as zones
from threading import Event
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models import BooleanField, F
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock.models import Number, Task
from django_pglock.store import numbers
from django_pglock.store.bulk import Work, change_batch, enqueue_redrive
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.insert_tasks import Call, insert_calls
from django_pglock.store.numbers import KEPT, Counts, add_numbers, depths, prune_numbers, series
from django_pglock.store.prune import ages_of, delete_free, outdated
from django_pglock.store.release import release
from django_pglock.store.rescue import rescue
from tests.conftest import NEVER
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail
from tests.db.store.workers import beat
from tests.sample import tasks
from tests.sample.models import Letter, Parcel, Sender
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


FREE = [Parcel.Status.NEW, Parcel.Status.RETURNED]


def test_eight_threads_move_every_row_exactly_once(in_threads):
    sender = Sender.objects.create()
    Parcel.objects.bulk_create(Parcel(sender=sender, weight=n, status=FREE[n % 2]) for n in range(200))

    def move_all(number):
        moved = []
        free = Parcel.objects.filter(status__in=FREE).order_by("id")
        while rows := free.claim_update(7, status="taken", attempts=F("attempts") + 1):
            moved += [(row.pk, row.attempts) for row in rows]
        return moved

    moved = [each for rows in in_threads(move_all, 8) for each in rows]
    assert sorted(moved) == [(pk, 1) for pk in sorted(Parcel.objects.values_list("pk", flat=True))]


def test_passes_of_four_threads_handle_every_row_exactly_once(in_threads):
    """Each pass skips rows that other threads have locked, and does not end early because of them."""
    Letter.objects.bulk_create(Letter(text=str(n)) for n in range(60))

    def take_all(number):
        taken = []

        def handle(letter):
            taken.append(letter.pk)
            Letter.objects.filter(pk=letter.pk).update(status="taken")

        while Letter.objects.filter(status="new").claim_each(7, handle):
            pass
        return taken

    taken = [pk for each in in_threads(take_all, 4) for pk in each]
    assert len(taken) == 60
    assert set(Counter(taken).values()) == {1}


def test_eight_workers_claim_every_task_exactly_once(in_threads):
    """The claim statement of the worker, under the same conditions."""
    Task.objects.bulk_create(
        Task(queue="default", backend="default", task_path="tests.sample.tasks.nothing") for _ in range(300)
    )

    def claim_all(number):
        worker = uuid4()
        statement = claim_statement("default", worker=worker, paths=["tests.sample.tasks.nothing"])
        claims = []
        while rows := statement.execute(11, "default"):
            claims += claims_of(rows, worker)
        return [(claim.id, claim.attempt) for claim in claims]

    claims = [claim for each in in_threads(claim_all, 8) for claim in each]
    assert len(claims) == 300
    assert len(set(claims)) == 300
    assert set(Task.objects.values_list("status", "attempts")) == {("RUNNING", 1)}


# Pruning concurrent with transactions that begin to wait for a task.


LONG_AGO = Now() - timedelta(days=1000)


def test_prune_keeps_a_task_that_gets_a_dependent_meanwhile(in_threads, eventually):
    """The waiter is committed after the snapshot of the statement that locks, and before it locks. Its process is slow
    to look whether the task has ended."""
    old = Task.objects.create(
        status="SUCCESSFUL", task_path=tasks.nothing.module_path, enqueued_at=LONG_AGO, finished_at=LONG_AGO
    )
    sleeping = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"

    def is_sleeping():
        return execute_sql(sleeping)[0] == (True,)

    def work(number):
        if number == 0:
            # Evaluated once, before the first row is read.
            slow = Task.objects.filter(RawSQL("(SELECT pg_sleep(1.5)::text = '')", (), output_field=BooleanField()))
            return delete_free(outdated(slow, ages_of()))
        eventually(is_sleeping)
        with transaction.atomic():
            # As if the process were killed right after its commit, so that nothing is released.
            [waiting] = insert_calls("default", tasks.nothing.using(after=old.pk), [Call("[]", "{}")], "{}")
        return waiting.id

    deleted, waiting = in_threads(work, 2)
    assert deleted == 0
    release("default", [old.pk])
    assert Task.objects.get(pk=waiting).status == "READY", "not cancelled"
    assert Task.objects.prune() == 1


# Concurrent redrives: a group gets one, and tasks of two groups or of two redrives are retried once each.


def test_concurrent_redrives_of_a_group_become_one_redrive(in_threads):
    made = in_threads(lambda _: enqueue_redrive("default", 7, 1), 4)
    assert len({id_ for id_, _ in made}) == 1
    assert sorted(is_new for _, is_new in made) == [False, False, False, True]


def test_two_redrives_of_one_group_retry_each_task_once(in_threads):
    """As when one person retries the group at once while another person redrives it."""
    rows = [fail(fingerprint=7, queue="elsewhere") for _ in range(40)]
    workers = [make("RUNNING", attempts=1) for _ in range(2)]
    before = timezone.now()

    def run(number):
        done, is_over, work = 0, False, Work("retry", fingerprint=7)
        while not is_over:
            done, is_over, _ = change_batch("default", work, before=before, limit=5, by=workers[number].pk, attempt=1)
        return done

    done = in_threads(run, 2)
    left = Task.objects.filter(pk__in=[row.pk for row in rows], status="FAILED").count()
    assert sum(done) + left == 40, "no task is counted by both"
    assert Task.objects.filter(queue="elsewhere", status="READY").count() == 40 - left


# A reset of stuck tasks beside a worker that claims one of them.


GATE = 4711


WAITS_AT_GATE = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted)"


def claim(worker):
    return claim_statement("default", worker=worker, paths=[tasks.nothing.module_path]).execute(1, "default")


def test_a_task_that_a_new_worker_has_claimed_meanwhile_is_not_reset(in_threads, eventually):
    """The new worker registers after the snapshot of the statement that resets, and before it reads a row."""
    tasks.nothing.enqueue()
    assert claim(uuid4()), "by a worker without a row, so it is dead"
    living, is_closed = uuid4(), Event()

    def reset_or_claim(number):
        if number == 0:
            assert is_closed.wait(NEVER)
            # Evaluated once, before the first row is read.
            at_gate = RawSQL(f"(SELECT pg_advisory_xact_lock_shared({GATE})::text = '')", (), BooleanField())
            return Task.objects.filter(at_gate).reset_stuck()
        execute_sql("SELECT pg_advisory_lock(%s) IS NULL", [GATE])
        is_closed.set()
        eventually(lambda: execute_sql(WAITS_AT_GATE, [GATE])[0][0])
        assert rescue("default", unbroken=math.inf)
        beat("default", living, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
        claimed = claim(living)
        execute_sql("SELECT pg_advisory_unlock(%s)", [GATE])
        return len(claimed)

    assert in_threads(reset_or_claim, 2) == [0, 1], "none was reset, one was claimed"
    assert Task.objects.get().worker == living


# Workers that add to the same rows of numbers, while others delete old ones, and that are asked for depths at once.


WORKERS, ROUNDS, FUNCTIONS = 4, 15, 40


def test_workers_that_write_the_same_rows_lose_nothing_and_never_deadlock(in_threads, monkeypatch):
    """Each worker has run the functions in a different order, and locks the rows that it writes until its commit."""
    monkeypatch.setattr("django_pglock.store.numbers.LONGEST_WAIT", "0")
    now = datetime.now(zones.utc)
    minute = int(now.timestamp() // 60 * 60)

    def write(worker):
        for _ in range(ROUNDS):
            functions = range(FUNCTIONS) if worker % 2 else reversed(range(FUNCTIONS))
            counts = {(minute, "mail", f"app.task_{number}"): Counts(succeeded=1) for number in functions}
            add_numbers("default", counts)

    in_threads(write, WORKERS)
    [point, *_] = series("default", now, now + timedelta(minutes=1), 60)
    assert point.counts.succeeded == WORKERS * ROUNDS * FUNCTIONS
    rows = Number.objects.exclude(task_path="").values_list("count", flat=True)
    assert set(rows) == {WORKERS * ROUNDS}


def test_a_row_that_is_locked_does_not_delay_the_deletion_of_others(somebody):
    old = int(datetime.now(zones.utc).timestamp() // 3600 * 3600 - 2 * KEPT[3600])
    add_numbers("default", {(old, "mail", "app.send"): Counts(succeeded=1)})
    somebody.connection.set_autocommit(False)
    somebody.ask("SELECT id FROM django_pglock_number WHERE seconds > 0 LIMIT 1 FOR UPDATE")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '10s'")
        assert prune_numbers("default") == 2 * 3 - 1
    somebody.connection.rollback()
    assert prune_numbers("default") == 1


def test_of_several_processes_that_ask_for_depths_one_counts(in_threads, monkeypatch):
    counted = []
    count = numbers.queue_counts
    monkeypatch.setattr(numbers, "queue_counts", lambda using: counted.append(1) or count(using))
    for _ in range(3):
        tasks.nothing.using(queue_name="mail").enqueue()
    found = in_threads(lambda _: [(each.queue, each.counts["READY"]) for each in depths("default")], 6)
    assert found == [[("mail", 3)]] * 6
    assert len(counted) == 1
    Task.objects.all().delete()
    Number.objects.filter(kind="counted").update(total=0)
    assert in_threads(lambda _: depths("default"), 6) == [[]] * 6
    assert len(counted) == 2


def test_a_count_that_began_while_another_process_waited_is_new_enough_for_it(somebody, eventually, in_threads):
    """The time that a statement has read before its wait is before the count for which it has waited."""
    depths("default")
    set_count = "UPDATE django_pglock_number SET total = {} WHERE kind = 'counted' RETURNING total"
    waiting = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted)"
    somebody.connection.set_autocommit(False)
    somebody.ask(set_count.format(0))

    def count_or_be_counted_before(number):
        if number == 0:
            return numbers.count_depths("default", 60.0)
        with connection.cursor() as cursor:
            eventually(lambda: cursor.execute(waiting).fetchone() == (True,))
        counted_at = somebody.ask(set_count.format("date_part('epoch', clock_timestamp())"))
        somebody.connection.commit()
        return counted_at

    _, counted_at = in_threads(count_or_be_counted_before, 2)
    assert Number.objects.get(kind="counted").total == counted_at
