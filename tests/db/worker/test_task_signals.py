"""Signals of django.tasks: their sender, and errors of receivers."""

from __future__ import annotations

import sys

import pytest
from django.db import connection, connections, transaction

from django_pglock.models import Task
from django_pglock.tasks.compat import TaskResultStatus, task_finished, task_started
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_signals_name_the_backends_class_and_errors_of_receivers_have_no_effect(worker, finished, eventually):
    """Another queue turns a success into a failure when a receiver raises."""
    heard = []

    def hear(sender, task_result, **kwargs):
        heard.append((sender.__name__, task_result.id, task_result.status))
        raise RuntimeError("a receiver with a bug")

    task_started.connect(hear)
    task_finished.connect(hear)
    try:
        worker()
        result = finished(tasks.echo.enqueue(1))
        eventually(lambda: len(heard) == 2)
    finally:
        task_started.disconnect(hear)
        task_finished.disconnect(hear)
    assert heard == [
        ("PostgresBackend", result.id, TaskResultStatus.RUNNING),
        ("PostgresBackend", result.id, TaskResultStatus.SUCCESSFUL),
    ]


def test_a_task_that_ends_without_an_attempt_sends_no_signal(worker, eventually):
    """Its end is a change of its row by another task, or by a person. docs/reference.md says so."""
    heard = []

    def hear(sender, task_result, **kwargs):
        heard.append(task_result.id)

    failing = tasks.fail.enqueue()
    child = tasks.nothing.using(after=failing).enqueue()
    task_finished.connect(hear)
    try:
        worker()
        eventually(lambda: Task.objects.get(pk=child.id).status == "CANCELLED")
        last = tasks.nothing.enqueue()
        eventually(lambda: last.id in heard)
    finally:
        task_finished.disconnect(hear)
    assert heard == [failing.id, last.id]


def test_a_receiver_that_exits_ends_neither_a_thread_nor_the_settler(worker, finished, caplog):
    """Django's ``send_robust()`` does not catch a ``BaseException`` such as SystemExit."""

    def leave(**kwargs):
        sys.exit("a receiver that calls sys.exit()")

    running = worker(threads=1)
    task_started.connect(leave)
    task_finished.connect(leave)
    try:
        assert finished(tasks.echo.enqueue(1)).return_value == 1
        assert finished(tasks.echo.enqueue(2)).return_value == 2
    finally:
        task_started.disconnect(leave)
        task_finished.disconnect(leave)
    assert "a receiver that calls sys.exit()" in caplog.text
    assert running.hung() is None


def begin():
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")


@pytest.mark.parametrize("leave", [begin, transaction.atomic().__enter__, connections.close_all])
def test_what_a_receiver_leaves_in_its_session_does_not_cost_the_next_outcomes(worker, finished, leave):
    """Before, all later outcomes were a part of its transaction. They were lost, and their tasks ran again."""

    def receive(**kwargs):
        leave()

    task_finished.connect(receive)
    try:
        worker(threads=1)
        assert finished(tasks.echo.enqueue(1)).return_value == 1
        assert finished(tasks.echo.enqueue(2)).return_value == 2
        assert finished(tasks.fail.enqueue("three")).status == TaskResultStatus.FAILED
        assert finished(tasks.echo.enqueue(4)).return_value == 4
    finally:
        task_finished.disconnect(receive)


@pytest.mark.parametrize("leave", [begin, transaction.atomic().__enter__])
def test_what_a_receiver_leaves_in_the_session_of_a_thread_does_not_stop_the_task(worker, finished, caplog, leave):
    """Before, an atomic task could not begin in that transaction, and was given back again and again."""

    def receive(**kwargs):
        leave()

    task_started.connect(receive)
    try:
        worker(threads=1)
        for name in ("one", "two"):
            assert finished(tasks.record_atomically.enqueue(name)).status == TaskResultStatus.SUCCESSFUL
    finally:
        task_started.disconnect(receive)
    assert set(Effect.objects.values_list("name", flat=True)) == {"one", "two"}
    assert set(Task.objects.values_list("attempts", flat=True)) == {1}
    assert caplog.text.count("A receiver of task_started has left a transaction open") == 2
