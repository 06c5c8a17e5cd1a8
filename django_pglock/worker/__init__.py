"""The worker's room: fetch, execute, settle; and around them heartbeat, listen and upkeep."""

from django_pglock.worker.worker import Worker

__all__ = ["Worker"]
