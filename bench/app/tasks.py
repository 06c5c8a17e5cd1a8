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


# A worker looks for each function that it knows, and for coroutines in statements of their own. Two versions whose
# checkouts have different functions here could not be compared.
if apps.is_installed("django_pglock") and not os.environ.get("BENCH_PLAIN"):
    from django_pglock import Rate, Unique
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
