"""The ``django.tasks`` backend: ``TASKS = {"default": {"BACKEND": "django_pglock.backend.PostgresBackend"}}``.

No model is imported at module level, because ``@task`` makes the backend while a ``models.py`` may still be loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from django.db import DatabaseError, ProgrammingError
from django.utils.functional import cached_property
from psycopg.errors import UndefinedTable

from django_pglock.conf import get_settings, task_database
from django_pglock.errors import TaskArgumentsError, model_of
from django_pglock.postgres.connections import connection_for, transaction_block
from django_pglock.store.attempts import result_of_row, unknown_function
from django_pglock.store.await_end import await_end, await_end_async
from django_pglock.store.enqueue import enqueue, enqueue_each, enqueue_many
from django_pglock.store.id_range import id_in
from django_pglock.store.insert_tasks import Call, Enqueued, batches, due_of, meta_of
from django_pglock.store.statements import rows_of
from django_pglock.store.why_it_waits import why_unfinished
from django_pglock.tasks.arguments import to_json
from django_pglock.tasks.backends import arguments_of
from django_pglock.tasks.call_keys import adds_context, check_call, key_maker, positional_names
from django_pglock.tasks.claim import date_of
from django_pglock.tasks.compat import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    task_enqueued,
)
from django_pglock.tasks.definition import PostgresTask
from django_pglock.tasks.fields import defaults_of
from django_pglock.tasks.instrumentation import observe_enqueue
from django_pglock.tasks.queues import check_queue_name
from django_pglock.tasks.registry import why_not_found
from django_pglock.tasks.results import as_called, make_result

#: Checks a call, and returns it in the form in which it is written.
Maker = Callable[[Any, Any], Call]


class PostgresBackend(BaseTaskBackend):
    """Stores tasks in the ``Task`` table of one database, in the transaction of the caller who enqueues them.

    ``OPTIONS``: ``database``, the alias of that database (default ``"default"``); ``defaults``, options for the
    functions whose ``@task`` does not give them, such as ``{"timeout": 300}``. Raises ``ConfigurationError`` for any
    other option, and for a default that no function could have.
    """

    task_class = PostgresTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.database = task_database(alias, self.options)
        self.defaults = defaults_of(alias, self.options)

    def validate_task(self, task: Task[..., Any]) -> None:
        """Raise ``InvalidTask`` unless a worker of this backend can run the task with these options."""
        run_after: Any = task.run_after
        if isinstance(run_after, timedelta):
            # Django's validation takes only a datetime. It validates the copy, and with it all other options.
            replace(task, run_after=None)
            return
        if self.queues and task.queue_name not in self.queues:
            # Django's message for this names neither the setting nor the function.
            raise InvalidTask(
                f"The queue {task.queue_name!r} of {task.module_path} is not in QUEUES of TASKS[{self.alias!r}], which "
                f"has {', '.join(map(repr, sorted(self.queues)))}. Add it there; [] allows every name."
            )
        super().validate_task(_without_context(task))
        try:
            check_queue_name(task.queue_name)
        except ValueError as error:
            raise InvalidTask(str(error)) from error

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> TaskResult[Any, Any]:
        """Write one call of ``task`` in the current transaction and return its ``TaskResult``.

        If a task with the same unique key exists, returns the result of that task, replaces it, or raises
        ``DuplicateTask``, as ``unique=`` says. Raises ``InvalidTask``, and ``TaskArgumentsError`` if the arguments
        cannot be stored as JSON, before anything is written.
        """
        call = self._maker_of(task)(args, kwargs)
        with observe_enqueue(task) as observed:
            try:
                row = enqueue(self._using, task, call, meta=meta_of(task, observed.headers))
            except ProgrammingError as error:
                raise _explained(error, self._using) from error.__cause__
            observed.enqueued([str(row.id)])
        return self._announced(task, row, args, kwargs)

    def enqueue_each(self, calls: Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> list[int]:
        """Write calls of tasks, each with its arguments, by one statement. Return the ids.

        For the ticks of schedules. Not for unique tasks, and not for those that run after others.
        """
        if type(self).enqueue is not PostgresBackend.enqueue:
            # A project's own backend has its own rules for a call.
            return [int(self.enqueue(*each).id) for each in calls]
        made = [(task, self._maker_of(task)(args, kwargs)) for task, args, kwargs in calls]
        with ExitStack() as block:
            observed = [block.enter_context(observe_enqueue(task)) for task, _ in made]
            metas = [meta_of(task, each.headers) for (task, _), each in zip(made, observed, strict=True)]
            rows = enqueue_each(self._using, [(*each, meta) for each, meta in zip(made, metas, strict=True)])
            for each, row in zip(observed, rows, strict=True):
                each.enqueued([str(row.id)])
        for call, row in zip(calls, rows, strict=True):
            task, args, kwargs = call
            self._announced(task, row, args, kwargs)
        return [row.id for row in rows]

    def _announced(self, task: Any, row: Enqueued, args: Any, kwargs: Any) -> TaskResult[Any, Any]:
        """Return the result of a row. Of a new one, receivers of Django's signal are told first."""
        if not row.is_new:
            return self.get_result(str(row.id))
        if (delay := due_of(task)[1]) is not None:
            # Receivers of the signal expect the date that django.tasks declares.
            task = as_called(task, run_after=date_of(row.enqueued_at + delay.total_seconds()))
        result = make_result(
            task,
            id=row.id,
            status=row.status,
            args=list(args),
            kwargs=kwargs,
            backend=self.alias,
            enqueued_at=date_of(row.enqueued_at),
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def check_call(self, task: Any, args: Any, kwargs: Any) -> Call:
        """Return what ``enqueue()`` would write, or raise what it would raise. Write nothing."""
        return self._maker_of(task)(args, kwargs)

    def enqueue_many(self, task: Any, calls: Iterable[Any]) -> list[str]:
        """Write many calls of ``task``, all or none, and return their ids; see ``django_pglock.enqueue_many``."""
        # Each call is checked before it is written, as a single call is.
        make = self._maker_of(task)
        prepared = (make(*arguments_of(call)) for call in calls)
        with observe_enqueue(task) as observed:
            try:
                ids = self._enqueue_calls(task, prepared, meta_of(task, observed.headers))
            except ProgrammingError as error:
                raise _explained(error, self._using) from error.__cause__
            observed.enqueued(ids)
        return ids

    def _enqueue_calls(self, task: PostgresTask, prepared: Iterable[Call], meta: str) -> list[str]:
        using, ids = self._using, list[str]()
        if task.unique is not None and (all_calls := list(prepared)):
            # All calls at once, so that all callers lock the keys in the same order.
            return [str(row.id) for row in enqueue_many(using, task, all_calls, meta=meta)]
        with transaction_block(using):
            for batch in batches(prepared):
                ids += [str(row.id) for row in enqueue_many(using, task, batch, meta=meta)]
        return ids

    def _maker_of(self, task: Any) -> Maker:
        """Return what makes the calls of a task, which is validated first. Values that all calls share are kept."""
        if not isinstance(task, PostgresTask):
            name = getattr(task, "module_path", None) or repr(task)
            raise InvalidTask(f"{name} is not a task of this backend. Decorate the function with @task.")
        make: Maker | None = task.kept.get(self)
        if make is None:
            # Not at decoration: a script may define tasks only to call their functions.
            if reason := why_not_found(task.func):
                raise InvalidTask(f"{task.module_path} cannot be enqueued: {reason}.")
            if not task.is_own:
                # QUEUES, and rules that a project has added in a backend of its own, are not for the package's tasks.
                self.validate_task(task)
            make = _maker(task)
            # Neither the task nor the backend changes after that, so one validation is enough. The rules of a project's
            # own backend may change, and are asked each time, as in Django's backends.
            if task.is_own or type(self).validate_task is PostgresBackend.validate_task:
                task.kept[self] = make
        return make

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return the ``TaskResult`` of a task by its id.

        Raises ``TaskResultDoesNotExist`` if this backend has no task of this id, or if the process does not know the
        function of the task.
        """
        number = id_in(str(result_id))
        row = rows_of("Task", self._using).filter(pk=number, backend=self.alias).first() if number is not None else None
        if row is None:
            raise TaskResultDoesNotExist(
                f"No task of backend {self.alias!r} has the id {result_id!r}. Finished tasks are deleted after their "
                "keep_result, or by PRUNE_AFTER."
            )
        result = result_of_row(row)
        if result is None:
            raise TaskResultDoesNotExist(unknown_function(row))
        return result

    def await_end(self, task_id: int, timeout: float | None) -> bool | None:
        """Wait until a task has ended, for ``timeout`` seconds at most (None: as long as it takes).

        Returns True when it has, False when there is no such task, None when the time is over.
        """
        return await_end(task_id, self.database, timeout)

    async def await_end_async(self, task_id: int, timeout: float | None) -> bool | None:
        """Do the same as ``await_end``, in a coroutine. It occupies no thread while it waits."""
        return await await_end_async(task_id, self.database, timeout)

    def why_unfinished(self, task_id: int) -> str:
        """Return the status of an unfinished task and why no worker runs it, as ``"it is READY in the queue …"``.

        For the message of a timeout. Empty if there is no such task, or if the database does not answer.
        """
        with suppress(DatabaseError):
            return why_unfinished(self.database, task_id)
        return ""

    @cached_property
    def _using(self) -> str:
        """The alias of the database. Raises ``ConfigurationError`` where the tasks cannot be there."""
        connection_for(self.database)
        model_of("Task")
        return self.database


def _explained(error: ProgrammingError, using: str) -> ProgrammingError:
    """Return the error, with what has to be done if a table is missing."""
    if not isinstance(error.__cause__, UndefinedTable):
        return error
    return ProgrammingError(
        f"{error}\nDatabase {using!r} lacks tables of django_pglock. Run: manage.py migrate --database {using}. "
        "If that makes none, a router forbids it: let allow_migrate return True for this database and django_pglock."
    )


def _without_context(task: Any) -> Any:
    """Return what Django's validation may read of a task whose context is taken by a decorator below ``@task``.

    Django asks for the parameters of the function that ``functools.wraps`` names, which does not take the context.
    """
    if not (task.takes_context and adds_context(task.func)):
        return task
    names = ("func", "priority", "run_after", "queue_name")
    return SimpleNamespace(**{name: getattr(task, name) for name in names}, takes_context=False)


def _maker(task: PostgresTask) -> Maker:
    keys = key_maker(task)

    def make(args: Any, kwargs: Any) -> Call:
        args_text, kwargs_text = _texts_of(task, args, kwargs, get_settings().ARGUMENTS_LIMIT)
        check_call(task, args, kwargs)
        return Call(args_text, kwargs_text, *keys(args, kwargs, args_text))

    return make


def _texts_of(task: PostgresTask, args: Any, kwargs: Any, most: int) -> tuple[str, str]:
    """Return the arguments of a call as JSON. Raises ``TaskArgumentsError``."""
    try:
        return to_json(list(args), most=most), to_json(kwargs, most=most) if kwargs else "{}"
    except TaskArgumentsError:
        _refuse(task, args, kwargs, most)
        raise


def _refuse(task: PostgresTask, args: Any, kwargs: Any, most: int) -> None:
    """Raise ``TaskArgumentsError`` with the name of the first argument that cannot be stored; else, of all together."""
    path = task.module_path
    for name, value in (*zip(positional_names(task, len(args)), args, strict=True), *kwargs.items()):
        to_json(value, what=f"Argument {name!r} of {path}", most=most)
    to_json(list(args), what=f"The positional arguments of {path}", most=most)
    to_json(kwargs, what=f"The keyword arguments of {path}", most=most)
