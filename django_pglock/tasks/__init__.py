"""The tasks room: what a task is, when it runs, and every statement that changes one."""

from django_pglock.tasks.bulk import aenqueue_many, enqueue_many
from django_pglock.tasks.context import TaskContext
from django_pglock.tasks.definition import PostgresTask, task
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
    "enqueue_many",
    "task",
]
