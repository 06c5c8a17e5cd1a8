"""Stacks of running tasks: functions in threads, coroutines, and ORM calls of coroutines."""

from __future__ import annotations

import asyncio
import threading

import pytest
from asgiref.sync import sync_to_async

from django_pglock import task
from django_pglock.models import Task
from django_pglock.store.requests_to_worker import request_stack, wait_for_stack
from tests.conftest import NEVER
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


class Gate:
    """The event that ends the functions of this file: one computes, and the others wait."""

    def __init__(self):
        self.event = threading.Event()

    @property
    def is_shut(self):
        return not self.event.is_set()


gate = Gate()


@pytest.fixture(autouse=True)
def shut(worker):
    # After this fixture the worker ends, and waits for its tasks.
    gate.event.clear()
    yield
    gate.event.set()


def compute(card_number):
    Effect.objects.create(name="begun")
    count = 0
    while gate.is_shut:
        count += 1
    return count


def inner_wait():
    Effect.objects.create(name="begun")
    gate.event.wait(NEVER)


@task
def compute_in_thread(card_number):
    return compute(card_number)


@task
async def compute_in_coroutine():
    await Effect.objects.acreate(name="begun")
    while gate.is_shut:
        pass


async def inner_sleep():
    await Effect.objects.acreate(name="begun")
    while gate.is_shut:
        await asyncio.sleep(0.01)


@task
async def sleep_in_coroutine():
    await inner_sleep()


@task
async def wait_in_orm():
    await sync_to_async(inner_wait)()


SLEEPS = (sleep_in_coroutine, [], ["await inner_sleep()", "in inner_sleep\n", "await asyncio.sleep(0.01)"])


@pytest.mark.parametrize(
    ("function", "arguments", "lines"),
    [
        (compute_in_thread, ["4111-1111"], ["return compute(card_number)", "in compute\n"]),
        (compute_in_coroutine, [], ["in compute_in_coroutine\n"]),
        (wait_in_orm, [], ["await sync_to_async(inner_wait)()", "in inner_wait\n"]),
        SLEEPS,
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_worker_answers_with_the_innermost_call_last(worker, eventually, function, arguments, lines):
    """Also where the function computes without a pause."""
    worker()
    made = function.enqueue(*arguments)
    eventually(lambda: Effect.objects.filter(name="begun").exists(), why="it did not begin")

    def text():
        # The function may not have reached its waiting place yet.
        assert request_stack("default", int(made.id))
        return wait_for_stack("default", int(made.id), timeout=NEVER).text

    found = eventually(lambda: text() if all(line in text() for line in lines) else None, why="it is not there")
    places = [found.index(line) for line in lines if line in found]
    assert places == sorted(places)
    assert "4111" not in found, "values of variables are not shown"
    assert "executor.py" not in found, "the worker's own frames lead to every task"


def test_a_task_that_waits_for_a_thread_has_no_stack(worker, eventually):
    worker(threads=1)
    first = compute_in_thread.enqueue("")
    eventually(lambda: Effect.objects.exists())
    running = Task.objects.get(pk=first.id)
    # As if the worker had prefetched the task, or had just ended it.
    other = Task.objects.create(
        status="RUNNING", queue="elsewhere", backend="default", task_path="some.function", attempts=1,
        worker=running.worker, last_attempted_at=running.last_attempted_at,
    )  # fmt: skip
    assert request_stack("default", other.pk)
    assert wait_for_stack("default", other.pk, timeout=NEVER).text == ""
