"""Sleeping workers are woken if and only if tasks are ready."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from hypothesis import assume, example, given
from hypothesis import strategies as st

from django_pglock.errors import ConfigurationError
from django_pglock.models import Task, Worker
from django_pglock.store import wake as wake_module
from django_pglock.store.liveness import deregister
from django_pglock.store.wake import (
    MOST_HOPS,
    SCHEDULED_CHANNEL,
    WOKEN,
    channel_of,
    wake,
    wake_except,
    wake_others,
    wake_parents,
    write_sleep_flag,
)
from django_pglock.tasks.queues import is_served
from django_pglock.worker.child.claimer import Claimer
from django_pglock.worker.child.feeder import Feeder, ParentsHeartbeat
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.queues import Queues
from tests.db.store.workers import add_sleeping_worker, register
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def notifications():
    """Return what has come since the last call: worker, hops and queue; or the channel."""
    raw = connection.connection
    raw.execute("SELECT")
    notes = []
    while new := list(raw.notifies(timeout=0)):
        notes += new
    return [
        (UUID((worked := note.payload.split(" ", 2))[0]), int(worked[1]), worked[2]) if note.payload else note.channel
        for note in notes
    ]


def listen(*workers):
    """Listen in the place of the parents of these workers."""
    with connection.cursor() as cursor:
        for worker in workers:
            cursor.execute(f"LISTEN {channel_of(worker.parent)}")


def listening_worker(**values):
    worker = add_sleeping_worker(**values)
    listen(worker)
    return worker


@pytest.fixture
def clock(monkeypatch):
    """The time of this process, as a list with one number."""
    now = [0.0]
    monkeypatch.setattr(wake_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_sleeping_workers_are_woken_after_the_commit_and_once_for_each_queue():
    worker = listening_worker()
    execute_sql(f"LISTEN {SCHEDULED_CHANNEL}")
    with transaction.atomic():
        wake("default", ["mail", "default", "mail"])
        wake("default", ["mail"])
        wake_parents("default")
        assert notifications() == []
    assert sorted(notifications(), key=str) == [
        (worker.pk, 0, "default"),
        (worker.pk, 0, "mail"),
        SCHEDULED_CHANNEL,
    ]
    wake("default", ["with spaces in 'it'; and %s"])
    assert notifications() == [(worker.pk, 0, "with spaces in 'it'; and %s")], "those before are not woken again"


def test_parents_look_for_scheduled_tasks_only_while_a_worker_sleeps():
    execute_sql(f"LISTEN {SCHEDULED_CHANNEL}")
    register(uuid4())
    wake_parents("default")
    assert notifications() == []


def test_a_task_wakes_a_few_workers_however_many_sleep():
    workers = [listening_worker() for _ in range(3 * WOKEN)]
    woken = Counter()
    for _ in range(20):
        wake("default", ["default"])
        notes = notifications()
        assert len({worker for worker, *_ in notes}) == len(notes) == WOKEN
        woken.update(worker for worker, *_ in notes)
    assert len(woken) > WOKEN, "always the same ones may have frozen"
    assert woken.keys() <= {worker.pk for worker in workers}


def test_each_queue_of_a_transaction_wakes_workers_that_serve_it():
    mail, everything = (listening_worker(queues=queues) for queues in (["mail"], []))
    with transaction.atomic():
        wake("default", ["mail", "other"])
    assert set(notifications()) == {
        (mail.pk, 0, "mail"),
        (everything.pk, 0, "mail"),
        (everything.pk, 0, "other"),
    }


@pytest.mark.parametrize(
    "values",
    [
        {"is_sleeping": False},
        {"is_stopping": True},
        {"heartbeat_at": Now() - timedelta(seconds=11)},
        {"queues": ["other"]},
        {"queues": ["--exclude default"]},
    ],
    ids=["awake", "stopping", "dead", "of another queue", "excludes the queue"],
)
def test_workers_that_cannot_run_a_task_take_no_place_of_those_that_can(values):
    listen(*(add_sleeping_worker(**values) for _ in range(2 * WOKEN)))
    able = listening_worker()
    wake("default", ["default"])
    assert notifications() == [(able.pk, 0, "default")]


def test_the_session_keeps_its_synchronous_commit():
    worker = add_sleeping_worker()
    tasks.nothing.enqueue()
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
        wake("default", ["default"])
        wake_others("default", ["default"], uuid4())
        wake_except("default", ["default"], worker.pk)
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == ("on",)


def count_statements(queue="default"):
    with CaptureQueriesContext(connection) as queries:
        wake("default", [queue])
    return len(queries)


def test_that_no_worker_sleeps_is_cached_for_each_queue_and_not_longer_than_workers_poll(clock):
    assert (count_statements(), count_statements()) == (1, 0)
    assert count_statements("mail") == 1, "another worker may sleep that serves this queue"
    clock[0] = 0.05
    worker = listening_worker()
    assert (count_statements(), count_statements()) == (1, 1), "while a worker sleeps nothing is cached"
    assert notifications() == [(worker.pk, 0, "default")] * 2


def test_a_worker_that_falls_asleep_before_the_commit_is_woken(clock):
    assert count_statements() == 1
    with transaction.atomic():
        wake("default", ["mail"])
        worker = listening_worker()
        clock[0] = 1.0
    assert notifications() == [(worker.pk, 0, "mail")]


def test_a_worker_that_wakes_itself_notifies_only_other_sleeping_workers(clock):
    me = listening_worker()
    wake_except("default", ["default"], me.pk)
    assert notifications() == [], "only this worker sleeps"
    clock[0] = 0.05
    other = listening_worker()
    wake_except("default", ["mail", "default", "mail"], me.pk, hops=1)
    assert notifications() == [(other.pk, 1, "default"), (other.pk, 1, "mail")]
    wake_except("default", [], me.pk)
    assert notifications() == []


def test_that_no_other_worker_sleeps_is_cached_apart_from_that_no_worker_sleeps(clock):
    """Tasks that a task enqueues in the process of a sleeping worker must wake this worker."""
    me = listening_worker()
    wake_except("default", ["default"], me.pk)
    with CaptureQueriesContext(connection) as queries:
        wake_except("default", ["default"], me.pk)
    assert len(queries) == 0, "that no other worker sleeps is known"
    wake("default", ["default"])
    assert notifications() == [(me.pk, 0, "default")]


@pytest.mark.parametrize("fair_key", [None, "customer 1"])
def test_others_are_woken_only_for_queues_with_ready_tasks(clock, fair_key):
    other, me = listening_worker(), uuid4()
    tasks.nothing.enqueue()
    tasks.nothing.using(queue_name="mail").enqueue()
    Task.objects.update(fair_key=fair_key)
    notifications()
    wake_others("default", ["default", "empty"], me, hops=2)
    assert notifications() == [(other.pk, 2, "default")]
    Task.objects.update(status="BLOCKED", lock_key="a")
    wake_others("default", ["default", "mail"], me)
    assert notifications() == []


def test_a_busy_worker_does_not_look_for_tasks_to_wake_others_while_none_sleeps(clock):
    """After each task of a lock key, its worker is told that the next one is ready."""
    tasks.nothing.enqueue()
    me = uuid4()
    wake_others("default", ["default"], me)
    with CaptureQueriesContext(connection) as queries:
        wake_others("default", ["default"], me)
    assert len(queries) == 0


def test_the_commit_of_the_caller_wakes_sleeping_workers_first_and_then_others():
    """No flag can be read after that commit, and another worker may fall asleep before it."""
    asleep = [listening_worker() for _ in range(WOKEN - 1)]
    awake = [listening_worker(is_sleeping=False) for _ in range(2)]
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        wake("default", ["default"])
        wake_parents("default")
        cursor.execute("COMMIT")
    woken = {worker for worker, hops, queue in notifications() if (hops, queue) == (0, "default")}
    assert len(woken) == WOKEN
    assert {each.pk for each in asleep} < woken <= {each.pk for each in [*asleep, *awake]}


def test_a_transaction_that_will_be_prepared_has_no_notification():
    """PostgreSQL refuses to prepare it otherwise. The poll finds the task."""
    listening_worker()
    connection.set_autocommit(False)
    try:
        connection.connection.tpc_begin("two phases")
        with CaptureQueriesContext(connection) as queries:
            tasks.nothing.enqueue()
            tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
        assert len(queries) == 2
        assert not any("pg_notify" in query["sql"] for query in queries)
        connection.connection.tpc_rollback()
    finally:
        connection.set_autocommit(True)


# Who serves which queue: PostgreSQL reads the rows as the worker reads its command line.

NAMES = st.text(alphabet="ab-=*1 .é%_\\", min_size=1, max_size=4) | st.sampled_from(["default", "django_pglock"])
GIVEN = st.lists(NAMES | st.builds("{}={}".format, NAMES, st.integers(1, 1000)), max_size=3)
SERVED = f"""
SELECT ready.queue FROM unnest(%s::text[]) AS ready (queue), (VALUES (%s::jsonb)) AS worker (queues)
WHERE {wake_module._SERVES}
"""


@given(GIVEN, st.lists(NAMES, max_size=2), st.lists(NAMES, min_size=1, max_size=5, unique=True))
@example([], [], ["a"])
@example(["a*"], ["ab*"], ["a", "ab", "abc", "b", "a*"])
@example(["a=3", "b*=2"], [], ["a", "a=3", "b", "ba", "c"])
@example(["a=b=3"], [], ["a", "a=b"])
@example([], ["a"], ["a", "b", "django_pglock"])
@example(["--a"], [], ["--a", "b"])
@example(["a%", "_b", "a\\"], [], ["ab", "a%", "ab", "a\\"])
def test_the_server_the_worker_and_the_pages_agree_on_who_serves_a_queue(names, excluded, asked):
    try:
        queues = Queues(names, exclude=excluded)
    except ConfigurationError:
        assume(False)
    found = {name for (name,) in execute_sql(SERVED, [asked, json.dumps(queues.given)])}
    assert found == {name for name in asked if queues.serves(name)}
    assert found == {name for name in asked if is_served(name, queues.given)}


# How a wake-up spreads. Here all parents listen in one session, and this function passes on what they receive.

COUNT = 30


def spread(*, claims):
    """Deliver all notifications until there are no more. ``claims`` is the number of tasks that each worker takes.

    Returns for each hop the workers that were woken.
    """
    woken = {hops: [] for hops in range(MOST_HOPS + 1)}
    in_flight = InFlight(1)
    while notes := notifications():
        for worker, hops, queue in notes:
            woken[hops].append(worker)
            feeder = Feeder(in_flight, Claimer("default", worker, Queues()), heartbeat=ParentsHeartbeat())
            in_flight.notify_feeder(queue, hops)
            feeder._hear()
            taken = Task.objects.filter(pk__in=Task.objects.values("pk")[:claims]).delete()[0] if claims else 0
            if taken == claims:
                # It has no capacity left, or it does not know the function.
                feeder._wake_others_if(True, has_claimed=bool(claims))
    return woken


def test_a_task_whose_function_the_woken_workers_do_not_know_is_passed_on_a_few_times():
    workers = [listening_worker() for _ in range(COUNT)]
    tasks.nothing.enqueue()
    woken = spread(claims=0)
    counts = [len(woken[hops]) for hops in range(MOST_HOPS + 1)]
    assert counts == [WOKEN, WOKEN**2, WOKEN**3]
    assert {each for hop in woken.values() for each in hop} <= {each.pk for each in workers}
    assert Task.objects.exists()


def test_many_tasks_wake_many_workers():
    for _ in range(COUNT):
        listening_worker()
    with transaction.atomic():
        for _ in range(5 * COUNT):
            tasks.nothing.enqueue()
    woken = spread(claims=1)
    assert not Task.objects.exists()
    assert len(set(woken[0])) > COUNT / 2
    assert not any(woken[hops] for hops in range(1, MOST_HOPS + 1)), "each of them has claimed something"


def test_a_worker_whose_row_was_inserted_again_asks_again_for_notifications():
    """Another parent has deleted the row of a host that slept. The flag is lost with it, and no notification comes."""
    worker = uuid4()
    register(worker)
    in_flight = InFlight(1)
    feeder = Feeder(in_flight, Claimer("default", worker, Queues()), heartbeat=ParentsHeartbeat())
    feeder.note_flag_unset()
    assert not in_flight.feeder_wakeup.is_set(), "it does not sleep"
    feeder._ask()
    assert feeder.asks
    deregister("default", worker)
    register(worker)
    feeder.note_flag_unset()
    assert not feeder.asks, "the feeder begins to sleep again"
    assert in_flight.feeder_wakeup.is_set()
    feeder._ask()
    assert Worker.objects.get().is_sleeping
    write_sleep_flag("default", worker, is_sleeping=False)
