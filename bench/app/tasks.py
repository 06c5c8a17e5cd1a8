"""The functions that are run. All contestants run the first two; the others ask for what only django_pglock has."""

import asyncio
import os
import time

from django.apps import apps

from bench.contestants import base

try:
    from django.tasks import task
except ImportError:  # before Django 6.0
    from django_tasks import task


@task
def nothing():
    """Do nothing."""


@task
def stamp(sent):
    """Note how long ago ``sent`` is."""
    base.stamp(sent)


@task
def numbered(number):
    """Do nothing with an argument, as the tasks with a key do."""


@task
def sleep(seconds):
    """Wait, as a task does that waits for another service."""
    time.sleep(seconds)


if apps.is_installed("django_absurd"):
    from django_absurd import get_absurd_context

    @task
    def ten_steps():
        """Record ten steps."""
        context = get_absurd_context()
        for number in range(10):
            context.step(f"step {number}", base.small)

    @task
    def nap():
        """Sleep for an hour, as a row."""
        get_absurd_context().sleep_for("nap", 3600)


# A worker looks for each function that it knows, and for coroutines in statements of their own. Two versions whose
# checkouts have different functions here could not be compared.
if apps.is_installed("django_pglock") and not os.environ.get("BENCH_PLAIN"):
    from bench.app.models import Entry
    from django_pglock import Group, Rate, Unique
    from django_pglock import task as our_task

    @our_task(atomic=True)
    def nothing_atomically():
        """Do nothing, in a transaction."""

    @our_task(lock="bench")
    def sleep_alone(seconds):
        """Wait, while no other task of the same lock key runs."""
        time.sleep(seconds)

    @our_task(atomic=True)
    def sleep_atomically(seconds):
        """Wait in a transaction."""
        time.sleep(seconds)

    @our_task
    async def sleep_async(seconds):
        """Wait in a coroutine."""
        await asyncio.sleep(seconds)

    @our_task(lock="nap:{number}")
    def locked_sleep(number, seconds):
        """Wait, while no other task of the same lock key runs."""
        time.sleep(seconds)

    @our_task(lock="bench:{number}")
    def locked(number):
        """Do nothing, while no other task of the same lock key runs."""

    @our_task(lock="bench:{number}", concurrency=3)
    def locked_thrice(number):
        """Do nothing, while no more than two others of the same lock key run."""

    # A key for each call: with one key for all, and no worker, thousands of tasks would be READY at the key, many more
    # than in use, and each call counts them.
    @our_task(rate=Rate(1_000_000, per=1, key="bench:{number}"))
    def rated(number):
        """Do nothing, at most this number of times a second."""

    @our_task(rate="1/h")
    def rated_slowly(number):
        """Do nothing, once an hour at most."""

    @our_task(rate="1000000/s", lock="bench:{number}")
    def rated_and_locked(number):
        """Do nothing, at most this number of times a second, while no other task of the same lock key runs."""

    @our_task(unique=True)
    def unique(number):
        """Do nothing, once for all calls that wait with the same arguments."""

    @our_task(unique=Unique("{number}"), lock="bench:{number}")
    def unique_and_locked(number):
        """Do nothing, once for all calls that wait, while no other task of the same lock key runs."""

    @our_task(group="{number}")
    def grouped(calls):
        """Do nothing, once for all calls that wait with the same number."""

    @our_task(fair="{number}")
    def fair(number):
        """Do nothing, in turn with calls with other numbers."""

    @our_task(keep_result=3600)
    def kept(number):
        """Do nothing, and be deleted an hour later."""

    @our_task(takes_context=True)
    def ten_steps(context):
        """Record ten steps."""
        for number in range(10):
            context.step(f"step {number}", base.small)

    @our_task(takes_context=True)
    def await_stamp(context, number):
        """Wait for the time at which an event is emitted."""
        base.stamp(context.wait_for(f"bench:{int(number)}", timeout=None))

    @our_task(takes_context=True)
    def fan_in(context, count):
        """Run so many children, and note how long ago the last one has ended."""
        ends = context.gather("children", [numbered.call_of(number) for number in range(int(count))])
        base.stamp(max(each.finished_at for each in ends).timestamp())

    @our_task(atomic=True)
    def insert():
        """Write one row, in the transaction of the task's end."""
        Entry.objects.create()

    @our_task(atomic=True, wait_for_disk=False)
    def insert_unsynced():
        """Do the same without a wait for the disk."""
        Entry.objects.create()

    @our_task(atomic=True, group=Group("bench", limit=500))
    def insert_grouped(calls):
        """Write one row for each call."""
        Entry.objects.bulk_create(Entry() for _ in calls)
