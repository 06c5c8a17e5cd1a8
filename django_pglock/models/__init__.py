"""The tables: fields, constraints, indexes, words. What happens to them is in the rooms below."""

from django_pglock.models.advisory_lock import AdvisoryLock
from django_pglock.models.attempt import Attempt
from django_pglock.models.lease import Lease
from django_pglock.models.task import Task
from django_pglock.models.worker import Worker

__all__ = ["AdvisoryLock", "Attempt", "Lease", "Task", "Worker"]
