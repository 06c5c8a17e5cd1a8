"""A task with the methods of Celery's, over a task of this package.

Its row has the path of the function, as with ``@task``. So rows that wait run on when the function moves to ``@task``,
and retries, time limits, rates and priorities are those of the package.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property, partial
from inspect import Parameter, Signature, iscoroutinefunction, signature
from random import randrange
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils.asyncio import async_unsafe

from django_pglock.contrib.celery import canvas, result
from django_pglock.contrib.celery import options as words
from django_pglock.contrib.celery.exceptions import Ignore, MaxRetriesExceededError, Retry
from django_pglock.contrib.celery.options import NEEDED, conf
from django_pglock.contrib.celery.states import FAILURE, SUCCESS
from django_pglock.contrib.celery.values import decode, encode
from django_pglock.errors import TaskArgumentsError, TaskCancelled, TaskOptionError, TaskStopped
from django_pglock.loggers import get_logger
from django_pglock.postgres.stopping import current_attempt
from django_pglock.tasks.backends import database_of_tasks
from django_pglock.tasks.claim import running_claim
from django_pglock.tasks.definition import PostgresTask, task
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.retry import FlowWord

logger = get_logger("django_pglock.tasks")


class Request(SimpleNamespace):
    """The attributes of Celery's ``Context``. None: there is nothing to say here."""

    args: Any = ()
    kwargs: Any = {}
    retries = 0
    is_eager = False
    called_directly = True

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


class Task:
    """The base of all tasks of the bridge. A project's own base may have hooks, and options as attributes."""

    name: str
    app: Any = None
    is_bound = False
    #: Retries without the first attempt; None: without an end. Delays are in seconds.
    max_retries: int | None = 3
    default_retry_delay: float = 180
    autoretry_for = dont_autoretry_for = ()
    retry_kwargs: Any = {}
    retry_backoff, retry_backoff_max, retry_jitter = False, 600, True
    #: None: as the settings say, or none. A rate is for all workers together, and not for each.
    queue = priority = expires = rate_limit = time_limit = soft_time_limit = ignore_result = None
    MaxRetriesExceededError = MaxRetriesExceededError

    def __init__(self) -> None:
        self._source = getattr(self, "__wrapped__", type(self))
        if not hasattr(self, "name"):
            self.name = f"{self._source.__module__}.{self._source.__name__}"

    def __getattr__(self, name: str) -> Any:
        raise words.missing(self.__dict__.get("name", "task"), name)

    def __repr__(self) -> str:
        return f"<@task: {self.name}>"

    @property
    def __name__(self) -> str:
        return str(self._source.__name__)

    # What a project overrides

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work of the task."""
        raise NotImplementedError(f"{self.name} has no run().")

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Called before the function, in each attempt."""

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Called after the function has returned."""

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called if the task will be tried again."""

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called if the function has raised, and the task is not tried again."""

    def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called after ``on_success`` and ``on_failure``."""

    # Calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with entered(self, Request(**{**vars(self.request), "args": args, "kwargs": kwargs})):
            return self.run(*args, **kwargs)

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Enqueue a call in the current transaction. Returns an ``AsyncResult``."""
        return self.apply_async(args, kwargs)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Enqueue a call in the current transaction. Returns an ``AsyncResult``.

        ``countdown``: seconds to wait; ``eta``: a date, in UTC if it is naive; ``expires``: seconds or a date;
        ``queue``; ``priority``: -100 to 100, higher first; ``time_limit``, ``soft_time_limit``: seconds; ``link`` and
        ``link_error``: calls after the success, and after the last failure. Raises ``TaskOptionError`` for other
        options, and ``TaskArgumentsError`` for arguments that the function or JSON does not take.
        """
        return self.start(args or (), kwargs or {}, options)

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:
        """Do the same as ``delay()``: the call is a part of the transaction, and runs after its commit."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **options: Any) -> None:
        """Do the same as ``apply_async()``; after the commit, if the tasks are in another database or run eagerly."""
        if conf.task_always_eager or database_of_tasks(result.BACKEND, option="TASKS") != DEFAULT_DB_ALIAS:
            transaction.on_commit(partial(self.apply_async, *args, **options))
        else:
            self.apply_async(*args, **options)

    def start(self, args: Any, kwargs: Any, given: Any, *, after: Any = None, takes_result: bool = True) -> Any:
        """Enqueue a call that runs after other results, and gets them as its first argument."""
        options = dict(given)
        callbacks, errbacks = (canvas.listed(options.pop(name, None)) for name in canvas.LINKS)
        if options.pop(canvas.EAGER, False) or conf.task_always_eager:
            before = [] if after is None else [after.get()]
            values, named = decode(self._encoded([*before[:takes_result], *args], kwargs))
            return self.apply(values, named, throw=options.get("throw"), link=callbacks, link_error=errbacks)
        if callbacks:
            options[NEEDED] = True
        place = [None] * (after is not None and takes_result)
        values, named = self._encoded([*place, *args], kwargs)
        definition = self._using(options, errbacks, after, takes_result)
        with canvas.together() if callbacks or errbacks else nullcontext():
            enqueued = result.AsyncResult(definition.enqueue(*values, **named).id, parent=after)
            for callback in callbacks:
                canvas.signature(callback).start(after=enqueued)
            if errbacks and isinstance(after, result.GroupResult):
                # Also if a chord's body never runs, because a call of its header has failed.
                number = result.number_of(enqueued.id)
                call_errbacks.using(after_ended=number).enqueue(number, if_cancelled=True)
        return enqueued

    @async_unsafe("delay() blocks the event loop here. Write: await sync_to_async(task.delay)(…)")
    def _using(self, options: Any, errbacks: list[Any], after: Any, takes_result: bool) -> PostgresTask:
        """Return the task of this package with the options of a call, and with what it has to know when it runs."""
        changes, meta = words.of_call(f"{self.name}.apply_async()", options), dict[str, Any]()
        if after is not None:
            ids = result.ids_in(after)
            changes["after"] = result.flat(ids)
            meta |= {"results_of": ids} if takes_result else {}
        meta |= {name: options[name] for name in (NEEDED, "retries") if options.get(name)}
        if errbacks:
            changes["on_failure"] = call_errbacks
            meta["errbacks"] = encode(errbacks, f"link_error of {self.name}")
        if meta:
            changes["meta"] = {META: meta}
        return self.definition.using(**changes) if changes else self.definition

    def _encoded(self, args: list[Any], kwargs: Any) -> Any:
        """Return arguments as JSON has them, if the function takes as many of these names."""
        try:
            signature(self.run).bind(*args, **kwargs)
        except TypeError as error:
            raise TaskArgumentsError(f"{self.name} cannot be called like this: {error}.") from error
        return encode([args, kwargs], f"An argument of {self.name}")

    def apply(self, args: Any = (), kwargs: Any = None, throw: Any = None, retries: int = 0, **options: Any) -> Any:
        """Run a call here, with its retries and without their delays. Returns an ``EagerResult``.

        ``throw``: raise the exception of the function; None: as ``CELERY_TASK_EAGER_PROPAGATES`` says.
        """
        request = Request(id=options.get("task_id") or str(uuid4()), task=self.name, retries=retries, is_eager=True)
        request.args, request.kwargs, request.called_directly = tuple(args or ()), dict(kwargs or {}), False
        request.throws = conf.task_eager_propagates if throw is None else throw
        try:
            value = self.trace(request)
        except Ignore as error:
            return result.EagerResult(request.id, error, error.state)
        except Exception as error:
            if request.throws:
                raise
            if isinstance(error, Retry):
                return self.apply(args, kwargs, throw, retries + 1, **options)
            info = ExceptionInfo(error)
            for errback in canvas.listed(options.get("link_error")):
                call_errback(canvas.signature(errback), request, error, info.traceback)
            return result.EagerResult(request.id, error, FAILURE, info.traceback)
        for callback in canvas.listed(options.get("link")):
            canvas.signature(callback).apply_async((value,))
        return result.EagerResult(request.id, value, SUCCESS)

    # Signatures

    def signature(self, args: Any = None, kwargs: Any = None, **options: Any) -> canvas.Signature:
        """Return a call as a value."""
        return canvas.Signature(self, args, kwargs, **options)

    subtask = signature

    def s(self, *args: Any, **kwargs: Any) -> canvas.Signature:
        """Return a call that gets the result of the one before as its first argument."""
        return self.signature(args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> canvas.Signature:
        """Return a call that gets its own arguments alone."""
        return self.signature(args, kwargs, immutable=True)

    def AsyncResult(self, task_id: Any, **ignored: Any) -> Any:  # noqa: N802 - Celery's name
        """Return the result of a call, by its id."""
        return result.AsyncResult(task_id)

    # What runs

    @property
    def request(self) -> Request:
        """The call that runs in this thread or coroutine."""
        return request_of(self)

    @cached_property
    def definition(self) -> PostgresTask:
        """The task of this package. It is made as soon as there are settings."""
        options = words.of_task(self)
        return PostgresTask(func=self._function(), takes_context=True, retry_on=(), **options)

    def _function(self) -> Callable[..., Any]:
        """Return the function that a worker calls. It has the path of the project's own."""

        def run(context: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._run_claimed(context, args, kwargs)

        own, source = signature(self.run).parameters, self._source
        if "context" not in own:
            # The admin and rows of Schedule check arguments by it.
            run.__signature__ = Signature([Parameter("context", Parameter.POSITIONAL_ONLY), *own.values()])  # type: ignore[attr-defined]
        for name in ("__module__", "__qualname__", "__name__", "__doc__"):
            setattr(run, name, getattr(source, name))
        return run

    def _run_claimed(self, context: Any, args: Any, kwargs: Any) -> Any:
        values, named = decode([args, kwargs])
        meta = context.meta.get(META, {})
        if "results_of" in meta:
            values[0] = result.values_of(meta["results_of"])
        value = self.trace(self._request_of(context, values, named, meta.get("retries", 0)))
        is_ignored = conf.task_ignore_result if self.ignore_result is None else self.ignore_result
        return None if is_ignored and not meta.get(NEEDED) else encode(value, f"The result of {self.name}")

    def _request_of(self, context: Any, args: list[Any], kwargs: dict[str, Any], retries: int) -> Request:
        claim = running_claim.get()
        request = Request(task=self.name, args=args, kwargs=kwargs, called_directly=False, context=context)
        if claim is not None:
            request.id = request.root_id = request.correlation_id = result.celery_id(claim.id)
            request.retries, request.eta = claim.retries + retries, claim.date("run_after")
            request.hostname, redelivered = socket.gethostname(), claim.rescues > 0
            request.delivery_info = {"routing_key": claim.queue, "priority": claim.priority, "redelivered": redelivered}
        return request

    def trace(self, request: Request) -> Any:
        """Call the function with its hooks, in Celery's order. Return its value, or raise what it has raised."""
        of = (request.id, request.args, request.kwargs)
        with entered(self, request):
            try:
                self.before_start(*of)
                value = self._run(request)
            except (Exception, TaskStopped) as error:
                if not request.throws:
                    self._tell(request, error, *of)
                raise
            _hook(request, self.on_success, value, *of)
            _hook(request, self.after_return, SUCCESS, value, *of, None)
        return value

    def _tell(self, request: Request, error: Any, *of: Any) -> None:
        """Call the hooks after an exception. They may send statements, also when the time is over."""
        if isinstance(error, Retry):
            _hook(request, self.on_retry, error.exc, *of, ExceptionInfo(error))
        elif not isinstance(error, FlowWord) and not isinstance(getattr(error, "reason", None), TaskCancelled):
            token = current_attempt.set(None)
            _hook(request, self.on_failure, error, *of, ExceptionInfo(error))
            _hook(request, self.after_return, FAILURE, error, *of, None)
            current_attempt.reset(token)

    def _run(self, request: Request) -> Any:
        """Call the function, and retry it by ``autoretry_for``."""
        # A base may have a __call__() of its own, around run().
        function = self.run if type(self).__call__ is Task.__call__ else self
        try:
            value = function(*request.args, **request.kwargs)
            if request.context is not None:
                request.context.check()
        except FlowWord:
            raise
        except (Exception, TaskStopped) as error:
            # A time that is over is an Exception in Celery.
            cause = error.reason if isinstance(error, TaskStopped) else error
            if isinstance(cause, TaskCancelled) or not self._retries(error, cause):
                raise
            backoff = {"countdown": self.countdown_of(request.retries)} if self.retry_backoff else {}
            raise self.retry(exc=cause, **{**self.retry_kwargs, **backoff}) from error
        if request.postponed is not None:
            raise request.postponed
        return value

    def _retries(self, *errors: BaseException) -> bool:
        wanted: tuple[Any, ...] = tuple(self.autoretry_for)
        unwanted: tuple[Any, ...] = tuple(self.dont_autoretry_for)
        return any(isinstance(each, wanted) and not isinstance(each, unwanted) for each in errors)

    def countdown_of(self, retries: int) -> int:
        """Return the seconds before the next automatic retry, after some: ``retry_backoff``, doubled each time."""
        bound = int(min(self.retry_backoff_max, int(max(1.0, float(self.retry_backoff))) * 2**retries))
        return randrange(bound + 1) if self.retry_jitter else bound  # noqa: S311

    def retry(self, args: Any = None, kwargs: Any = None, exc: Any = None, throw: bool = True, **options: Any) -> Any:
        """Try the task again: ``raise self.retry(exc=error, countdown=30)``.

        ``eta``: a date; ``countdown``: seconds, ``default_retry_delay`` without either; ``max_retries``: instead of the
        task's own; ``throw=False``: return the exception, and the attempt ends with the function. With other arguments
        or options it is another task. Raises ``exc``, or ``MaxRetriesExceededError``, after the last retry.
        """
        request = self.request
        eta, countdown, most = (options.pop(name, None) for name in ("eta", "countdown", "max_retries"))
        limit = self.max_retries if most is None else most
        if request.called_directly:
            raise exc or Retry("Task can be retried")
        if limit is not None and request.retries >= limit:
            raise exc or MaxRetriesExceededError(f"{self.name} has been retried {request.retries} times, its limit.")
        delay = self.default_retry_delay if countdown is None and eta is None else countdown
        error: Any = Retry(exc=exc, when=delay if eta is None else words.aware(eta))
        own = (list(request.args), request.kwargs)
        wanted = (own[0] if args is None else list(args), own[1] if kwargs is None else kwargs)
        if wanted != own or options:
            # Another call, which is another row. This one ends.
            self.apply_async(*wanted, **options, countdown=delay, eta=eta, retries=request.retries + 1)
            error = Ignore("It is tried again with other arguments.") if throw else error
        elif (claim := running_claim.get()) is not None:
            # The limit is kept here, because each call may have another one.
            claim.max_retries = max(claim.max_retries, claim.retries + 1)
        if throw:
            raise error from exc
        request.postponed = error if wanted == own and not options else None
        return error

    def update_state(self, task_id: str | None = None, state: str | None = None, meta: Any = None) -> None:
        """Report progress: ``meta={"current": 3, "total": 10}``. AsyncResult.state is PROGRESS, and ``info`` this dict.

        Raises ``TaskOptionError`` for another ``meta``.
        """
        if not isinstance(meta, dict) or "current" not in meta:
            text = 'A task reports progress, as {"current": 3, "total": 10}. Write other values to a row of your own.'
            raise TaskOptionError(f"{self.name}.update_state(): meta is {meta!r}. {text}")
        if self.request.context is not None:
            self.request.context.progress(meta["current"], meta.get("total"))


def _hook(request: Request, function: Callable[..., None], *values: Any) -> None:
    """Call a hook that comes after the outcome. Its error changes nothing, and is logged."""
    try:
        function(*values)
    except Exception:
        if request.is_eager:
            raise
        logger.exception("%s of task %s raised an error.", function.__qualname__, request.id)


#: The name of what a row's ``meta`` has of the bridge.
META = "celery"


# In the queue that each worker serves, whatever its own queues are.
@task(queue_name=OWN_QUEUE)
def call_errbacks(number: int, *, if_cancelled: bool = False) -> None:
    """Call the errbacks of a task that has failed. ``if_cancelled``: that never ran, because of others."""
    row = result.rows(number).first()
    if row is None or (if_cancelled and row.status != "CANCELLED"):
        return
    failed = result.AsyncResult(number)
    request = Request(id=failed.id, args=row.args, kwargs=row.kwargs, task=row.task_path, called_directly=False)
    for errback in row.meta[META]["errbacks"]:
        call_errback(canvas.signature(errback), request, failed.result, failed.traceback)


def call_errback(errback: Any, request: Request, error: BaseException, traceback: str | None) -> None:
    """Call an errback as Celery does: with (request, exc, traceback), or enqueue it with the id of the failed task."""
    if errback.kind is None and _takes_more_than_the_id(errback):
        errback(request, error, traceback)
    else:
        errback.apply_async((request.id,))


def _takes_more_than_the_id(errback: Any) -> bool:
    if errback.immutable or errback.type.is_bound:
        return False
    parameters = signature(errback.type.run).parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return any(each.kind is Parameter.VAR_POSITIONAL for each in parameters) or len(positional) - len(errback.args) > 1


#: What has to wait for the settings, or for the apps: a task that is decorated in celery.py beside settings.py.
pending: list[Callable[[], Any]] = []


def when(is_ready: bool, function: Callable[[], Any]) -> None:
    """Call a function now, or when Django is ready."""
    if is_ready:
        function()
    else:
        pending.append(function)


def make(function: Callable[..., Any], options: dict[str, Any], app: Any) -> Task:
    """Return the task of a decorated function. Raises ``TaskOptionError`` for what the bridge cannot carry."""
    where = f"@shared_task on {function.__qualname__}"
    words.check(where, options, words.OF_TASK)
    base, is_bound = options.pop("base", None) or Task, options.pop("bind", False)
    if not isinstance(base, type) or not issubclass(base, Task):
        raise TaskOptionError(f"{where}: base is {base!r}; give a class with django_pglock.contrib.celery.Task.")
    if iscoroutinefunction(function):
        raise TaskOptionError(f"{where}: it is a coroutine function, which Celery does not run either. Write @task.")
    own = {name: options[name] for name in options if name not in words.REFUSED}
    own |= {"run": function if is_bound else staticmethod(function), "is_bound": is_bound, "__wrapped__": function}
    own |= {"__doc__": function.__doc__, "__module__": function.__module__}
    return register(type(function.__name__, (base,), own)(), app)


def register(task: Task, app: Any) -> Task:
    """Let workers find a task."""
    canvas.tasks[task.name], task.app = task, app
    when(settings.configured, partial(getattr, task, "definition"))
    return task
