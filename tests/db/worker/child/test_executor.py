"""The threads that run tasks: one task leaves no state for the next one."""

from __future__ import annotations

import time

import pytest
from django.db import OperationalError, connection, transaction

from django_pglock.models import Task
from django_pglock.tasks.compat import TaskResultStatus, task_started
from django_pglock.worker.child import attempt, run
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_context_variables_do_not_leak_from_task_to_task(worker, finished):
    """Such as a tenant, a language, a decimal context, a span. Connections and caches belong to the thread."""

    def hear(**kwargs):
        tasks.tenant.set(tasks.tenant.get() + " heard")

    results = [
        task.enqueue(*arguments)
        for task, *arguments in [
            (tasks.connection_pid,),
            (tasks.tell_tenant,),
            (tasks.set_tenant, "first"),
            (tasks.tell_tenant,),
            (tasks.tell_tenant_in_coroutine,),
            (tasks.connection_pid,),
        ]
    ]
    task_started.connect(hear)
    try:
        worker(threads=1)
        values = [finished(result).return_value for result in results]
    finally:
        task_started.disconnect(hear)
    before, after = values[1], values[3]
    assert before[0] == "nobody heard", "what is set for a task when it starts is there for it"
    assert before == after
    assert values[4] == before[:2]
    assert values[0] == values[5]


@pytest.mark.parametrize("kind", ["autocommit", "atomic", "closed"])
def test_a_transaction_that_is_left_open_is_not_the_next_tasks(worker, finished, caplog, kind):
    """Otherwise the writes of later tasks would be part of this transaction, and be rolled back with it."""
    tasks.leave_transaction_open.enqueue(kind)
    results = [tasks.record.enqueue("committed", number) for number in range(5)]
    worker(threads=1)
    for result in results:
        assert finished(result).status == TaskResultStatus.SUCCESSFUL
    assert list(Effect.objects.order_by("id").values_list("name", "number")) == [("committed", n) for n in range(5)]
    assert sum("left a transaction open" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("task", [tasks.record_atomically, tasks.record])
def test_a_thread_that_cannot_connect_does_not_claim_and_give_back_without_end(worker, eventually, monkeypatch, task):
    """As at the connection limit of a role: the services of the worker have sessions, and its threads have none."""
    result = task.enqueue("x")
    Task.objects.update(attempts=1)  # the failures of earlier attempts are read before the task begins
    with monkeypatch.context() as patch:
        patch.setattr(run, "connection_for", refuse)
        patch.setattr(attempt, "_failures_before", refuse)
        worker(threads=1)
        eventually(lambda: Task.objects.get(pk=result.id).attempts > 1)
        before, began = Task.objects.get(pk=result.id).attempts, time.monotonic()
        time.sleep(1)
        more = Task.objects.get(pk=result.id).attempts - before
        assert more <= 1 + (time.monotonic() - began) / 1.0  # the first pause
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists())


def refuse(*args, **kwargs):
    raise OperationalError("not yet")


def test_without_autocommit_a_worker_commits_what_it_writes_and_nothing_else(change_settings, worker, finished):
    """The function then commits itself. Uncommitted writes must not be committed with those of another task."""
    with transaction.atomic():
        results = [tasks.record.enqueue("left open"), tasks.fail.enqueue(), tasks.record_atomically.enqueue("atomic")]
        results += [keyed.digest.enqueue(user=1, text="in a group") for _ in range(3)]
    change_settings(AUTOCOMMIT=False)
    worker(threads=1)
    for result in results:
        assert finished(result).attempts == 1
    assert [result.status.value for result in results] == ["SUCCESSFUL", "FAILED", *["SUCCESSFUL"] * 4]
    assert [result.return_value for result in results[3:]] == [3, 3, 3], "the claims of the group were rolled back"
    assert list(Effect.objects.values_list("name", flat=True)) == ["atomic"]


def test_a_pool_with_fewer_connections_than_there_are_threads_is_enough(change_settings, worker, finished):
    """If idle threads kept their connections, threads with a task would wait for them."""
    pool = {"min_size": 1, "max_size": 1, "timeout": 3.0}
    change_settings(CONN_MAX_AGE=0, OPTIONS={**connection.settings_dict["OPTIONS"], "pool": pool})
    worker(threads=4)
    for result in [tasks.record.enqueue("a") for _ in range(12)]:
        assert finished(result).status == TaskResultStatus.SUCCESSFUL
