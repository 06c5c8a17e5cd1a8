"""Tasks that run after others."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task, Waiter
from django_pglock.store import move
from django_pglock.store.admit import admit
from django_pglock.store.outcome import Cancelled, Failed, Failure, Retried, Succeeded
from django_pglock.store.promote import promote
from django_pglock.store.release import release, stray_waiters
from django_pglock.store.settle import settle
from django_pglock.tasks.compat import TaskResultStatus
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

FAILURE = Failure("builtins.ValueError", "Traceback …")


def statuses():
    return list(Task.objects.order_by("id").values_list("status", flat=True))


def settle_one(claim, outcome):
    settle("default", [(claim, outcome)], claim.worker)
    release("default", [claim.id])


def test_it_waits_for_all_and_runs_when_the_last_has_succeeded(claim):
    first, second = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    tasks.nothing.using(after=[first, second.id, int(second.id)]).enqueue()
    assert statuses() == ["READY", "READY", "BLOCKED"]
    one, two = claim(2)
    settle_one(one, Succeeded())
    assert statuses() == ["SUCCESSFUL", "RUNNING", "BLOCKED"]
    settle_one(two, Succeeded())
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY"]
    assert not Waiter.objects.exists()


def test_a_retry_is_no_end(claim):
    tasks.nothing.using(after=[tasks.echo.enqueue(1)]).enqueue()
    settle_one(claim()[0], Retried(FAILURE, 60))
    assert statuses() == ["SCHEDULED", "BLOCKED"]


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Cancelled(FAILURE)])
def test_what_comes_after_a_failure_is_cancelled_to_the_last(claim, outcome):
    first = tasks.echo.enqueue(1)
    second = tasks.nothing.using(after=[first]).enqueue()
    third = tasks.nothing.using(after=[second]).enqueue()
    other = tasks.echo.enqueue(2)
    tasks.nothing.using(after=[third, other]).enqueue()
    settle_one(claim()[0], outcome)
    assert statuses()[1:] == ["CANCELLED", "CANCELLED", "READY", "CANCELLED"]
    third.refresh()
    assert third.status == TaskResultStatus.FAILED
    assert [error.exception_class_path for error in third.errors] == ["django_pglock.errors.DependencyFailed"]
    assert f"Task {second.id}" in third.errors[0].traceback


@pytest.mark.parametrize("verb", ["cancel", "delete"])
def test_what_a_person_takes_away_takes_what_comes_after_it(verb):
    first = tasks.echo.enqueue(1)
    tasks.nothing.using(after=[first]).enqueue()
    getattr(Task.objects.filter(pk=first.id), verb)()
    release("default", [each for _, each in stray_waiters("default", 0) if each is not None])
    assert statuses()[-1] == "CANCELLED"


def test_one_that_is_finished_already_is_not_waited_for(claim):
    first = tasks.echo.enqueue(1)
    settle_one(claim()[0], Succeeded())
    tasks.nothing.using(after=[first]).enqueue()
    assert statuses() == ["SUCCESSFUL", "READY"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_one_that_is_finished_is_kept_until_what_comes_after_it_is_committed(claim, in_threads, is_finished):
    """Nobody else sees before that it is needed. Neither its claim nor its end waits for that."""
    first = tasks.echo.using(keep_result=0).enqueue(1)

    def end():
        [mine] = claim()
        settle_one(mine, Succeeded())

    if is_finished:
        end()
    with transaction.atomic():
        tasks.nothing.using(after=[first]).enqueue()
        if not is_finished:
            in_threads(lambda _: end(), 1)
        assert in_threads(lambda _: Task.objects.prune(), 1) == [0]
    assert statuses() == ["SUCCESSFUL", "READY"]
    assert Task.objects.prune() == 1


@pytest.mark.parametrize("options", [{}, {"fair": "{value}"}, {"lock": "echo:{value}"}])
def test_what_others_are_enqueued_to_run_after_can_be_claimed_meanwhile(worker, eventually, options):
    first = tasks.echo.using(**options).enqueue(1)
    with transaction.atomic():
        tasks.nothing.using(after=[first]).enqueue()
        worker()
        eventually(lambda: Task.objects.get(pk=first.id).status == "SUCCESSFUL")


@pytest.mark.parametrize("runs", [True, False])
def test_what_others_are_enqueued_to_run_after_can_be_cancelled_meanwhile(claim, in_threads, runs):
    first = tasks.echo.enqueue(1)
    if runs:
        claim()
    with transaction.atomic():
        tasks.nothing.using(after=[first]).enqueue()
        assert in_threads(lambda _: Task.objects.filter(pk=first.id).cancel(), 1) == [1]


def test_a_key_and_a_date_are_waited_for_as_well(claim):
    first = tasks.echo.enqueue(1)
    keyed.step.using(after=[first], run_after=timedelta(hours=1)).enqueue(1)
    keyed.step.using(after=[first]).enqueue(1)
    keyed.step.using(after=[first]).enqueue(1)
    settle_one(claim()[0], Succeeded())
    assert statuses()[1:] == ["SCHEDULED", "READY", "BLOCKED"]
    Task.objects.filter(status="SCHEDULED").update(run_after=Now())
    promote("default")
    assert statuses()[1:] == ["BLOCKED", "READY", "BLOCKED"]


def test_it_has_its_turn_at_its_key_when_what_it_waited_for_has_the_same(worker, eventually):
    first = keyed.step.enqueue("a", 1)
    keyed.step.using(after=[first]).enqueue("a", 2)
    keyed.step.enqueue("a", 3)
    worker()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 3)
    begun = Effect.objects.filter(name="begin a").order_by("id")
    assert list(begun.values_list("number", flat=True)) == [1, 2, 3]


def test_nobody_of_its_key_comes_between_the_end_and_the_word_of_it(claim):
    """Whoever admits after the end of what it waited for, and before those who wait are told."""
    first = keyed.step.enqueue("a", 1)
    keyed.step.using(after=[first]).enqueue("a", 2)
    keyed.step.enqueue("a", 3)
    settle("default", [(claim()[0], Succeeded())], uuid4())
    admit("default", ["order:a"])
    assert statuses() == ["SUCCESSFUL", "BLOCKED", "BLOCKED"]
    release("default", [int(first.id)])
    assert statuses() == ["SUCCESSFUL", "READY", "BLOCKED"]


def test_one_that_is_cancelled_holds_up_nobody_of_its_key(claim):
    first, other = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    keyed.step.using(after=[first, other]).enqueue("a", 1)
    one, two = claim(2)
    settle("default", [(one, Failed(FAILURE)), (two, Succeeded())], one.worker)
    keyed.step.enqueue("a", 2)
    assert statuses()[2:] == ["BLOCKED", "BLOCKED"]
    release("default", [int(first.id)])
    assert statuses()[2:] == ["CANCELLED", "READY"]


def test_only_those_are_told_whose_wait_is_over_however_many_wait_for_what_lies_between(claim):
    awaited = [tasks.echo.enqueue(number) for number in range(10)]
    for each in awaited:
        tasks.nothing.using(after=each).enqueue()
    claims = claim(10)
    settle("default", [(mine, Succeeded()) for mine in claims], claims[0].worker)
    ends = [int(awaited[0].id), int(awaited[-1].id)]
    assert release("default", ends) == 2
    assert statuses()[10:] == ["READY", *["BLOCKED"] * 8, "READY"]
    assert release("default", [ends[0] + 1]) == 1


def test_one_that_still_waits_holds_up_nobody_of_its_key():
    keyed.step.using(after=[tasks.echo.enqueue(1)]).enqueue("a", 1)
    keyed.step.enqueue("a", 2)
    assert statuses()[1:] == ["BLOCKED", "READY"]


def test_one_that_does_not_exist_is_refused():
    with pytest.raises(TaskOptionError, match="999999999"):
        tasks.nothing.using(after=["999999999"]).enqueue()
    for wrong in (["yesterday"], "yesterday", 1.5, [None], True):
        with pytest.raises(TaskOptionError, match="results or their ids"):
            tasks.nothing.using(after=wrong)


def test_one_need_not_be_in_a_list():
    """The digits of an id are no ids."""
    for _ in range(12):
        result = tasks.nothing.enqueue()
    for one in (result, result.id, int(result.id)):
        assert tasks.nothing.using(after=one).after == (int(result.id),)


def test_many_after_one_and_one_after_many(worker, eventually):
    worker()
    with transaction.atomic():
        first = tasks.echo.enqueue(0)
        ids = enqueue_many(tasks.echo.using(after=[first]), range(200))
        last = tasks.echo.using(after=ids).enqueue(1)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 202)
    rows = {row.pk: row for row in Task.objects.all()}
    assert all(rows[int(id_)].started_at >= rows[int(first.id)].finished_at for id_ in ids)
    assert rows[int(last.id)].started_at >= max(rows[int(id_)].finished_at for id_ in ids)


def test_one_that_somebody_has_locked_holds_up_no_other(claim, locked):
    """Nor whoever tells them: upkeep comes back to it."""
    first = tasks.echo.enqueue(1)
    held = tasks.nothing.using(after=[first]).enqueue()
    tasks.nothing.using(after=[first]).enqueue()
    with locked(held.id):
        settle_one(claim()[0], Succeeded())
        assert statuses() == ["SUCCESSFUL", "BLOCKED", "READY"]
    assert list(Waiter.objects.values_list("awaited", "task")) == [(int(first.id), int(held.id))]
    release("default", [awaited for _, awaited in stray_waiters("default", 0)])
    assert statuses() == ["SUCCESSFUL", "READY", "READY"]
    assert not Waiter.objects.exists()


def test_strays_are_looked_for_page_by_page(claim):
    """Upkeep goes on behind the last waiter of a page, so a page has to begin with the next one."""
    awaited = [tasks.nothing.enqueue() for _ in range(4)]
    for each in awaited:
        tasks.echo.using(after=[each]).enqueue(1)
    [first, *_] = claim(1)
    settle("default", [(first, Succeeded())], first.worker)
    found, last = [], 0
    while page := stray_waiters("default", last, limit=2):
        assert len(page) == 2
        found += page
        last = page[-1][0]
    ids = list(Waiter.objects.order_by("id").values_list("id", flat=True))
    assert [id_ for id_, _ in found] == ids
    assert [stray for _, stray in found] == [first.id, None, None, None]


def test_what_nobody_waits_for_costs_one_small_statement():
    """To plan the one that tells those who wait takes longer than to settle a task."""
    tasks.nothing.using(after=[tasks.echo.enqueue(1)]).enqueue()
    with CaptureQueriesContext(connection) as queries:
        assert release("default", range(10**6, 10**6 + 500)) == 0
    assert [query["sql"].split()[0] for query in queries] == ["SELECT"]


def test_whatever_finishes_at_once_the_last_one_lets_it_through(in_threads, claim):
    """Two that finish at the same moment must not each leave it to the other."""
    for _ in range(10):
        results = [tasks.echo.enqueue(number) for number in range(8)]
        child = tasks.nothing.using(after=results).enqueue()
        claims = claim(8)
        in_threads(lambda number, claims=claims: settle_one(claims[number], Succeeded()), 8)
        assert Task.objects.get(pk=child.id).status == "READY"
        Task.objects.all().delete()


def test_an_enqueue_and_an_end_at_once_cannot_miss_each_other(in_threads, claim):
    for _ in range(20):
        first = tasks.echo.enqueue(1)
        [mine] = claim()

        def work(number, first=first, mine=mine):
            if number:
                settle_one(mine, Succeeded())
            else:
                tasks.nothing.using(after=[first]).enqueue()

        in_threads(work, 2)
        assert statuses() == ["SUCCESSFUL", "READY"]
        Task.objects.all().delete()


def waits_for(result):
    return Task.objects.get(pk=result.id).waits_for


def failed_chain(claim):
    """Return three tasks, each after the one before; the first has failed."""
    first = tasks.echo.enqueue(1)
    second = tasks.echo.using(after=[first]).enqueue(2)
    third = tasks.echo.using(after=[second]).enqueue(3)
    settle_one(claim()[0], Failed(FAILURE))
    assert statuses() == ["FAILED", "CANCELLED", "CANCELLED"]
    return first, second, third


@pytest.mark.parametrize("window", [1, 5000])
def test_a_chain_that_is_retried_waits_again(claim, monkeypatch, window):
    monkeypatch.setattr(move, "WINDOW", window)
    failed_chain(claim)
    assert Task.objects.retry() == 3
    for done in range(3):
        assert statuses() == ["SUCCESSFUL"] * done + ["READY"] + ["BLOCKED"] * (2 - done)
        settle_one(claim()[0], Succeeded())
    assert statuses() == ["SUCCESSFUL"] * 3
    assert not Waiter.objects.exists()


def test_a_chain_that_is_retried_in_a_transaction_waits_again(claim):
    failed_chain(claim)
    with transaction.atomic():
        assert Task.objects.order_by("-id").retry() == 3
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]


def test_a_retried_chain_that_fails_again_is_cancelled_again(claim):
    failed_chain(claim)
    Task.objects.retry()
    settle_one(claim()[0], Failed(FAILURE))
    assert statuses() == ["FAILED", "CANCELLED", "CANCELLED"]


def test_one_by_one_in_their_order_a_chain_is_retried_as_well(claim):
    for each in failed_chain(claim):
        assert Task.objects.filter(pk=each.id).retry() == 1
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]


def test_one_that_is_retried_alone_is_cancelled_again_with_the_reason(claim):
    """As one that is enqueued after a task that has failed: it was to run after its success."""
    _, second, third = failed_chain(claim)
    assert Task.objects.filter(pk=second.id).retry() == 1
    assert statuses() == ["FAILED", "CANCELLED", "CANCELLED"]
    third.refresh()
    assert third.errors[0].exception_class_path == "django_pglock.errors.DependencyFailed"
    assert not Waiter.objects.exists()


def test_what_has_succeeded_or_is_gone_is_not_waited_for_again(claim):
    """Once it ran, so what it was to run after had succeeded, and may have been pruned."""
    first, second, third = (tasks.echo.enqueue(number) for number in range(3))
    child = tasks.nothing.using(after=[first, second, third]).enqueue()
    one, two, three = claim(3)
    for each in (one, two):
        settle_one(each, Succeeded())
    settle_one(three, Failed(FAILURE))
    Task.objects.filter(pk=first.id).delete()
    Task.objects.retry()
    assert (statuses(), waits_for(child)) == (["SUCCESSFUL", "READY", "BLOCKED"], 1)
    settle_one(claim()[0], Succeeded())
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY"]
    settle_one(claim()[0], Failed(FAILURE))
    Task.objects.exclude(pk=child.id).delete()
    assert Task.objects.retry() == 1
    assert statuses() == ["READY"]


def test_one_that_was_cancelled_while_it_waited_waits_for_each_once(claim):
    """Its waiters from before are still there when it is retried."""
    first, second = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    child = keyed.step.using(after=[first, second]).enqueue("a")
    Task.objects.filter(pk=child.id).cancel()
    assert Task.objects.filter(pk=child.id).retry() == 1
    assert (waits_for(child), Waiter.objects.count()) == (2, 2)
    one, two = claim(2)
    settle_one(one, Succeeded())
    assert statuses() == ["SUCCESSFUL", "RUNNING", "BLOCKED"]
    settle_one(two, Succeeded())
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY"]


def test_a_retry_and_an_end_at_once_cannot_miss_each_other(in_threads, claim):
    for _ in range(20):
        first = tasks.echo.enqueue(1)
        child = tasks.nothing.using(after=[first]).enqueue()
        Task.objects.filter(pk=child.id).cancel()
        [mine] = claim()

        def work(number, child=child, mine=mine):
            if number:
                settle_one(mine, Succeeded())
            else:
                assert Task.objects.filter(pk=child.id).retry() == 1

        in_threads(work, 2)
        assert statuses() == ["SUCCESSFUL", "READY"]
        assert not Waiter.objects.exists()
        Task.objects.all().delete()


def test_two_retries_at_once_of_a_task_and_of_what_comes_after_it(in_threads, claim):
    """Whoever is first: the one that comes after never begins while the other is unfinished."""
    for _ in range(20):
        first, second, _ = failed_chain(claim)
        in_threads(lambda number, ids=(first.id, second.id): Task.objects.filter(pk=ids[number]).retry(), 2)
        assert statuses() in (["READY", "BLOCKED", "CANCELLED"], ["READY", "CANCELLED", "CANCELLED"])
        Task.objects.all().delete()
        Waiter.objects.all().delete()


def test_to_retry_what_was_to_run_after_nothing_costs_one_small_statement(claim):
    for number in range(3):
        tasks.echo.enqueue(number)
        settle_one(claim()[0], Failed(FAILURE))
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.retry() == 3
    about_after = [query["sql"] for query in queries if "after" in query["sql"].replace("run_after", "")]
    assert [sql.split()[0] for sql in about_after] == ["SELECT"]
    assert not [query for query in queries if "waiter" in query["sql"]]


def test_thousands_that_are_retried_together_wait_again(claim):
    """More than one statement takes; one waits for very many, and very many wait for one."""
    first = tasks.echo.enqueue(0)
    ids = enqueue_many(tasks.echo.using(after=[first]), range(5000))
    last = tasks.echo.using(after=ids).enqueue(1)
    settle_one(claim()[0], Failed(FAILURE))
    assert Task.objects.retry() == 5002
    assert Task.objects.filter(status="BLOCKED").count() == 5001
    assert (waits_for(last), Waiter.objects.count()) == (5000, 10_000)
