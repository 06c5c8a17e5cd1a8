"""The tasks room: what a task is, when it runs, and every statement that changes one."""

from django_pglock.tasks.definition import PostgresTask, task
from django_pglock.tasks.retry import Constant, Exponential, Linear

__all__ = ["Constant", "Exponential", "Linear", "PostgresTask", "task"]
