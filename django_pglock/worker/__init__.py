"""The worker: claims tasks, runs them, settles their outcomes. Each room is a step of that way or watches over it."""

from django_pglock.worker.worker import Worker

__all__ = ["Worker"]
