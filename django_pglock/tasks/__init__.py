"""The definitions, options, contexts and results of tasks, for users. No code here queries a database."""

from django_pglock.tasks.backends import backend_for
from django_pglock.tasks.bulk import aenqueue_many, enqueue_many
from django_pglock.tasks.context import TaskContext
from django_pglock.tasks.decorator import task
from django_pglock.tasks.definition import PostgresTask
from django_pglock.tasks.flow import Cancel, Retry, Snooze
from django_pglock.tasks.options import Group, Rate, Unique
from django_pglock.tasks.retry import Constant, Exponential, Linear

__all__ = [
    "Cancel",
    "Constant",
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
    "backend_for",
    "enqueue_many",
    "task",
]
