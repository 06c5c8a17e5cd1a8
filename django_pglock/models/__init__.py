"""The models: fields, constraints, indexes and their names for people. Other modules read and change the rows."""

from django.apps import apps

from django_pglock.errors import NOT_INSTALLED, ConfigurationError

if not apps.is_installed("django_pglock"):
    # Django's own error only says that a class has no app label.
    raise ConfigurationError(NOT_INSTALLED)

from django_pglock.models.locks import AdvisoryLock, Lease
from django_pglock.models.queue import Number, Queue, RateLimit
from django_pglock.models.steps import Event, Step
from django_pglock.models.task import Attempt, Task, Waiter
from django_pglock.models.worker import Schedule, Worker

__all__ = [
    "AdvisoryLock",
    "Attempt",
    "Event",
    "Lease",
    "Number",
    "Queue",
    "RateLimit",
    "Schedule",
    "Step",
    "Task",
    "Waiter",
    "Worker",
]
