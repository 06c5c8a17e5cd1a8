"""The worker: a parent that starts children, beats and listens for them, and children that run tasks."""

from django_pglock.worker.worker import Worker

__all__ = ["Worker"]
