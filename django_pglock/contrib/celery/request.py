"""What runs now: ``self.request``, ``current_task``, and what the hooks get of an exception."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

_DEFAULTS = {"args": (), "kwargs": {}, "retries": 0, "is_eager": False, "called_directly": True}


class Request(SimpleNamespace):
    """The attributes of Celery's ``Context``. None: there is nothing to say here."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**{**_DEFAULTS, **values})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return vars(self).get(name, default)


class ExceptionInfo:
    """What a hook gets of an exception: ``exception``, ``type`` and ``traceback``, a text."""

    def __init__(self, error: BaseException) -> None:
        self.exception = error
        self.type = type(error)
        self.traceback = "".join(traceback.format_exception(type(error), error, error.__traceback__))

    def __str__(self) -> str:
        return self.traceback


#: The tasks that run in this thread or coroutine with their requests, the innermost last.
running: ContextVar[tuple[tuple[Any, Request], ...]] = ContextVar("django_pglock_celery_running", default=())


@contextmanager
def entered(task: Any, request: Request) -> Iterator[None]:
    """Let ``task.request`` be a request in a block, for this thread or coroutine alone."""
    token = running.set((*running.get(), (task, request)))
    try:
        yield
    finally:
        running.reset(token)


def request_of(task: Any) -> Request:
    """Return the request of a task that runs here, or that of a task that does not."""
    return next((request for each, request in reversed(running.get()) if each is task), Request())


class CurrentTask:
    """The task that runs here: ``current_task.request.id``. It is false if there is none."""

    def __bool__(self) -> bool:
        return bool(running.get())

    def __getattr__(self, name: str) -> Any:
        return getattr(running.get()[-1][0] if running.get() else None, name)


current_task = CurrentTask()
