"""Heartbeats: which workers are alive, and which rows of the dead are removed."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now

from django_pglock.models import Worker
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.liveness import UPKEEP_PARENTS, delete_dead, deregister, is_alive
from django_pglock.store.wake import write_sleep_flag
from tests.db.store.workers import beat_for, register
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_late_heartbeat_of_a_worker_that_has_ended_makes_no_row():
    """The heartbeat was in flight when the worker ended. Only a first heartbeat contains the functions."""
    parent, here, gone = uuid4(), uuid4(), uuid4()
    beat_for(parent, here, gone, task_paths=["f"])
    deregister("default", gone)
    answers = beat_for(parent, here, gone, task_paths=None)
    assert (list(answers), answers[here].known) == ([here], 1)
    assert Worker.objects.get().pk == here
    assert beat_for(parent, here, gone, task_paths=["f", "g"])[gone].known == 2


def test_a_heartbeat_deletes_the_row_of_a_worker_that_has_ended():
    """A late heartbeat with a new function has inserted it again. Its lock is that of a living parent, so no other
    parent would find that this worker is dead, and the tasks that it ran would be lost."""
    parent, here, gone, other = uuid4(), uuid4(), uuid4(), uuid4()
    register(other)
    beat_for(parent, here, gone)
    beat_for(parent, here)
    assert set(Worker.objects.values_list("pk", flat=True)) == {here, other}


def test_a_locked_row_delays_no_heartbeat():
    """A person has locked the rows of two workers, one of which has ended."""
    parent, gone, (locked, free) = uuid4(), uuid4(), sorted([uuid4(), uuid4()])
    assert set(beat_for(parent, locked, free, gone)) == {locked, free, gone}
    person = dedicated_connection("default")
    try:
        with person.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT FROM django_pglock_worker WHERE id = ANY (%s) FOR UPDATE", [[locked, gone]])
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '1s'")
            assert set(beat_for(parent, locked, free)) == {free}
            cursor.execute("RESET lock_timeout")
        with person.cursor() as cursor:
            cursor.execute("ROLLBACK")
    finally:
        person.close()
    assert set(beat_for(parent, locked, free)) == {locked, free}
    assert set(Worker.objects.values_list("pk", flat=True)) == {locked, free}


def test_the_clock_is_put_back(settings):
    """The server's clock decides, so all dates that were written before are in the future now."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    dead, living = uuid4(), uuid4()
    register(dead), register(living)
    Worker.objects.update(heartbeat_at=F("heartbeat_at") + timedelta(hours=1))
    assert not Worker.objects.alive().exists()
    register(living)
    assert Worker.objects.alive().get().pk == living
    assert delete_dead("default", unbroken=499) == 0, "the others may not have beaten since the step"
    assert delete_dead("default", unbroken=500) == 1
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
    delete_dead("default", unbroken=499)
    assert Worker.objects.count() == 3, "the server may have been out of reach for all of them"
    delete_dead("default", unbroken=500)
    assert set(Worker.objects.values_list("pk", flat=True)) == {living, owner}


def test_the_oldest_parents_do_the_upkeep():
    parents = {uuid4(): [uuid4()] for _ in range(UPKEEP_PARENTS + 3)}

    def on_duty():
        def older(parent):
            return min(answer.older_parents for answer in beat_for(parent, *parents[parent]).values())

        return [parent for parent in parents if older(parent) < UPKEEP_PARENTS]

    on_duty()
    assert on_duty() == list(parents)[:UPKEEP_PARENTS]
    parents[next(iter(parents))].append(uuid4())
    on_duty()
    assert on_duty() == list(parents)[:UPKEEP_PARENTS], "a parent is as old as its oldest worker"
    stopping = parents.pop(next(iter(parents)))
    Worker.objects.filter(pk__in=stopping).update(is_stopping=True)
    assert on_duty() == list(parents)[:UPKEEP_PARENTS], "a parent whose workers stop will soon do no upkeep"
    silent = parents.pop(next(iter(parents)))
    Worker.objects.filter(pk__in=silent).update(heartbeat_at=Now() - timedelta(seconds=20))
    assert on_duty() == list(parents)[:UPKEEP_PARENTS], "a parent that is silent may be dead"


def test_each_time_one_parent_is_the_oldest_although_all_have_replaced_workers():
    parents = {uuid4(): [uuid4(), uuid4()] for _ in range(3)}
    for parent, workers in parents.items():
        beat_for(parent, *workers)
    for parent, workers in parents.items():
        workers[1] = uuid4()
        beat_for(parent, *workers)
    older = [
        [each.older_parents for each in beat_for(parent, *workers).values()] for parent, workers in parents.items()
    ]
    assert [min(each) for each in older] == [0, 1, 2]


def test_a_heartbeat_returns_what_the_row_says():
    parent, worker = uuid4(), uuid4()
    assert beat_for(parent, worker, task_paths=["f", "g"])[worker][:2] == (2, False)
    write_sleep_flag("default", worker, is_sleeping=True)
    assert beat_for(parent, worker, task_paths=None)[worker][:2] == (2, True)
    deregister("default", worker)
    assert beat_for(parent, worker)[worker].is_sleeping is False, "it was inserted again: the worker has to know"


def test_a_heartbeat_returns_whether_those_of_others_are_missing(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    parent, worker, other = uuid4(), uuid4(), uuid4()
    for silent_for, expected in ((0, False), (90, False), (130, True), (-130, True)):
        register(other, silent_for=silent_for)
        assert beat_for(parent, worker)[worker].are_others_missing is expected


def test_a_worker_is_alive_by_the_hard_limit_in_a_filter_and_as_a_value(settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    young, old = uuid4(), uuid4()
    register(young, silent_for=400), register(old, silent_for=600)
    workers = Worker.objects.filter(pk__in=[young, old])
    assert dict(workers.annotate(is_alive=is_alive()).values_list("pk", "is_alive")) == {young: True, old: False}
    assert [each.pk for each in workers.alive()] == [young]
