"""The messages that a key adds, and that the short statements of admission have the result of the general one."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_pglock import Rate
from django_pglock.backend import _maker
from django_pglock.models import RateLimit, Task
from django_pglock.store import wake as wakeup
from django_pglock.store.admit import ADMIT, _admit_to, admit
from django_pglock.store.enqueue import admit_one, enqueue_one
from django_pglock.store.insert_tasks import insert_calls, meta_of
from tests.db.store.endings import statuses
from tests.property.simulation import LONG
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


KEY = "order:1"


@pytest.fixture
def messages(monkeypatch):
    """Return the messages of a call to the server, without the query for sleeping workers."""
    monkeypatch.setattr(wakeup, "_no_worker_sleeps", lambda using, except_worker=None: True)

    def sent(call):
        with CaptureQueriesContext(connection) as queries:
            call()
        return [each["sql"] for each in queries if each["sql"] not in ("BEGIN", "COMMIT")]

    return sent


def test_a_task_that_is_alone_at_its_key_is_written_and_admitted_by_one_message(messages):
    [message] = messages(lambda: keyed.step.enqueue(1))
    assert message.count("django_pglock_task") == 2, "the row, and one look at the key"
    assert statuses() == ["READY"]


def test_a_task_behind_another_of_its_key_is_one_message(messages, claim):
    keyed.step.enqueue(1)
    assert len(messages(lambda: keyed.step.enqueue(1))) == 1
    claim()
    assert len(messages(lambda: keyed.step.enqueue(1))) == 1
    assert statuses() == ["RUNNING", "BLOCKED", "BLOCKED"]


@pytest.mark.parametrize("holders", [0, 1])
def test_admission_after_a_transaction_is_one_short_message(messages, holders):
    for _ in range(holders):
        keyed.step.enqueue(1)

    def enqueue():
        with transaction.atomic():
            keyed.step.enqueue(1)

    insert, admission = messages(enqueue)
    assert insert.count("django_pglock_task") == 1
    assert admission.count("django_pglock_task") == 2
    assert statuses() == ["READY", "BLOCKED"][: 1 + holders]


def test_a_task_with_a_rate_is_one_message_where_there_is_a_token_for_it(messages):
    for _ in range(2):
        [message] = messages(lambda: keyed.trickle.enqueue(1))
        assert message.count("django_pglock_task") == 2, "the row, and one look at the key"
    assert len(messages(lambda: keyed.trickle.enqueue(2))) == 1
    assert statuses() == ["READY"] * 3
    assert not RateLimit.objects.filter(opens_at__isnull=False).exists()


def test_admission_with_a_rate_after_a_transaction_is_one_short_message(messages):
    def enqueue():
        with transaction.atomic():
            keyed.trickle.enqueue(1)

    for waiting in range(2):
        insert, admission = messages(enqueue)
        assert insert.count("django_pglock_task") == 1, waiting
        assert admission.count("django_pglock_task") == 2, "its own row, and one look at the key"
    assert statuses() == ["READY", "READY"]
    assert len(messages(enqueue)) == 3, "no token is left: the general statement sets the date of the next one"
    assert len(messages(enqueue)) == 2, "the date is set"
    assert statuses() == ["READY", "READY", "BLOCKED", "BLOCKED"]


def test_a_task_behind_others_that_wait_for_a_token_is_one_message(messages):
    """The first of them has set the date of the next token."""
    for _ in range(3):
        keyed.trickle.enqueue(1)
    before = RateLimit.objects.get()
    for _ in range(3):
        assert len(messages(lambda: keyed.trickle.enqueue(1))) == 1
    assert statuses() == ["READY"] * 2 + ["BLOCKED"] * 4
    bucket = RateLimit.objects.get()
    assert (bucket.arrives_at, bucket.opens_at) == (before.arrives_at, before.opens_at)
    assert bucket.opens_at is not None


def test_enqueueing_with_after_is_one_message_and_a_query_of_the_dependencies(messages):
    results = [tasks.echo.enqueue(number) for number in range(3)]
    for options in ({}, {"lock": "one"}, {"rate": "1/h"}, {"keep_result": 60}):
        task = tasks.nothing.using(after=results, **options)
        insert, look = messages(task.enqueue)
        assert insert.count("INSERT") == 2, "the row, and those of what it waits for"
        assert look.startswith("SELECT")
    assert statuses() == ["READY"] * 3 + ["BLOCKED"] * 4


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda: keyed.refresh.enqueue(1), 1),
        (lambda: keyed.digest.enqueue(user=1, text=""), 1),
        (lambda: tasks.nothing.using(keep_result=60).enqueue(), 1),
        (lambda: tasks.nothing.using(run_after=None).enqueue(), 1),
    ],
    ids=["unique", "group", "keep_result", "plain"],
)
def test_a_single_enqueue_sends_one_message(messages, call, count):
    assert len(messages(call)) == count


def test_admission_to_many_keys_is_one_message(messages, claim):
    """As after the end of many tasks. None of these keys has a concurrency above one."""
    for number in range(20):
        keyed.step.enqueue(number % 10)
    Task.objects.filter(status="READY").update(status="BLOCKED")
    keys = {f"order:{number}" for number in range(10)}
    assert len(messages(lambda: admit("default", keys))) == 1
    assert statuses() == ["READY"] * 10 + ["BLOCKED"] * 10


def test_a_crash_of_the_server_may_take_an_admission_but_not_the_task(messages):
    """The commit of the task waits for the disk. The commit of the admission does not."""

    def enqueue():
        with transaction.atomic():
            keyed.step.enqueue(1)

    insert, admission = messages(enqueue)
    assert "synchronous_commit = off" in admission
    assert "synchronous_commit" not in insert
    [message] = messages(lambda: keyed.step.enqueue(2))
    assert "synchronous_commit" not in message


# A world: the tasks of one key, in the order of the ids. (status, concurrency, waits for another, was attempted)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["BLOCKED", "BLOCKED", "READY", "RUNNING", "SCHEDULED", "SUCCESSFUL"]),
        st.sampled_from([None, None, 1, 2, 3]),
        st.sampled_from([0, 0, 0, 1]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=5,
)


INSERT = """
INSERT INTO django_pglock_task (queue, backend, task_path, status, lock_key, concurrency, waits_for, started_at,
                                meta, group_key, run_after, worker, last_attempted_at, finished_at)
VALUES ('default', 'default', 'tests.sample.keyed_tasks.step', %(status)s, %(key)s, %(concurrency)s, %(waits)s,
        CASE WHEN %(tried)s THEN now() END, %(meta)s, CASE WHEN %(grouped)s THEN 'a' END,
        CASE WHEN %(status)s = 'SCHEDULED' THEN now() + interval '1 hour'
             WHEN %(was_late)s THEN now() - interval '1 hour' END,
        CASE WHEN %(status)s = 'RUNNING' OR %(gathers)s THEN gen_random_uuid() END,
        -- The bucket has the start of a task since it was claimed, so a start of just now without a bucket cannot be.
        now() - interval '1 day',
        CASE WHEN %(status)s = 'SUCCESSFUL' THEN now() END)
"""


def make(world, *, key=KEY, meta="{}"):
    """Insert the tasks. One that was attempted and waits for others waits for its children.

    A younger one can have begun before an older one only if the older one had another reason to wait.
    """
    rows, gathers_later = [], False
    for status, concurrency, waits, tried, grouped in reversed(world):
        waits = waits if status == "BLOCKED" else 0
        gathers = bool(waits and tried)
        values = {"status": status, "concurrency": concurrency, "waits": waits, "tried": tried, "grouped": grouped}
        rows.append({**values, "key": key, "meta": meta, "gathers": gathers, "was_late": gathers_later})
        gathers_later |= gathers
    with connection.cursor() as cursor:
        for each in reversed(rows):
            cursor.execute(INSERT, each)


def after(world, *acts):
    """Return the statuses after these calls in a world, and roll back."""
    with transaction.atomic():
        make(world)
        for act in acts:
            act()
        found = statuses()
        transaction.set_rollback(True)
    return found


def admit_by_the_general_statement(key=KEY):
    _admit_to("default", ADMIT, [key])


many_worlds = settings(max_examples=LONG or 30, deadline=None, suppress_health_check=list(HealthCheck))


@many_worlds
@given(ROWS)
def test_the_short_admission_statement_has_the_result_of_the_general_one(world):
    general = after(world, admit_by_the_general_statement)
    assert after(world, lambda: admit("default", [KEY])) == general


@many_worlds
@given(ROWS, st.sampled_from([None, 1, 2]))
def test_admission_at_insert_has_the_result_of_the_general_statement(world, concurrency):
    """The other tasks of the key have been admitted before, so only the new call is left."""
    task = keyed.step.using(concurrency=concurrency)
    row = ("BLOCKED", concurrency, 0, False, False)
    general = after(world, admit_by_the_general_statement, lambda: make([row]), admit_by_the_general_statement)

    def enqueue():
        enqueued, is_done = enqueue_one("default", task, call, "{}")
        if enqueued.status == "BLOCKED" and not is_done:
            admit("default", [KEY])

    def enqueue_in_a_transaction():
        [enqueued] = insert_calls("default", task, [call], "{}")
        admit_one("default", task, enqueued.id, KEY)

    call = _maker(task)([1], {})
    assert after(world, admit_by_the_general_statement, enqueue) == general
    assert after(world, admit_by_the_general_statement, enqueue_in_a_transaction) == general


# A bucket: the seconds until its next token, if the bucket exists, and whether the date of its next check is
# not set, over, or that of the token.
BUCKETS = st.tuples(
    st.sampled_from([None, -5000, -1, 300, 700, 740, 1430]), st.sampled_from([None, "due", "at the next token"])
)


RATED_KEY = "%rate tenant:1"


RATED_ROWS = st.lists(
    st.tuples(st.sampled_from(["BLOCKED", "READY", "RUNNING", "SUCCESSFUL"]), st.sampled_from([0, 0, 0, 1])), max_size=4
)


FILL = """
INSERT INTO django_pglock_ratelimit (key, arrives_at, opens_at)
SELECT %s, now() + %s * interval '1 s', CASE %s WHEN 'due' THEN now() - interval '1 s'
                                                WHEN 'at the next token' THEN now() + (%s - 720) * interval '1 s' END
"""


@many_worlds
@given(BUCKETS, RATED_ROWS)
def test_admission_at_insert_with_a_rate_has_the_result_of_the_general_statement(bucket, rows):
    world = [(status, None, waits, False, False) for status, waits in rows]
    check_admission_at_rate(keyed.trickle, RATED_KEY, bucket, world)


@many_worlds
@given(BUCKETS, ROWS)
def test_admission_at_insert_with_a_rate_and_a_lock_has_the_result_of_the_general_statement(bucket, world):
    check_admission_at_rate(keyed.step.using(rate=Rate(5, per=3600, burst=2)), KEY, bucket, world)


def check_admission_at_rate(task, key, bucket, world):
    """The remaining tokens and the time of the next check are equal, too."""
    call, meta = _maker(task)([1], {}), meta_of(task)

    def fill():
        arrives_in, opens_in = bucket
        make(world, key=key, meta=meta)
        if arrives_in is not None:
            execute_sql(FILL, [key, arrives_in, opens_in, arrives_in])

    def admit():
        admit_by_the_general_statement(key)

    def enqueue():
        enqueued, is_done = enqueue_one("default", task, call, meta)
        if enqueued.status == "BLOCKED" and not is_done:
            admit()

    def enqueue_in_a_transaction():
        [enqueued] = insert_calls("default", task, [call], meta)
        admit_one("default", task, enqueued.id, key)

    def look():
        found.append(
            [
                (round((each.arrives_at - timezone.now()).total_seconds(), -1), each.opens_at is not None)
                for each in RateLimit.objects.all()
            ]
        )

    found = []
    row = ("BLOCKED", None, 0, False, False)
    general = after([], fill, admit, lambda: make([row], key=key, meta=meta), admit, look)
    assert after([], fill, admit, enqueue, look) == general
    assert after([], fill, admit, enqueue_in_a_transaction, look) == general
    assert found[0] == found[1] == found[2]
