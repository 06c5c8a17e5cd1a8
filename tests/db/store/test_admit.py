"""Keys of tasks: one at a time and in order, with concurrency, and how blocked tasks are admitted."""

from __future__ import annotations

import math
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_pglock import Rate
from django_pglock.backend import _maker
from django_pglock.models import RateLimit, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import admit as admit_module
from django_pglock.store import enqueue as enqueue_module
from django_pglock.store import wake as wakeup
from django_pglock.store.admit import ADMIT, LOCK_KEYS, _admit_to, admit, blocked_keys, holders
from django_pglock.store.enqueue import admit_one, enqueue_one
from django_pglock.store.insert_tasks import insert_calls, meta_of
from django_pglock.store.outcome import Abandoned, Failed, GivenBack, Retried, Snoozed, Succeeded
from django_pglock.store.rescue import rescue
from django_pglock.store.settle import settle
from django_pglock.store.statements import filled
from tests.db.store.endings import FAILURE, statuses
from tests.property.simulation import LONG
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def settle_one(claim, outcome):
    accepted = settle("default", [(claim, outcome)], claim.worker)
    admit("default", [claim.lock_key])
    return accepted


@contextmanager
def hold_key(key):
    """Hold the lock of admission to a key, in another session."""
    holder = dedicated_connection("default")
    try:
        with holder.cursor() as cursor:
            cursor.execute(filled(LOCK_KEYS).replace("_xact", ""), [[key]])
        yield holder.connection
    finally:
        holder.close()


def test_one_task_of_a_key_is_admitted_and_the_next_after_its_end(claim):
    for number in range(3):
        keyed.step.enqueue(1, number)
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]
    [first] = claim(3)
    assert settle_one(first, Succeeded())
    assert statuses() == ["SUCCESSFUL", "READY", "BLOCKED"]


@pytest.mark.parametrize("function", [keyed.step, keyed.trickle], ids=["lock", "rate"])
def test_workers_are_woken_for_a_task_that_is_admitted_after_the_commit(monkeypatch, function):
    woken = []
    monkeypatch.setattr(enqueue_module, "wake", lambda using, queues: woken.extend(queues))
    with transaction.atomic():
        function.using(queue_name="mail").enqueue(1)
    assert (statuses(), woken) == (["READY"], ["mail"])


def test_a_task_with_something_left_to_wait_for_does_not_keep_those_behind_it_waiting(claim):
    """One of the two tasks that it waits for has ended, and this is not recorded yet."""
    keyed.step.enqueue(1)
    ended, other = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    keyed.step.using(after=[ended, other]).enqueue(1)
    keyed.step.enqueue(1)
    claims = claim(2)
    settle("default", [(each, Succeeded()) for each in claims], claims[0].worker)
    admit("default", ["order:1"])
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY", "BLOCKED", "READY"]


@pytest.mark.parametrize(("seconds", "pause"), [(9, 0.9), (86_400, 1.0)])
def test_the_next_look_for_a_task_that_no_worker_begins_is_after_a_tenth_of_its_wait_or_a_second(seconds, pause):
    def now():
        return execute_sql("SELECT clock_timestamp()")[0][0]

    for _ in range(3):
        keyed.trickle.enqueue(1)
    before = now()
    RateLimit.objects.update(arrives_at=before - timedelta(seconds=seconds), opens_at=before)
    admit("default", ["%rate tenant:1"])
    opens_at = RateLimit.objects.get().opens_at
    assert before + timedelta(seconds=pause) <= opens_at <= now() + timedelta(seconds=1)


def test_no_token_is_taken_for_a_task_that_is_cancelled_meanwhile(session, in_threads, eventually, monkeypatch):
    """Here admission pauses between its snapshot and the lock on the row."""
    with transaction.atomic():
        result = keyed.trickle.enqueue(1)
        transaction.get_connection().run_on_commit.clear()
    pause = "CROSS JOIN (SELECT pg_advisory_xact_lock(1)) AS pause"
    pausing = ADMIT.replace("ARRAY(SELECT id FROM next)", f"ARRAY(SELECT id FROM next {pause})")
    monkeypatch.setattr(admit_module, "ADMIT", pausing)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    session.ensure_connection()
    session.connection.execute("SELECT pg_advisory_lock(1)")

    def act(number):
        if number == 0:
            return admit("default", ["%rate tenant:1"])
        eventually(lambda: session.connection.execute(waiting).fetchone() == (1,), why="admission does not pause")
        Task.objects.filter(pk=result.id).update(status="CANCELLED", finished_at=Now())
        session.connection.execute("SELECT pg_advisory_unlock(1)")

    assert in_threads(act, 2) == [0, None]
    assert RateLimit.objects.get().arrives_at <= timezone.now()


@pytest.mark.parametrize(
    ("outcome", "after"),
    [
        (Retried(FAILURE, 60), ["SCHEDULED", "BLOCKED"]),  # the update waits for all attempts of the create
        (Snoozed(60), ["SCHEDULED", "BLOCKED"]),
        (Abandoned(60), ["SCHEDULED", "BLOCKED"]),  # it still runs, in a process that ends
        (Retried(FAILURE, 0), ["READY", "BLOCKED"]),
        (GivenBack(), ["READY", "BLOCKED"]),
        (Failed(FAILURE), ["FAILED", "READY"]),
    ],
)
def test_a_started_task_keeps_its_lock_key_until_it_has_finished(claim, outcome, after):
    keyed.step.enqueue(1)
    keyed.step.enqueue(1)
    [mine] = claim()
    settle_one(mine, outcome)
    assert statuses() == after


def test_with_concurrency_a_task_that_waits_for_its_retry_frees_its_slot(claim):
    for _ in range(4):
        keyed.call.enqueue("bank")
    assert statuses() == ["READY"] * 3 + ["BLOCKED"]
    settle_one(claim()[0], Retried(FAILURE, 60))
    assert statuses() == ["SCHEDULED", "READY", "READY", "READY"]


def test_a_task_is_admitted_only_within_the_limits_of_the_running_ones(claim):
    """Functions may share a key and differ in how many may run at once: one that writes, and many that read."""
    writer, reader = keyed.step, keyed.step.using(concurrency=3)
    for each in (writer, reader, reader, writer, reader):
        each.enqueue(1)
    assert statuses() == ["READY", "BLOCKED", "BLOCKED", "BLOCKED", "BLOCKED"]
    [first] = claim()
    admit("default", [first.lock_key])
    assert statuses()[1:] == ["BLOCKED", "BLOCKED", "BLOCKED", "BLOCKED"]
    settle_one(first, Succeeded())
    assert statuses()[1:] == ["READY", "READY", "BLOCKED", "BLOCKED"], "not the third that reads: it came later"
    for each in claim(2):
        assert statuses()[3] == "BLOCKED"
        settle_one(each, Succeeded())
    assert statuses()[3:] == ["READY", "BLOCKED"]


def test_the_smallest_concurrency_of_the_running_tasks_is_the_limit(claim):
    for concurrency in (3, 2, 3, 1):
        keyed.step.using(concurrency=concurrency).enqueue(1)
    assert statuses() == ["READY", "READY", "BLOCKED", "BLOCKED"]
    for outcome in (Retried(FAILURE, 60), Retried(FAILURE, 60), Succeeded()):
        settle_one(claim()[0], outcome)
    assert statuses() == ["SCHEDULED", "SCHEDULED", "SUCCESSFUL", "BLOCKED"]


def test_a_key_that_also_has_a_rate_is_still_one_at_a_time(claim):
    task = keyed.fail_first.using(rate=Rate(100, per=1, burst=10))
    for _ in range(3):
        task.enqueue(1)
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]
    [first] = claim()
    admit("default", [first.lock_key])
    assert statuses()[1:] == ["BLOCKED", "BLOCKED"]
    settle_one(first, Retried(FAILURE, 60))
    assert statuses() == ["SCHEDULED", "BLOCKED", "BLOCKED"], "it keeps its turn"


def test_a_locked_row_blocks_only_its_key(in_threads):
    """As when a user cancels a task, or a call replaces one, in a long transaction."""
    with transaction.atomic():
        for order in (1, 1, 2):
            keyed.step.enqueue(order)

        def admit_all(number):
            return admit("default", ["order:1", "order:2"])

        transaction.get_connection().run_on_commit.clear()  # as after a crash right after the commit
    with transaction.atomic():
        Task.objects.select_for_update().earliest("id")
        assert in_threads(admit_all, 2).count(1) == 1
        assert statuses() == ["BLOCKED", "BLOCKED", "READY"]
    assert admit_all(0) == 1
    assert statuses() == ["READY", "BLOCKED", "READY"]


def test_a_locked_row_blocks_later_tasks_of_its_key_also_with_concurrency(in_threads):
    """Tasks of a key run in the order in which they were enqueued. The task of the other key is admitted."""
    with transaction.atomic():
        for name in ("a", "a", "a", "b"):
            keyed.call.enqueue(name)
        transaction.get_connection().run_on_commit.clear()
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=Task.objects.order_by("id")[1].pk)
        assert in_threads(lambda number: admit("default", ["api:a", "api:b"]), 1) == [2]
        assert statuses() == ["READY", "BLOCKED", "BLOCKED", "READY"]
    assert admit("default", ["api:a"]) == 2


def test_admission_sees_concurrent_admissions_at_every_isolation_level(in_threads, eventually):
    """With one snapshot for both statements, older than the lock, a second task would be admitted."""
    with transaction.atomic():
        for order in (1, 2, 2):
            keyed.step.enqueue(order)
        transaction.get_connection().run_on_commit.clear()
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with hold_key("order:1") as holder:

        def admit_one(number):
            if number == 0:
                execute_sql("SET default_transaction_isolation = 'repeatable read'")
                return admit("default", ["order:1", "order:2"])
            eventually(lambda: holder.execute(waiting).fetchone()[0], why="nobody waits")
            count = admit("default", ["order:2"])
            holder.execute("SELECT pg_advisory_unlock_all()")
            return count

        assert in_threads(admit_one, 2) == [1, 1]
    assert statuses() == ["READY", "READY", "BLOCKED"]


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_manual_verbs_respect_the_lock_key(claim, verb):
    first = keyed.step.enqueue(1)
    keyed.step.using(run_after=timedelta(hours=1)).enqueue(1)
    third = keyed.step.enqueue(1)
    if verb == "cancel":
        assert Task.objects.filter(pk=first.id).cancel() == 1
        assert statuses() == ["CANCELLED", "SCHEDULED", "READY"]
    else:
        Task.objects.filter(pk=third.id).cancel()
        assert Task.objects.filter(pk=third.id).retry() == 1
        assert statuses() == ["READY", "SCHEDULED", "BLOCKED"]


def test_a_rescue_keeps_the_order(claim):
    keyed.step.enqueue(1)
    keyed.step.enqueue(1)
    dead = uuid4()
    claim(1, worker=dead)
    assert [each.status for each in rescue("default", unbroken=math.inf)] == ["BLOCKED"]
    assert statuses() == ["READY", "BLOCKED"]


def test_upkeep_admits_tasks_after_a_crash_between_commit_and_admission(monkeypatch):
    """In other queues such a task stays blocked forever. Upkeep searches key by key, and continues where it stopped."""
    for order in range(5):
        keyed.step.enqueue(order)
    Task.objects.update(status="BLOCKED")
    first = blocked_keys("default", "", limit=3)
    rest = blocked_keys("default", first[-1], limit=3)
    assert (len(first), len(rest)) == (3, 2)
    told, admit_some = [], admit_module._admit
    monkeypatch.setattr(admit_module, "KEYS_AT_ONCE", 2)
    monkeypatch.setattr(admit_module, "_admit", lambda using, keys: told.append(keys) or admit_some(using, keys))
    monkeypatch.setattr(admit_module, "wake", lambda using, queues: told.append(queues))
    assert admit("default", [*first, *rest]) == 5
    assert told == [first[:2], [first[2], rest[0]], rest[1:], ["default"] * 5]
    assert set(statuses()) == {"READY"}


def test_tasks_of_one_key_run_one_after_another_in_their_order(worker, eventually):
    worker(threads=4)
    keyed.fail_first.enqueue(7)
    for number in range(20):
        keyed.step.enqueue(7, number)
    eventually(lambda: statuses() == ["SUCCESSFUL"] * 21)
    events = list(Effect.objects.order_by("pk").values_list("name", "number"))
    assert events[0] == ("begin 7", -1), "its first attempt, whose effect remains"
    expected = [(f"{what} 7", number) for number in range(-1, 20) for what in ("begin", "end")]
    assert events[1:] == expected


def test_no_more_tasks_of_a_key_run_at_once_than_its_concurrency(worker, eventually):
    worker(threads=8)
    for _ in range(30):
        keyed.call.enqueue("bank", 0.05)
    eventually(lambda: statuses() == ["SUCCESSFUL"] * 30)
    inside, most = 0, 0
    for name in Effect.objects.order_by("pk").values_list("name", flat=True):
        inside += 1 if name.startswith("begin") else -1
        most = max(most, inside)
    assert most == 3


def test_keys_at_which_tasks_wait_are_returned_in_order_each_once():
    for order in (3, 1, 2, 2, 1):
        keyed.step.enqueue(order)
    assert blocked_keys("default", "") == ["order:1", "order:2"], "no task waits at the third"
    assert blocked_keys("default", "", limit=1) == ["order:1"]
    assert blocked_keys("default", "order:1") == ["order:2"]
    assert blocked_keys("default", "order:2") == []


def test_a_key_is_held_by_tasks_that_are_admitted_or_will_be_retried():
    first, *_ = (int(keyed.step.enqueue(1).id) for _ in range(3))
    assert holders("default", "order:1", limit=5) == [first]
    later = int(keyed.step.using(run_after=timedelta(hours=1)).enqueue(1).id)
    assert holders("default", "order:1", limit=5) == [first], "one that has never run holds no key"
    Task.objects.filter(pk=later).update(started_at="2026-01-01T00:00Z")
    assert holders("default", "order:1", limit=5) == [first, later]
    assert holders("default", "order:1", limit=1) == [first]
    Task.objects.filter(pk=first).update(status="SCHEDULED", started_at=Now(), run_after=Now())
    Task.objects.filter(pk=later).update(status="READY")
    assert holders("default", "order:1", limit=5) == [first, later], "by id, and not by status"
    assert holders("default", "order:2", limit=5) == []


# The statements that a key adds, and that the short statements of admission have the result of the general one.


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
        CASE WHEN %(status)s = 'SCHEDULED' THEN now() + interval '1 hour' END, gen_random_uuid(),
        -- The bucket has the start of a task since it was claimed, so a start of just now without a bucket cannot be.
        now() - interval '1 day',
        CASE WHEN %(status)s = 'SUCCESSFUL' THEN now() END)
"""


def make(world, *, key=KEY, meta="{}"):
    with connection.cursor() as cursor:
        for status, concurrency, waits, tried, grouped in world:
            waits = waits if status == "BLOCKED" else 0
            values = {"status": status, "concurrency": concurrency, "waits": waits, "tried": tried, "grouped": grouped}
            cursor.execute(INSERT, {**values, "key": key, "meta": meta})


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
