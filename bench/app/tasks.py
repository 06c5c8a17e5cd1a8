"""The functions that are run. All contestants run the first two; the others ask for what only django_pglock has."""

import asyncio
import time

from django.apps import apps
from django.tasks import task

from bench.contestants import base


@task
def nothing():
    """Do nothing."""


@task
def stamp(sent):
    """Note how long ago ``sent`` is."""
    base.stamp(sent)


@task
def sleep(seconds):
    """Wait, as a task does that waits for somebody else."""
    time.sleep(seconds)


if apps.is_installed("django_pglock"):
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
    def sleep_with_own_key(seconds, number):
        """Wait, with a lock key that no other task has."""
        time.sleep(seconds)

    @our_task(lock="nap:{digit}")
    def sleep_with_one_of_ten(seconds, digit):
        """Wait, with one of ten lock keys."""
        time.sleep(seconds)
