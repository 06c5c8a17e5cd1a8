"""Due tasks become ready."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pglock.models import RateLimit, Task
from django_pglock.postgres.connections import has_session_ended
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import release as promote_module
from django_pglock.store.outcome import Failure, Retried
from django_pglock.store.ready import next_due_in
from django_pglock.store.release import TRY_UPKEEP_LOCK, promote, restart_delays
from django_pglock.store.settle import settle
from django_pglock.worker.parent import upkeep
from tests import server_clock
from tests.db.store.endings import statuses
from tests.db.worker.conftest import make_upkeep
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def test_due_tasks_are_promoted_and_the_next_due_date_is_returned():
    tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    tasks.nothing.using(run_after=timedelta(hours=2)).enqueue()
    assert promote("default") == 0
    assert 3590 < next_due_in("default") <= 3600
    Task.objects.update(run_after=Now())
    assert promote("default") == 2
    assert next_due_in("default") is None


def test_a_retry_waits_no_longer_than_its_delay_although_the_clock_was_put_back(claim):
    """A date that a caller has chosen stays as it is."""
    chosen = tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    tasks.nothing.enqueue()
    [mine] = claim()
    settle("default", [(mine, Retried(Failure("builtins.ValueError", "Traceback"), 50.0))], mine.worker)
    server_clock.put_back(300)
    assert 340 < next_due_in("default") <= 350
    dates = Task.objects.filter(pk=chosen.id).values_list("run_after", flat=True)
    before = dates.get()
    assert restart_delays("default") == 1
    assert 40 < next_due_in("default") <= 51
    assert dates.get() == before
    assert restart_delays("default") == 0
    server_clock.put_back(-60)
    assert promote("default") == 1


def test_only_scheduled_tasks_are_promoted(claim):
    """The id may also belong to a task with another status."""
    tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    Task.objects.update(run_after=Now())
    assert promote("default") == 1
    assert claim()
    assert promote("default") == 0
    assert Task.objects.get().status == "RUNNING"


def test_a_task_that_a_later_one_waits_for_is_promoted_before_the_commit_of_that_one():
    """The transaction has locked the key of the row."""
    tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    Task.objects.update(run_after=Now())
    other = dedicated_connection("default")
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT FROM django_pglock_task FOR KEY SHARE")
            assert promote("default") == 1
            cursor.execute("ROLLBACK")
    finally:
        other.close()


def test_the_longest_overdue_is_promoted_first():
    ids = [tasks.nothing.using(run_after=timedelta(hours=1)).enqueue().id for _ in range(3)]
    for id_, minutes in zip(ids, (1, 3, 2), strict=True):
        Task.objects.filter(pk=id_).update(run_after=Now() - timedelta(minutes=minutes))
    assert promote("default", limit=2) == 2
    assert str(Task.objects.get(status="SCHEDULED").pk) == ids[0]


def test_of_one_key_only_as_many_as_may_run_become_ready():
    later = keyed.step.using(run_after=timedelta(hours=1))
    for _ in range(2):
        later.enqueue(1)
    Task.objects.update(run_after=Now())
    assert promote("default") == 2
    assert statuses() == ["READY", "BLOCKED"]


def test_workers_are_woken_only_for_a_task_that_they_can_claim(monkeypatch):
    """A task with a key is BLOCKED now. Admission wakes them if the key is free."""
    woken = []
    monkeypatch.setattr(promote_module, "wake", lambda using, queues: woken.extend(queues))
    keyed.step.using(run_after=timedelta(hours=1)).enqueue(1)
    tasks.nothing.using(run_after=timedelta(hours=1), queue_name="mail").enqueue()
    Task.objects.update(run_after=Now())
    assert promote("default") == 2
    assert woken == ["mail"]


def test_the_next_date_is_that_of_a_task_or_of_a_token_whichever_is_first():
    tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    for key, minutes in (("a", 10), ("b", 5)):
        RateLimit.objects.create(key=key, arrives_at=Now(), opens_at=Now() + timedelta(minutes=minutes))
    assert 290 < next_due_in("default") <= 300
    RateLimit.objects.update(opens_at=None)
    assert 3590 < next_due_in("default") <= 3600


@pytest.mark.parametrize("model", [Task, RateLimit])
def test_locked_due_rows_are_tried_again_after_a_pause(session, model):
    """The task is still due after each round, and hundreds of rounds a second would not promote it sooner."""
    if model is Task:
        tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
        Task.objects.update(run_after=Now())
    else:
        RateLimit.objects.create(key="a", arrives_at=Now(), opens_at=Now())
    session.set_autocommit(False)
    session.cursor().execute(f"SELECT FROM {model._meta.db_table} FOR UPDATE")
    rounds = make_upkeep()
    assert rounds._round() == upkeep.LOCKED_RETRY
    session.rollback()
    assert rounds._round() is None


@pytest.fixture
def promoting(session):
    """Another session that is in a promotion."""
    tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    Task.objects.update(run_after=Now())
    session.set_autocommit(False)
    with session.cursor() as cursor:
        cursor.execute(TRY_UPKEEP_LOCK)
        assert cursor.fetchone()[0] is True
    return session


def test_one_session_promotes_at_a_time(promoting):
    """Two that promote at once skip each other's rows, so a task could come before an older one of its lock key."""
    assert promote("default") == 0
    promoting.rollback()
    assert promote("default") == 1


def test_a_process_that_freezes_in_a_promotion_keeps_others_from_it_for_a_moment(promoting, worker, eventually):
    """The server ends its session after three seconds."""
    worker()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why="nobody promoted anything")
    assert has_session_ended(promoting)


def test_the_settings_of_a_promotion_end_with_its_transaction():
    shown = "SELECT current_setting('enable_sort'), current_setting('idle_in_transaction_session_timeout')"
    [before] = execute_sql(shown)
    with transaction.atomic():
        promote("default")
        assert execute_sql(shown) == [("off", "3s")]
    assert execute_sql(shown) == [before]
