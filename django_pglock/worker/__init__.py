"""The worker: claims tasks, runs them, and settles their outcomes. Each subpackage does or watches one step."""

from django_pglock.worker.worker import Worker

__all__ = ["Worker"]
