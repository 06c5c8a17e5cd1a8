"""Single calls of a group fail: ``calls.fail()`` and ``calls.each()``."""

from __future__ import annotations

from collections import Counter

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Attempt, Task
from django_pglock.store import settle
from django_pglock.tasks.calls import Calls
from django_pglock.testing import run_tasks
from django_pglock.worker.child import attempt as attempts
from django_pglock.worker.child.run import run
from django_pglock.worker.child.runners import Runner, Watchdog
from tests.db.worker.conftest import statuses
from tests.sample import grouped_tasks as grouped
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

ENDS = ["fine", "raise", "wrong value", "cancel", "retry", "snooze", "once", "fine too"]


@pytest.fixture(autouse=True)
def nothing_has_happened():
    for each in (grouped.failed_once, grouped.lost):
        each.clear()
    grouped.begun.clear()
    grouped.may_end.clear()


def enqueue(task, *ends):
    """Enqueue calls that run together, and return their ids."""
    return [int(each) for each in enqueue_many(task, [{"how": how} for how in ends])]


def effects():
    return Counter(Effect.objects.values_list("name", flat=True))


def has_ended(*ids):
    return lambda: Task.objects.filter(pk__in=ids, finished_at=None).count() == 0


@pytest.mark.parametrize("task", [grouped.book_atomically, grouped.book_plainly])
def test_each_call_of_a_group_ends_by_its_own_error_and_the_others_succeed(worker, eventually, task):
    ids = dict(zip(ENDS, enqueue(task, *ENDS), strict=True))
    running = worker(threads=1)
    eventually(has_ended(*(ids[how] for how in ENDS if how not in ("retry", "snooze"))))
    eventually(lambda: not running.in_flight.claims)
    rows = {how: Task.objects.get(pk=id_) for how, id_ in ids.items()}
    assert {how: row.status for how, row in rows.items()} == {
        "fine": "SUCCESSFUL",
        "raise": "FAILED",
        "wrong value": "FAILED",
        "cancel": "CANCELLED",
        "retry": "SCHEDULED",
        "snooze": "SCHEDULED",
        "once": "SUCCESSFUL",
        "fine too": "SUCCESSFUL",
    }
    assert rows["fine"].result == len(ENDS)
    assert (rows["raise"].retries, rows["retry"].retries, rows["snooze"].retries) == (1, 1, 0)
    tries = Counter(Attempt.objects.values_list("task_id", flat=True))
    expected = {"raise": 2, "retry": 1, "once": 1, "wrong value": 1, "cancel": 1}
    assert tries == {ids[how]: count for how, count in expected.items()}
    failure = Attempt.objects.filter(task=ids["raise"]).first()
    assert failure.exception_path == "tests.sample.grouped_tasks.Wrong"
    assert failure.traceback.splitlines()[1].endswith("in book_each"), "it begins in the function"
    handled = Effect.objects.filter(name="failed").values_list("number", flat=True)
    eventually(lambda: sorted(handled.all()) == sorted([ids["raise"], ids["wrong value"]]))


def test_what_the_block_of_a_failed_call_has_written_is_rolled_back(worker, eventually):
    ids = enqueue(grouped.book_atomically, *ENDS[:4], "fine too")
    worker(threads=1)
    eventually(has_ended(*ids))
    assert effects() - Counter(failed=2) == {"fine": 1, "fine too": 1}


def test_without_a_block_what_was_written_for_a_failed_call_stays(worker, eventually):
    ids = enqueue(grouped.fail_some, "fine", "raise", "raise")
    worker(threads=1)
    eventually(has_ended(*ids))
    assert [Task.objects.get(pk=each).status for each in ids] == ["SUCCESSFUL", "FAILED", "FAILED"]
    assert effects() - Counter(failed=2) == {"fine": 1, "raise": 4}, "once in each attempt"


def test_all_calls_of_a_group_may_fail_by_themselves(worker, eventually):
    ids = enqueue(grouped.book_atomically, "raise", "wrong value")
    worker(threads=1)
    eventually(has_ended(*ids))
    assert statuses()["FAILED"] == 2


def test_calls_fail_by_themselves_in_a_coroutine(worker, eventually):
    ids = enqueue(grouped.book_in_coroutine, "fine", "raise")
    worker(threads=1)
    eventually(has_ended(*ids))
    assert [Task.objects.get(pk=each).status for each in ids] == ["SUCCESSFUL", "FAILED"]


def test_if_the_function_raises_all_calls_fail_by_its_error(worker, eventually):
    ids = enqueue(grouped.fail_one_and_all, "a", "b")
    worker(threads=1)
    eventually(has_ended(*ids))
    assert set(Attempt.objects.values_list("exception_path", flat=True)) == {"builtins.ValueError"}
    assert not effects()


@pytest.fixture
def attempt_of(claim):
    """Claim some calls, and return their common attempt."""

    def make(task, *ends, **options):
        enqueue(task.using(**options), *ends)
        Task.objects.update(status="READY")
        first, *others = claim(len(ends))
        attempt = attempts.Attempt(first, "default")
        attempt.include([attempts.Attempt(each, "default") for each in others])
        return attempt

    return make


def outcomes_of(attempt):
    ended = run(attempt, Runner(Watchdog()))
    return [type(each.outcome).__name__ for each in (ended, *ended.same_call)]


def test_one_statement_settles_an_atomic_group_of_which_no_call_has_failed(attempt_of):
    attempt = attempt_of(grouped.fail_some, *["fine"] * 5)
    with CaptureQueriesContext(connection) as sent:
        assert outcomes_of(attempt) == ["Succeeded"] * 5
    assert sum("django_pglock_task" in each["sql"] for each in sent) == 1
    assert not any("SAVEPOINT" in each["sql"] for each in sent)


def test_one_statement_settles_all_successes_and_one_all_failures(attempt_of):
    attempt = attempt_of(grouped.fail_some, "fine", "raise", "fine", "raise")
    with CaptureQueriesContext(connection) as sent:
        assert outcomes_of(attempt) == ["Succeeded", "Retried", "Succeeded", "Retried"]
    assert sum('UPDATE "django_pglock_task"' in each["sql"] for each in sent) == 2


def test_a_timeout_stops_the_whole_group(worker, eventually):
    """Neither the error of a statement that was cancelled nor the stop is the failure of a single call."""
    ids = [
        *enqueue(grouped.sleep_in_sql.using(timeout=0.2), *"ab"),
        *enqueue(grouped.wait_for_stop.using(timeout=0.2), *"ab"),
    ]
    worker(threads=2)
    eventually(has_ended(*ids))
    assert set(Attempt.objects.values_list("exception_path", flat=True)) == {"django_pglock.errors.TaskTimeout"}
    assert statuses() == {"FAILED": 4}
    assert not effects()


def test_a_cancel_of_all_calls_stops_the_group(worker, eventually):
    ids = enqueue(grouped.sleep_in_sql, *"ab")
    worker(threads=1)
    eventually(lambda: statuses() == {"RUNNING": 2})
    Task.objects.filter(pk__in=ids).cancel()
    eventually(has_ended(*ids))
    assert statuses() == {"CANCELLED": 2}


def test_a_call_whose_cancel_was_requested_is_not_retried(attempt_of):
    attempt = attempt_of(grouped.fail_some, "fine", "raise")
    Task.objects.filter(pk=attempt.others[0].claim.id).cancel()
    assert outcomes_of(attempt) == ["Succeeded", "Retried"], "the request has not arrived"
    assert sorted(statuses()) == ["CANCELLED", "SUCCESSFUL"]


def test_what_waits_for_a_call_whose_cancel_was_requested_is_released(worker, eventually):
    """The outcome of the call would be a retry. Its transaction has written that it is cancelled."""
    first, second = enqueue(grouped.wait_then_fail_first.using(max_attempts=2), *"ab")
    waiting = grouped.note_failure.using(after_ended=first).enqueue(1)
    running = worker(threads=1)
    assert grouped.begun.wait(60)
    Task.objects.filter(pk=first).update(cancel_requested_at=Now())
    grouped.may_end.set()
    eventually(has_ended(first, second))
    eventually(lambda: not running.in_flight.claims)
    assert Task.objects.get(pk=waiting.id).status != "BLOCKED", "it was released before the claim was removed"


def test_an_exception_that_is_no_exception_of_the_call_ends_the_group(attempt_of):
    assert outcomes_of(attempt_of(grouped.leave, *"ab")) == ["Failed", "Failed"]


def test_a_lost_session_is_no_failure_of_a_call(worker, eventually):
    ids = enqueue(grouped.lose_session, *"abc")
    worker(threads=1)
    eventually(has_ended(*ids))
    assert statuses() == {"SUCCESSFUL": 3}
    assert effects() == {"once": 3}
    assert len(grouped.lost) == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_with_one_lost_claim_nothing_is_committed_and_the_others_run_again(worker, eventually, place):
    """The worker was frozen, for example. Before, the others failed if it was not the first claim that was lost."""
    ids = enqueue(grouped.wait_then_fail_first, *"abc")
    running = worker(threads=1)
    assert grouped.begun.wait(60)
    Task.objects.filter(pk=ids[place]).update(status="CANCELLED", finished_at=Now())
    grouped.may_end.set()
    eventually(has_ended(*ids))
    eventually(lambda: not running.in_flight.claims)
    assert running.settler.lost == 1
    rows = [Task.objects.get(pk=each) for each in ids]
    failed = next(each for each in rows if each.status != "CANCELLED")
    assert [row.status for row in rows if row != failed and row.pk != ids[place]] == ["SUCCESSFUL"]
    assert (failed.status, failed.attempts_made) == ("FAILED", 1), "the first of those that are left"
    assert effects() == {"rolled back": 1}


def test_a_session_that_is_lost_between_failures_and_successes_keeps_neither(worker, eventually, monkeypatch):
    """A worker that is killed there leaves the same."""
    send, cut = settle.send, []

    def send_or_end(connection, statements):
        if "COMMIT" in statements and not cut:
            cut.append(Task.objects.filter(status="FAILED").count())
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return send(connection, statements)

    monkeypatch.setattr(settle, "send", send_or_end)
    ids = enqueue(grouped.fail_some.using(max_attempts=1), "fine", "raise")
    worker(threads=1)
    eventually(has_ended(*ids))
    assert cut == [1], "the failure was written when the session was lost"
    eventually(lambda: statuses() == {"SUCCESSFUL": 2, "FAILED": 1}, why="the handler has not run")
    assert effects() == {"fine": 1, "raise": 1, "failed": 1}


def test_failures_wait_for_a_locked_row_as_successes_do(worker, eventually, locked):
    ids = enqueue(grouped.wait_then_fail_first, *"ab")
    worker(threads=1)
    assert grouped.begun.wait(60)
    with locked(ids[0]), connection.cursor() as cursor:
        grouped.may_end.set()
        eventually(lambda: cursor.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())
        # The limit of a statement of the settler is 0.1 s.
        cursor.execute("SELECT pg_sleep(0.2)")
        assert cursor.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall()
    eventually(has_ended(*ids))
    assert [Task.objects.get(pk=each).attempts for each in ids] == [1, 1]


def test_a_wrong_call_and_a_wrong_error_are_refused():
    calls = Calls([{"a": 1}, {"a": 1}], {})
    with pytest.raises(ValueError, match=r"none of the 2 calls that the function got\. Pass the dict itself"):
        calls.fail({"a": 1}, ValueError())
    with pytest.raises(ValueError, match="not a copy of it"), calls.each(dict(calls[0])):
        pytest.fail("the block must not run")
    with pytest.raises(TypeError, match="takes an exception and got 'no'"):
        calls.fail(calls[0], "no")


def test_without_a_worker_the_error_of_a_call_is_raised():
    with pytest.raises(grouped.Wrong):
        grouped.book_plainly.call([{"how": "fine"}, {"how": "raise"}])
    assert effects() == {"fine": 1, "raise": 1}


class InATestCase(TestCase):
    def test_single_calls_fail_in_run_tasks(self):
        enqueue(grouped.book_atomically.using(max_attempts=1), "fine", "raise", "wrong value")
        assert [each.outcome for each in run_tasks()] == ["succeeded", "failed", "failed", "succeeded", "succeeded"]
        assert effects() == {"fine": 1, "failed": 2}
