"""Heartbeats: which workers are alive, and which rows of the dead are removed."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now

from django_pglock.models import Worker
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.liveness import (
    LATE,
    LEAST_FREQUENT,
    LEAST_OTHERS,
    UPKEEP_WORKERS,
    WITNESS_AFTER,
    Beat,
    beat,
    beat_all,
    delete_dead,
    deregister,
    is_alive,
    is_oldest,
    witness_values,
)
from django_pglock.store.wake import WOKEN_FIRST, write_sleep_flag
from tests.db.store.workers import register
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_beats_are_continuous_until_one_is_late_or_comes_in_a_new_session(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    worker, rows = uuid4(), Worker.objects.all()

    def since(**options):
        beat("default", worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False, **options)
        return Worker.objects.get().beating_since

    first = since()
    assert since() == first
    interrupted = since(is_interrupted=True)
    assert interrupted > first
    rows.update(heartbeat_at=Now() - timedelta(seconds=70))
    assert since() == interrupted, "this beat was in time"
    rows.update(heartbeat_at=Now() - timedelta(seconds=80))
    assert since() > interrupted


def test_a_late_heartbeat_of_a_worker_that_has_departed_makes_no_row():
    """The supervisor was stopped just before it wrote the heartbeat. Only a first heartbeat contains the functions."""
    here, gone = uuid4(), uuid4()
    values = {"name": "w", "hostname": "h", "pid": 1, "queues": [], "threads": 1, "is_stopping": False}
    beat_all("default", [Beat(each, **values, task_paths=["f"]) for each in (here, gone)])
    deregister("default", gone)
    answers = beat_all("default", [Beat(each, **values) for each in (here, gone)])
    assert (list(answers), answers[here].known) == ([here], 1)
    assert Worker.objects.get().pk == here
    beat_all("default", [Beat(gone, **values, task_paths=["f", "g"])])
    answers = beat_all("default", [Beat(here, **values), Beat(gone, **values, task_paths=["f", "g", "h"])])
    assert (answers[here].known, answers[gone].known) == (1, 3)


def test_a_locked_row_delays_no_heartbeat(settings):
    """A person has locked the row of one worker, and a supervisor beats for all of its processes in one statement."""
    locked, free = sorted([uuid4(), uuid4()])
    values = {"name": "w", "hostname": "h", "pid": 1, "queues": [], "threads": 1, "is_stopping": False}
    beats = [Beat(each, **values, task_paths=["f"]) for each in (locked, free)]
    assert set(beat_all("default", beats)) == {locked, free}
    person = dedicated_connection("default")
    try:
        with person.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT FROM django_pglock_worker WHERE id = %s FOR UPDATE", [locked])
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '1s'")
            assert set(beat_all("default", beats)) == {free}
            cursor.execute("RESET lock_timeout")
    finally:
        person.close()


def test_the_clock_is_put_back(settings):
    """The server's clock decides, so all dates that were written before are in the future now."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    dead, living = uuid4(), uuid4()
    register(dead), register(living)
    step = timedelta(hours=1)
    Worker.objects.update(heartbeat_at=F("heartbeat_at") + step, beating_since=F("beating_since") + step)
    assert not Worker.objects.alive().exists()
    register(living)
    row = Worker.objects.alive().get()
    assert row.pk == living
    assert row.heartbeat_at - row.beating_since < timedelta(seconds=9), "the others may not have beaten since the step"
    assert delete_dead("default") == 0
    Worker.objects.filter(pk=living).update(beating_since=Now() - timedelta(seconds=WITNESS_AFTER * 50))
    assert delete_dead("default") == 1
    assert Worker.objects.get().pk == living


def test_only_rows_of_silent_workers_without_claims_are_deleted(claim, settings):
    """The interval and the limit are a hundred times the usual ones, so delays of a slow machine do not matter."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    living, owner, idle = uuid4(), uuid4(), uuid4()
    register(living)
    register(owner, silent_for=6000)
    register(idle, silent_for=6000)
    tasks.nothing.enqueue()
    claim(worker=owner)
    delete_dead("default")
    assert Worker.objects.count() == 3, "the server may have been out of reach for all of them"
    Worker.objects.filter(pk=living).update(beating_since=Now() - timedelta(seconds=6000))
    delete_dead("default")
    assert set(Worker.objects.values_list("pk", flat=True)) == {living, owner}


def older_worker(**values):
    """Make a row of a worker that has run for longer, sleeps and beats often, also on a slow machine."""
    ago, later = Now() - timedelta(days=1), Now() + timedelta(seconds=50)
    row = {"name": "older", "hostname": "h", "pid": 1, "queues": [], "threads": 1, "is_sleeping": True, **values}
    return Worker.objects.create(
        **{"id": uuid4(), "started_at": ago, "beating_since": ago, "heartbeat_at": later, **row}
    )


def test_a_worker_may_rest_if_enough_older_ones_do_not(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    me = uuid4()

    def answer(hostname="h"):
        return beat(
            "default", me, name="w", hostname=hostname, pid=1, queues=[], threads=1, is_stopping=False, task_paths=[]
        )

    # The worker counts itself.
    others = [older_worker(started_at=Now() + timedelta(days=1)) for _ in range(LEAST_OTHERS - 1)]
    older_workers = [older_worker() for _ in range(LEAST_FREQUENT - 1)]
    answer()
    assert answer().may_rest is False
    older_workers.append(older_worker())
    assert answer().may_rest is True

    def without(worker=older_workers[0], **values):
        with transaction.atomic():
            Worker.objects.filter(pk=worker.pk).update(**values)
            try:
                return answer().may_rest
            finally:
                transaction.set_rollback(True)

    assert without(name="the same") is True
    assert without(is_stopping=True) is False
    assert without(heartbeat_at=Now() - timedelta(seconds=45)) is True
    assert without(heartbeat_at=Now() - timedelta(seconds=65)) is False, "it may be dead"
    assert without(others[0], heartbeat_at=Now() - timedelta(seconds=180)) is True, "it may rest"
    assert without(others[0], heartbeat_at=Now() - timedelta(seconds=230)) is False, "it may be dead"
    assert without(beating_since=F("heartbeat_at")) is False, "it beats rarely, or its heartbeat process does"
    assert without(started_at=Now() + timedelta(days=1)) is False, "it is younger and may rest itself"
    others.pop().delete()
    assert answer().may_rest is False, "after the death of the older ones nobody might notice it soon"


def test_a_worker_rests_only_if_the_loss_of_a_host_leaves_an_active_worker(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    mine, others = uuid4(), uuid4()

    def may_rest(me, hostname):
        return beat(
            "default", me, name="w", hostname=hostname, pid=1, queues=[], threads=1, is_stopping=False, task_paths=[]
        ).may_rest

    for _ in range(LEAST_FREQUENT + LEAST_OTHERS):
        older_worker(hostname="north")
    for hostname in ("east", "west"):
        older_worker(hostname=hostname, beating_since=Now() + timedelta(days=1))
    assert may_rest(mine, "north"), "if its host is lost, so is it"
    assert not may_rest(others, "south"), "the loss of the host in the north leaves nobody who beats often"
    older_worker(hostname="south")
    assert may_rest(others, "south")


def test_a_worker_may_rest_only_if_enough_older_ones_of_its_queues_sleep(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    me, queues = uuid4(), ["mail"]
    for _ in range(LEAST_FREQUENT + LEAST_OTHERS):
        older_worker()
    for number in range(WOKEN_FIRST + 1):
        values = {"name": "w", "hostname": "h", "pid": 1, "queues": queues, "threads": 1, "is_stopping": False}
        assert beat("default", me, **values).may_rest is (number == WOKEN_FIRST)
        older_worker(queues=queues)


def test_the_oldest_worker_is_the_first_that_was_started_and_lives(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    workers = [uuid4() for _ in range(3)]
    for worker in workers:
        register(worker)
    assert [is_oldest("default", worker) for worker in workers] == [True, False, False]
    Worker.objects.filter(pk=workers[0]).update(heartbeat_at=Now() - timedelta(seconds=600))
    assert [is_oldest("default", worker) for worker in workers] == [False, True, False]
    assert {row.pk for row in Worker.objects.alive()} == set(workers[1:])


def test_the_oldest_workers_that_beat_by_themselves_do_the_upkeep():
    workers = [uuid4() for _ in range(UPKEEP_WORKERS + 3)]

    def on_duty():
        answers = [
            beat("default", each, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
            for each in workers
        ]
        return [
            worker for worker, answer in zip(workers, answers, strict=True) if answer.older_workers < UPKEEP_WORKERS
        ]

    on_duty()
    assert on_duty() == workers[:UPKEEP_WORKERS]
    Worker.objects.filter(pk=workers.pop(0)).update(is_stopping=True)
    assert on_duty() == workers[:UPKEEP_WORKERS], "a worker that stops will do no upkeep"
    Worker.objects.filter(pk=workers.pop(0)).update(heartbeat_at=Now() - timedelta(seconds=20))
    assert on_duty() == workers[:UPKEEP_WORKERS], "a worker that is silent may be dead"
    hogged = workers.pop(0)
    Worker.objects.filter(pk=hogged).update(heartbeat_at=Now(), beating_since=Now())
    assert on_duty() == workers[:UPKEEP_WORKERS], "its heartbeat process beats in its place: a task has the GIL"


def test_a_beat_returns_how_many_workers_of_the_same_queues_sleep(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    assert witness_values() == (LATE * 50, WITNESS_AFTER * 50)
    workers = [uuid4() for _ in range(WOKEN_FIRST + 2)]
    others = {uuid4(): ["mail"], uuid4(): []}

    def sleepers():
        """Return the numbers that each worker gets: the older workers that sleep, and all workers."""
        every = {**{each: [] for each in workers}, **others}
        answers = {
            each: beat("default", each, name="w", hostname="h", pid=1, queues=queues, threads=1, is_stopping=False)
            for each, queues in every.items()
        }
        return [(answers[each].older_sleeping_workers, answers[each].sleeping_workers) for each in workers]

    sleepers()
    assert set(sleepers()) == {(0, 0)}
    for each in [*workers, next(iter(others))]:
        write_sleep_flag("default", each, is_sleeping=True)
    told = sleepers()
    older = [number for number, _ in told]
    assert older == [0, 1, 2, 3, WOKEN_FIRST, WOKEN_FIRST], "no more than those woken first have to be known"
    assert {number for _, number in told} == {WOKEN_FIRST + 1}
    Worker.objects.filter(pk=workers[0]).update(is_stopping=True, heartbeat_at=Now())
    for seconds, expected in ((180, (3, 5)), (230, (3, 4))):
        Worker.objects.filter(pk=workers[1]).update(heartbeat_at=Now() - timedelta(seconds=seconds))
        last = beat("default", workers[-1], name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
        counts = (last.older_sleeping_workers, last.sleeping_workers)
        assert counts == expected, "one that stops, or is silent, is none to rely on; one that rests is one to wake"


def test_a_worker_is_alive_by_the_hard_limit_in_a_filter_and_as_a_value(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    young, old = uuid4(), uuid4()
    register(young, silent_for=400), register(old, silent_for=600)
    workers = Worker.objects.filter(pk__in=[young, old])
    assert dict(workers.annotate(is_alive=is_alive()).values_list("pk", "is_alive")) == {young: True, old: False}
    assert [each.pk for each in workers.alive()] == [young]
