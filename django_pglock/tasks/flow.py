"""Exceptions by which a task function decides how the task continues: ``Retry``, ``Snooze``, ``Cancel``.

They are exceptions so that they can be raised from anywhere inside the function. An ``atomic`` function's effects are
rolled back, as with every exception.
"""

from __future__ import annotations

from datetime import timedelta

from django_pglock.errors import Picklable
from django_pglock.tasks.retry import seconds_of


class FlowWord(Picklable, Exception):
    """The base of the exceptions by which a task function decides how the task continues."""


class Retry(FlowWord):
    """Try this task again ``after`` seconds or a timedelta; None (default) lets its back-off decide.

    It uses an attempt, whatever ``retry_on`` says. If none is left, the task fails. ``reason`` is shown with the
    attempt.
    """

    #: For subclasses with an ``__init__`` of their own, which may set it and need not call this one.
    seconds: float | None = None

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.seconds = None if after is None else seconds_of(after, option="after")


class Snooze(FlowWord):
    """Run this task again ``after`` seconds or a timedelta, as if it had not begun. No attempt is used."""

    #: For subclasses with an ``__init__`` of their own, which may set it and need not call this one.
    seconds: float = 60.0

    def __init__(self, after: float | timedelta) -> None:
        super().__init__(f"for {after}")
        self.seconds = seconds_of(after, option="after")


class Cancel(FlowWord):
    """End this task as cancelled. ``reason`` is shown with the attempt."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
