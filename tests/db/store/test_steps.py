"""Tasks that continue where they were: steps, sleeps and events."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from threading import Event as Flag
from threading import Thread

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import now
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

from django_pglock import emit
from django_pglock.errors import ClaimLost
from django_pglock.loggers import RateOfRecords
from django_pglock.models import Event, Step, Task
from django_pglock.store import steps
from django_pglock.store.outcome import Snoozed
from django_pglock.store.settle import settle
from django_pglock.store.steps import RecordedSteps, missed_events, prune_events, read_records, wake_waiting
from django_pglock.store.why_it_waits import why_it_waits
from django_pglock.tasks import registry
from django_pglock.tasks.arguments import as_stored, from_json, to_json
from django_pglock.tasks.retry import MAX_DELAY
from django_pglock.tasks.step_records import HandedBack, Kind, StepEnded, Suspension
from django_pglock.testing import run_tasks
from tests.conftest import NEVER
from tests.sample import step_tasks as sample
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _fresh():
    sample.CALLS.clear()
    sample.FAILING.clear()
    sample.CODE.clear()


def outcomes(**options):
    return [each.outcome for each in run_tasks(**options)]


def refreshed(result):
    result.refresh()
    return result


# A task from its beginning to its end


@pytest.mark.parametrize("when", ["before the wait", "while it waits"])
def test_a_task_continues_behind_its_last_step(when):
    result = sample.order.enqueue(7)
    if when == "before the wait":
        emit("packed:7", {"by": "Eve"})
    assert outcomes(until="due") == ["snoozed"], "it sleeps"
    assert Task.objects.get().status == "SCHEDULED"
    Task.objects.all().run_now()
    if when == "while it waits":
        assert outcomes(until="due") == ["snoozed"]
        assert emit("packed:7", {"by": "Eve"})
        assert outcomes(until="due") == ["succeeded"]
    else:
        # It finds the event when it has begun to wait.
        assert outcomes(until="due") == ["snoozed", "succeeded"]
    assert refreshed(result).return_value == [{"name": "charge"}, {"by": "Eve"}]
    assert sample.CALLS == ["charge", "book", "mail"]
    assert Effect.objects.count() == 1
    assert Task.objects.get().attempts_made == 1, "a pause is no attempt"


def test_a_record_is_one_message_with_its_commit(monkeypatch):
    """So an atomic step has one message more than its function, and a transaction that the function begins has none."""
    sent, send = [], steps.send

    def note(connection, text):
        try:
            return send(connection, text)
        finally:
            sent.append(
                (text.partition(" ")[0].strip(), text.endswith("COMMIT"), connection.connection.info.transaction_status)
            )

    monkeypatch.setattr(steps, "send", note)
    sample.book_and_charge.enqueue()
    assert outcomes() == ["succeeded"]
    idle = TransactionStatus.IDLE
    assert sent == [("INSERT", False, idle), ("INSERT", True, idle)]


def test_a_coroutine_continues_behind_its_last_step():
    result = sample.aorder.enqueue(7)
    assert outcomes(until="due") == ["snoozed"]
    emit("packed:7")
    assert outcomes(until="due") == ["succeeded"]
    assert refreshed(result).return_value == [{"name": "charge"}, None], "None is no timeout"
    assert sample.CALLS == ["charge"]


def test_a_step_that_raises_is_tried_again_and_those_before_it_are_not():
    sample.FAILING["mail"] = 2
    sample.order.enqueue(7)
    emit("packed:7")
    assert outcomes() == ["snoozed", "snoozed", "retried", "retried", "succeeded"]
    assert sample.CALLS == ["charge", "book", "mail", "mail", "mail"]


def test_attempts_are_counted_since_the_last_record():
    sample.FAILING.update(charge=2, book=2)
    sample.order.enqueue(7)
    assert outcomes(until="due") == ["retried", "retried", "retried", "retried", "snoozed"]
    assert Effect.objects.count() == 1, "the transactions of the failed ones are rolled back"


def test_a_step_whose_attempts_are_spent_raises_in_each_run_the_same():
    """So a function that undoes its earlier steps takes the same way in each run."""
    sample.FAILING.update({"hotel": 2, "undo flight": 1})
    result = sample.trip.enqueue()
    assert outcomes() == ["retried", "retried", "succeeded"]
    assert sample.CALLS == ["flight", "hotel", "hotel", "undo flight", "undo flight"]
    [step, path, message] = refreshed(result).return_value
    assert (step, path, message) == ("hotel", "builtins.ConnectionError", "ConnectionError: hotel fails")


def test_a_retry_by_a_person_continues_at_the_failed_step():
    sample.FAILING["charge"] = 3
    result = sample.order.enqueue(7)
    assert outcomes(until="due") == ["retried", "retried", "failed"]
    [error] = refreshed(result).errors[-1:]
    assert error.exception_class_path == "django_pglock.errors.StepFailed"
    assert "in part\n" in error.traceback, "it has the line that has raised"
    assert Task.objects.all().retry() == 1
    assert not Step.objects.exists()
    assert outcomes(until="due") == ["snoozed"]


@pytest.mark.parametrize("how", ["raise", "cancel", "another error"])
def test_a_retry_by_a_person_runs_the_step_again_that_has_ended_the_task_and_those_after_it(how):
    """Those after it have undone something. A later run would not call them, and would end by StepsChanged."""
    sample.FAILING["hotel"] = 2
    sample.FAILING["newsletter"] = 2
    sample.strict_trip.enqueue(how)
    assert outcomes()[-1] == ("cancelled" if how == "cancel" else "failed")
    assert sample.CALLS == ["newsletter"] * 2 + ["flight"] + ["hotel"] * 2 + ["undo flight"]
    sample.CALLS.clear()
    assert Task.objects.all().retry() == 1
    assert outcomes() == ["succeeded"]
    assert sample.CALLS == ["hotel"], "the failure of the newsletter was caught, and stays"


def test_a_retry_by_a_person_repeats_nothing_if_no_step_has_ended_the_task():
    sample.FAILING.update(newsletter=2, bug=2)
    sample.strict_trip.enqueue("bug")
    assert outcomes()[-1] == "failed"
    sample.CALLS.clear()
    assert Task.objects.all().retry() == 1
    assert outcomes() == ["succeeded"]
    assert sample.CALLS == ["bug"]


def test_a_retry_by_a_person_waits_anew_for_an_event_whose_timeout_has_ended_the_task():
    result = sample.order.enqueue(7)
    assert outcomes()[-1] == "failed"
    assert Task.objects.all().retry() == 1
    assert outcomes(until="due") == ["snoozed"]
    emit("packed:7")
    assert outcomes(until="due") == ["succeeded"]
    assert refreshed(result).status == "SUCCESSFUL"


@pytest.mark.parametrize("how", ["swallows an error", "goes on after an error"])
def test_an_error_of_a_step_that_the_function_swallows_ends_the_attempt_nevertheless(how):
    sample.FAILING["charge"] = 1
    result = sample.wrong.enqueue(how)
    assert outcomes() == ["retried", "succeeded"]
    assert refreshed(result).status == "SUCCESSFUL"
    assert Step.objects.filter(name="charge", failure__isnull=True).exists()


@pytest.fixture
def deferred():
    """A table whose constraint is checked at the COMMIT."""
    execute_sql("CREATE TABLE sample_deferred (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    yield
    execute_sql("DROP TABLE sample_deferred")


@pytest.mark.parametrize("how", ["refused at commit", "refused at commit of rows"])
def test_a_step_whose_commit_is_refused_spends_its_attempts(deferred, how):
    Effect.objects.create(name="from")
    result = sample.wrong.enqueue(how)
    assert outcomes() == ["retried", "failed"]
    assert refreshed(result).errors[-1].exception_class_path.endswith(("StepFailed", "IntegrityError"))
    assert not Step.objects.filter(failure__isnull=True, kind="STEP").exists()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is new in Python 3.11")
def test_an_error_in_a_group_of_coroutines_is_that_of_its_step():
    sample.FAILING["charge"] = 1
    sample.together.enqueue(7)
    assert outcomes() == ["retried", "succeeded"]


# Events


def test_the_first_event_counts_and_a_rollback_writes_none():
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert emit("packed:7", 1)
        raise ZeroDivisionError
    assert emit("packed:7", 2)
    assert not emit("packed:7", 3)
    assert Event.objects.get().payload == 2


def test_all_tasks_that_wait_for_an_event_continue_and_no_other():
    first, second = sample.approval.enqueue(None), sample.approval.enqueue(3600)
    other = sample.order.enqueue(8)
    assert outcomes(until="due") == ["snoozed"] * 3
    with transaction.atomic():
        emit("approved", "by Eve")
        assert not Task.objects.filter(status="READY").exists()
    assert outcomes(until="due") == ["succeeded"] * 2
    assert [refreshed(each).return_value for each in (first, second)] == ["by Eve"] * 2
    assert Task.objects.get(pk=other.id).status == "SCHEDULED"


def test_an_event_that_does_not_come_in_time_raises():
    result = sample.approval.enqueue(3600)
    assert outcomes(until="due") == ["snoozed"]
    Step.objects.update(started_at=now() - timedelta(hours=2))
    Task.objects.update(run_after=Now())
    assert outcomes(until="due") == ["snoozed", "succeeded"], "the wait ends, and then the function continues"
    assert refreshed(result).return_value == "The event 'approved' has not come within 3600 s."
    emit("approved", 1)
    assert read_records("default", int(result.id))["approved"].result is None, "the timeout stays"


def test_a_coroutine_whose_event_does_not_come_in_time_sends_no_statement():
    result = sample.aorder.enqueue(7)
    assert outcomes() == ["snoozed", "snoozed", "failed"]
    assert refreshed(result).errors[0].exception_class_path == "django_pglock.errors.EventTimeout"


def test_an_event_that_is_there_although_the_time_is_over_counts():
    """Its emitter died before it made the task ready."""
    result = sample.approval.enqueue(3600)
    assert outcomes(until="due") == ["snoozed"]
    Step.objects.update(started_at=now() - timedelta(hours=2))
    Event.objects.create(name="approved", emitted_at=now(), expires_at=now(), payload=None)
    Task.objects.update(run_after=Now())
    assert outcomes(until="due") == ["snoozed", "succeeded"]
    assert refreshed(result).return_value is None


def test_an_event_does_not_end_the_back_off_of_a_task():
    result = sample.impatient.enqueue()
    assert outcomes(until="due") == ["snoozed"]
    sample.FAILING["before"] = 1
    Task.objects.all().run_now()
    assert outcomes(until="due") == ["retried"]
    task = Task.objects.get()
    assert why_it_waits(task, "default") == ""
    emit("approved", 1)
    assert Task.objects.get().run_after == task.run_after
    assert outcomes(until="due") == []
    assert outcomes() == ["succeeded"]
    assert refreshed(result).return_value == 1


def test_an_event_is_not_lost_for_a_task_that_just_begins_to_wait_once_more(claim, eventually, monkeypatch):
    """Its emitter sees a running task, waits for the row, and finds it suspended. The worker finds the wait ended."""
    monkeypatch.setattr("django_pglock.store.steps.LIMIT_WAKE", ())
    result = sample.approval.enqueue(3600)
    assert outcomes(until="due") == ["snoozed"]
    Task.objects.all().run_now()
    [mine] = claim()
    Event.objects.create(name="approved", emitted_at=now(), expires_at=now() + timedelta(days=1), payload=1)
    again = Snoozed(60, suspension=Suspension("approved", Kind.EVENT, 1, 60, "approved"))
    emitter = Thread(target=lambda: (wake_waiting("default", ["approved"]), connection.close()))
    with transaction.atomic():
        with monkeypatch.context() as first:
            first.setattr("django_pglock.store.steps.after_commit", lambda *values: None)
            settle("default", [(mine, again)], mine.worker)
        emitter.start()
        eventually(lambda: execute_sql("SELECT 1 FROM pg_locks WHERE NOT granted"), why="it does not wait for the row")
    emitter.join()
    assert outcomes(until="due") == ["succeeded"]
    assert refreshed(result).return_value == 1


def test_run_now_does_not_end_a_wait_and_does_not_prolong_it():
    sample.approval.enqueue(3600)
    assert outcomes(until="due") == ["snoozed"]
    Step.objects.update(started_at=now() - timedelta(seconds=3000))
    Task.objects.all().run_now()
    assert outcomes(until="due") == ["snoozed"]
    assert Task.objects.get().run_after < now() + timedelta(seconds=700)
    emit("approved")
    assert outcomes(until="due") == ["succeeded"]


def test_an_event_and_the_timeout_at_once_leave_one_of_them(in_threads):
    results = [sample.approval.enqueue(3600) for _ in range(8)]
    run_tasks(until="due")
    Step.objects.update(started_at=now() - timedelta(hours=2))
    in_threads(lambda number: emit("approved", 1) if number == 0 else Task.objects.all().run_now(), 2)
    run_tasks(until="due")
    said = {refreshed(each).return_value for each in results}
    assert said <= {1, "The event 'approved' has not come within 3600 s."}
    for each in results:
        record = read_records("default", int(each.id))["approved"]
        assert (record.result == 1) is (each.return_value == 1)


def test_run_tasks_does_not_wait_for_an_event_that_does_not_come():
    result = sample.approval.enqueue(3600)
    assert outcomes() == ["snoozed", "snoozed", "succeeded"]
    assert refreshed(result).return_value == "The event 'approved' has not come within 3600 s."


def test_the_upkeep_finds_an_event_whose_emitter_died_after_its_commit(monkeypatch):
    sample.approval.enqueue(3600)
    run_tasks(until="due")
    emit("other")
    with monkeypatch.context() as dying:
        dying.setattr("django_pglock.store.steps.after_commit", lambda *values: None)
        emit("approved")
    assert outcomes(until="due") == []
    [(event, is_there)] = missed_events("default", "")
    assert (event, is_there) == ("approved", True)
    assert wake_waiting("default", [event]) == 1
    assert outcomes(until="due") == ["succeeded"]


def test_events_are_deleted_when_their_time_is_over():
    emit("old")
    emit("new")
    Event.objects.filter(name="old").update(expires_at=Now())
    prune_events("default")
    assert Event.objects.get().name == "new"


def test_steps_are_deleted_with_their_task():
    sample.order.enqueue(7)
    run_tasks(until="due")
    assert Step.objects.count() == 3
    Task.objects.all().cancel()
    assert Task.objects.prune(older_than=0) == 1
    assert not Step.objects.exists()


# Rows in parts


def numbers(name):
    return sorted(Effect.objects.filter(name=name).values_list("number", flat=True))


@pytest.mark.parametrize("count", [0, 1, 3, 10])
@pytest.mark.parametrize("how", ["in a transaction", "plainly"])
def test_a_loop_sees_each_row_once(how, count):
    Effect.objects.bulk_create(Effect(name="from", number=number) for number in range(count))
    result = sample.copy_rows.enqueue(how)
    assert outcomes() == ["succeeded"]
    assert numbers("to") == list(range(count))
    assert refreshed(result).return_value == count


def test_a_loop_ignores_the_order_of_its_queryset(claim):
    Effect.objects.bulk_create(Effect(name="from", number=number) for number in range(5))
    sample.copy_rows.enqueue("plainly")
    [mine] = claim()
    for rows in (Effect.objects.reverse(), Effect.objects.order_by("-number").reverse()):
        Step.objects.all().delete()
        assert [len(each) for each in steps_of(mine).chunks("rows", rows, 2)] == [2, 2, 1]


@pytest.mark.parametrize("how", ["by a break", "by a break behind its rows", "by an error"])
def test_a_loop_that_the_function_leaves_is_over_in_each_later_run(how):
    """Otherwise a later run would continue the loop, and see other rows than those behind which it continued."""
    Effect.objects.bulk_create(Effect(name="from", number=number) for number in range(10))
    sample.FAILING["after"] = 1
    result = sample.leave_loop.enqueue(how)
    assert outcomes() == ["retried", "succeeded"]
    assert refreshed(result).return_value == []
    assert numbers("to") == [0, 1, 2]
    [loop, _after] = Step.objects.order_by("number")
    assert loop.finished_at is not None


def test_a_loop_that_is_left_by_an_error_continues_if_the_function_ends_by_it():
    Effect.objects.bulk_create(Effect(name="from", number=number) for number in range(10))
    sample.FAILING["in the loop"] = 1
    sample.leave_loop.enqueue("not")
    assert outcomes() == ["retried", "succeeded"]
    assert numbers("to") == list(range(10))


@pytest.mark.parametrize(("how", "repeated"), [("in a transaction", []), ("plainly", [6])])
def test_a_loop_continues_behind_its_last_list(monkeypatch, how, repeated):
    Effect.objects.bulk_create(Effect(name="from", number=number) for number in range(10))
    sample.copy_rows.enqueue(how)
    monkeypatch.setattr(sample, "LEFT", [3])
    assert outcomes() == ["retried", "succeeded"]
    assert numbers("to") == sorted([*range(10), *repeated])


def test_a_worker_that_has_lost_its_claim_notes_no_position(claim):
    Effect.objects.bulk_create(Effect(name="from", number=number) for number in range(4))
    sample.copy_rows.enqueue("plainly")
    [lost] = claim()
    loop = steps_of(lost).chunks("rows", Effect.objects.all(), 2)
    next(loop)
    Task.objects.update(attempts=2)
    with pytest.raises(HandedBack):
        next(loop)
    assert not Step.objects.exists()


def test_rows_of_a_loop_are_written_once_although_a_lost_attempt_commits_late(claim, in_threads):
    """It is stopped before its COMMIT, and meanwhile the next attempt has begun with the same rows."""
    Effect.objects.create(name="from", number=7)
    sample.copy_rows.enqueue("in a transaction")
    [frozen] = claim()
    has_noted, has_begun = Flag(), Flag()

    def write(claim, noted, go_on):
        for rows in steps_of(claim).chunks("rows", Effect.objects.filter(name="from"), 2):
            with rows:
                Effect.objects.bulk_create(Effect(name="to", number=each.number) for each in rows)
                note = rows.steps.note_position
                rows.steps.note_position = lambda chunk, note=note: (go_on(), note(chunk), noted())

    def work(number):
        if number == 0:
            write(frozen, lambda: (has_noted.set(), has_begun.wait(NEVER)), lambda: None)
            return
        assert has_noted.wait(NEVER)
        Task.objects.update(attempts=2)
        with pytest.raises(HandedBack):
            write(replace(frozen, attempt=2), lambda: None, has_begun.set)

    in_threads(work, 2)
    assert numbers("to") == [7]
    assert Step.objects.get().attempt == 1


# The claim


def steps_of(claim):
    return RecordedSteps("default", claim, registry.find(claim.task_path))


def test_a_worker_that_has_lost_its_claim_records_nothing(claim):
    sample.order.enqueue(7)
    [lost] = claim()
    Task.objects.update(attempts=2)
    with pytest.raises(StepEnded) as ended:
        steps_of(lost).step("charge", sample.part, "charge")
    assert isinstance(ended.value.error, ClaimLost)
    with pytest.raises(StepEnded):
        steps_of(lost).atomic_step("book", sample.effect, "book")
    assert not Step.objects.exists()
    assert not Effect.objects.exists()


@pytest.mark.parametrize("kind", ["step", "atomic_step"])
def test_the_next_attempt_takes_what_a_frozen_worker_has_recorded(claim, kind):
    """It had read the records before the frozen worker wrote its last one. Its own transaction is rolled back."""
    sample.order.enqueue(7)
    [frozen] = claim()
    Task.objects.update(attempts=2)
    late = steps_of(replace(frozen, attempt=2))
    Task.objects.update(attempts=1)
    steps_of(frozen).step("book", lambda: "of the frozen one")
    Task.objects.update(attempts=2)
    assert getattr(late, kind)("book", sample.effect, "book") == "of the frozen one"
    assert Effect.objects.count() == (0 if kind == "atomic_step" else 1)


def statements_of(function, how):
    """Return the texts of the statements of the life of a task, without their values, and without those that wake."""
    with CaptureQueriesContext(connection) as captured:
        function.enqueue(how)
        outcomes(until="due")
    return [re.sub(r"'[^']*'|[0-9]+", "?", each["sql"]) for each in captured if "pg_notify" not in each["sql"]]


@pytest.mark.parametrize("how", ["return", "error", "snooze", "cancel"])
def test_a_task_without_steps_executes_the_statements_of_one_that_cannot_have_any(how):
    ways = statements_of(sample.without_context, how), statements_of(sample.without_steps, how)
    assert ways[0] == ways[1]
    assert not [text for text in ways[0] if "django_pglock_step" in text or "django_pglock_event" in text]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('aé\t"💡', max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abé💡", max_size=4), inner, max_size=4),
)


@given(st.lists(JSON, max_size=20))
@settings(max_examples=100)
def test_the_first_run_gets_the_same_result_as_each_later_one(value):
    """Also the same order of keys and types of numbers: a function may loop over a result, and name steps by it."""
    text = to_json(value)
    [(stored,)] = execute_sql("SELECT %s::jsonb::text", [text])
    assert repr(as_stored(text)) == repr(from_json(stored))


def test_a_first_claim_reads_no_records(claim, django_assert_num_queries):
    sample.order.enqueue(7)
    [first] = claim()
    with django_assert_num_queries(1):
        steps_of(first).step("charge", sample.part, "charge")


# What is refused


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("nested", "The step 'inner' is called while the step 'outer' runs"),
        ("twice", "The step 'same' is called twice"),
        ("no text", "The name of the step is 7; give a text"),
        ("no JSON", "The result of the step 'object' cannot be stored as JSON"),
        ("in a transaction", "The step 'inside' is called inside of atomic()"),
        ("swallows", "The function has returned after 'nap' has suspended the task"),
        ("goes on", "The step 'after' is called after 'nap' has suspended the task"),
        ("in a loop", "The step 'inside' is called in the loop 'rows'"),
        ("without a size", "The size of 'rows' is 0"),
        ("in a thread", "The step 'elsewhere' is called in another thread"),
        ("called before", "The function of the step 'called' is {'name': 'called'}. Give the function, and then"),
        ("a coroutine", "The step 'coroutine' calls a coroutine function. Write: await context.astep"),
        ("an atomic coroutine", "The step 'coroutine' calls a coroutine function. Write: await context.astep"),
        ("in an event loop", "The step 'blocks' would block the event loop. A coroutine awaits context.astep()"),
        ("no coroutine", "The step 'no coroutine' calls a function that is not awaitable"),
        ("a list", "The rows of 'rows' are a list that cannot be read in parts"),
        ("a slice", "The rows of 'rows' are a QuerySet that cannot be read in parts"),
        ("dicts", "The rows of 'rows' are a QuerySet that cannot be read in parts"),
        ("a union", "The rows of 'rows' are a QuerySet that cannot be read in parts"),
        ("surrogate", "The name of the step contains a NUL character or a lone surrogate"),
        ("NUL in an event", "The name of the event contains a NUL character or a lone surrogate"),
        ("no name", "The name of the step is ''; give a text of 1 to 200 characters"),
        ("backwards", "The sleep 'nap' is -1; give seconds (zero or more) or a timedelta"),
        ("NaN", "The timeout of 'approved' is nan; give seconds"),
        ("for ever", "The sleep 'nap' is 1e+300; the maximum is ten years"),
    ],
)
@pytest.mark.parametrize("is_swallowed", [False, True], ids=["", "an except Exception does not catch it"])
def test_a_wrong_use_fails_the_task_without_a_retry(how, why, is_swallowed):
    Effect.objects.create(name="from")
    result = sample.wrong.enqueue(how, is_swallowed)
    assert outcomes() == ["failed"]
    traceback = refreshed(result).errors[0].traceback
    assert why in traceback
    assert "step_tasks.py" in traceback or how == "in a thread", "it has the line"
    assert not Step.objects.filter(name__in=("inner", "after", "inside", "object")).exists()


@pytest.mark.parametrize("how", ["BEGIN", "autocommit off"])
def test_a_record_is_committed_although_the_function_leaves_a_transaction_open(how):
    """Otherwise the record would be rolled back at the end of the function, and the step repeated."""
    sample.FAILING["after"] = 1
    sample.manual.enqueue(how)
    assert outcomes() == ["retried", "succeeded"]
    assert sample.CALLS == ["manual", "after", "after"]
    assert Step.objects.count() == 2
    assert Effect.objects.count() == 1


def test_a_failed_step_in_an_open_transaction_is_recorded_without_its_effects():
    sample.FAILING["manual"] = 2
    sample.manual.enqueue("autocommit off")
    assert outcomes() == ["retried", "failed"]
    assert Step.objects.get().failure is not None
    assert not Effect.objects.exists()


@pytest.mark.parametrize("date", [datetime.min, datetime.max, datetime.min.replace(tzinfo=timezone.utc)])
def test_a_sleep_takes_each_date(claim, date):
    sample.order.enqueue(7)
    [mine] = claim()
    if date.year == 1:
        assert steps_of(mine).sleep("nap", date) is None, "it is over"
    else:
        with pytest.raises(Suspension) as pause:
            steps_of(mine).sleep("nap", date)
        assert pause.value.seconds == MAX_DELAY


def test_an_atomic_function_has_no_steps():
    result = sample.atomic.enqueue()
    assert outcomes() == ["failed"]
    assert "step_tasks.atomic is atomic, and so is one step itself" in refreshed(result).errors[0].traceback


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("a b fail", "a x b", None),
        ("a b fail", "a ?b", None),
        ("a b fail", "a", "'b' was recorded and not called"),
        ("a b fail", "b a", "'a' was recorded as STEP number 1"),
    ],
    ids=["a new step runs", "a step that is asked for may go", "a step is missing", "the order is another one"],
)
def test_a_function_that_has_changed_is_noticed(before, after, said):
    result = sample.changing.enqueue()
    sample.CODE[:], sample.NEXT[:] = before.split(), after.split()
    first, *others, last = outcomes()
    assert (first, last) == ("retried", "succeeded" if said is None else "failed")
    assert others == ["snoozed"] * (0 if said is None else 20), "it waits for ten minutes for a worker with other code"
    if said is not None:
        assert re.search(said, refreshed(result).errors[-1].traceback)


def test_old_code_that_gets_a_task_of_new_code_postpones_it(caplog, monkeypatch):
    monkeypatch.setattr("django_pglock.store.steps.postponed", RateOfRecords(0))
    result = sample.changing.enqueue()
    sample.CODE[:], sample.NEXT[:] = ["a", "b", "fail"], ["a"]
    assert outcomes(until="due") == ["retried", "snoozed"]
    assert "Recorded: ['a', 'b']; called in this run: ['a']" in caplog.text
    task = Task.objects.get()
    assert why_it_waits(task, "default") == "This task waits for a worker with the code of its steps."
    assert task.retries == 1, "no attempt is spent"
    sample.CODE[:] = ["a", "b", "c"]
    Task.objects.all().run_now()
    assert outcomes(until="due") == ["succeeded"]
    assert sample.CALLS == ["a", "b", "c"]
    assert not refreshed(result).errors[1:]


@pytest.mark.parametrize("progress", [True, False])
def test_each_deploy_has_ten_minutes_if_the_task_has_made_progress_in_between(progress):
    sample.changing.enqueue()
    sample.CODE[:], sample.NEXT[:] = ["a", "b", "fail"], ["a"]
    assert outcomes(until="due") == ["retried", "snoozed"]
    Step.objects.filter(kind="CHANGED").update(started_at=now() - timedelta(hours=1))
    if progress:
        sample.CODE[:] = ["a", "b", "c", "fail"]
        Task.objects.all().run_now()
        assert outcomes(until="due") == ["retried", "snoozed"]
    else:
        Task.objects.all().run_now()
        assert outcomes(until="due") == ["failed"]
        assert Task.objects.all().retry() == 1
        assert outcomes(until="due") == ["snoozed"], "a retry postpones it anew"


# What people see


def test_a_task_says_for_what_it_waits_in_its_step():
    result = sample.order.enqueue(7)
    run_tasks(until="due")
    task = Task.objects.get(pk=result.id)
    assert why_it_waits(task, "default").startswith("This task sleeps until 20")
    Task.objects.all().run_now()
    run_tasks(until="due")
    task.refresh_from_db()
    assert why_it_waits(task, "default").startswith("This task waits for the event packed:7 until 20")
    Step.objects.filter(kind="EVENT").delete()
    assert why_it_waits(task, "default") == "", "it waits for its retry: the sleep is over"
