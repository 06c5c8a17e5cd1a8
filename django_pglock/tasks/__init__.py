"""The definitions, options, contexts and results of tasks, for users. No code here queries a database."""

from django_pglock.tasks.backends import aenqueue_many, enqueue_many
from django_pglock.tasks.calls import Calls
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.definition import PostgresTask, task
from django_pglock.tasks.options import Group, Rate, Unique
from django_pglock.tasks.retry import Cancel, Exponential, Linear, Retry, Snooze

__all__ = [
    "Calls",
    "Cancel",
    "Exponential",
    "Group",
    "Linear",
    "PostgresTask",
    "Rate",
    "Retry",
    "Snooze",
    "TaskContext",
    "Unique",
    "aenqueue_many",
    "enqueue_many",
    "task",
]
