"""The context of a function with ``takes_context=True``: its attempt, whether it must stop, how to report progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import time
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django_pglock.errors import TaskCancelled, TaskStopped, TaskTimeout
from django_pglock.tasks import compat
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.call_check import misfit
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.options import OWN_META
from django_pglock.tasks.results import make_result

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext(compat.TaskContext):  # type: ignore[type-arg, misc]
    """The context of one attempt: Django's, with additional methods for a running task."""

    _claims: Sequence[Claim] = field(repr=False)
    _reason_to_stop: Callable[[], TaskTimeout | TaskCancelled | None] = field(repr=False)

    def check(self) -> None:
        """Raise ``TaskStopped`` if a cancel of this task was requested, or if its time is over.

        This is cheap, because it sends no query.
        """
        if (reason := self._reason_to_stop()) is not None:
            raise TaskStopped(reason)

    def progress(self, done: float, total: float | None = None) -> None:
        """Report the progress of the task: ``done`` units out of ``total`` (None: not known).

        The worker writes the last value to the task's ``progress`` about once a second, in its own session, so you may
        call this as often as you like. Raises ``TaskStopped`` as ``check()`` does, and ``TaskArgumentsError`` for
        values that are not numbers in JSON.
        """
        text = to_json({"done": done, "total": total}, what="The progress of a task")
        for claim in self._claims:
            claim.progress = text
        self.check()

    @property
    def meta(self) -> dict[str, Any]:
        """The dict that was given as ``using(meta=...)`` when the task was enqueued."""
        meta: dict[str, Any] = from_json(self._claims[0].meta)
        return {name: value for name, value in meta.items() if name not in OWN_META}

    @property
    def fencing_token(self) -> int:
        """A number that grows with each attempt of this task. With it, other systems can refuse a late attempt."""
        return self._claims[0].attempt


def with_context(task: TaskFields, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a call without a worker, with a context if the function takes one and gets none."""
    if not task.takes_context:
        return args
    count = len(args)
    is_given = "context" in kwargs or (args and isinstance(args[0], compat.TaskContext))
    # A test may give any object as the context. Then there is one argument more than a call has.
    if is_given or (misfit(task.func, True, count, *kwargs) and not misfit(task.func, False, count, *kwargs)):
        return args
    return (_context_of(task, args, kwargs), *args)


def _context_of(task: TaskFields, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TaskContext:
    """Return the context of a first attempt that is never stopped."""
    now = str(time())
    claim = Claim(
        id=0,
        attempt=1,
        worker=UUID(int=0),
        backend=task.backend,
        queue=task.queue_name,
        priority=task.priority,
        task_path=task.module_path,
        args="[]",
        kwargs="{}",
        meta=to_json(task.meta),
        retries=0,
        max_retries=task.max_attempts - 1,
        rescues=0,
        run_after=None,
        enqueued_at=now,
        started_at=None,
        last_attempted_at=now,
    )
    result = make_result(
        task,
        id=claim.id,
        status="RUNNING",
        args=list(args),
        kwargs=kwargs,
        backend=claim.backend,
        enqueued_at=claim.date("enqueued_at"),
        started_at=claim.date("started_at"),
        last_attempted_at=claim.date("last_attempted_at"),
        worker_ids=[str(claim.worker)],
    )
    return TaskContext(task_result=result, _claims=[claim], _reason_to_stop=lambda: None)
