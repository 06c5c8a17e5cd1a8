"""Calls as values, and what is made of them: ``signature``, ``chain``, ``group`` and ``chord``.

All rows of a chain, a group or a chord are written at once, in one transaction. Each call waits for those before it by
``after=``, and gets their results as its first argument when it runs. So no worker has to enqueue the next call, and if
one fails, those behind it end as cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from operator import itemgetter
from typing import Any

from django.db import transaction

from django_pglock.contrib.celery.exceptions import NotRegistered
from django_pglock.contrib.celery.options import NEEDED, conf
from django_pglock.contrib.celery.result import BACKEND, GroupResult
from django_pglock.tasks import registry
from django_pglock.tasks.backends import database_of_tasks

#: All tasks of the bridge, by their names: only these are called, whatever a row says.
tasks: dict[str, Any] = {}
#: The option of calls that run here, now.
EAGER = "is_eager"
#: The options that are lists of calls.
LINKS = ("link", "link_error")


class Signature(dict[str, Any]):
    """A call of a task: ``send.s(1)``. Results come before its own arguments, unless it is immutable: ``send.si(1)``.

    As in Celery it is a dict, so a call may be an argument of another one.
    """

    kind: str | None = None
    task, args, kwargs = (property(itemgetter(name)) for name in ("task", "args", "kwargs"))
    options, immutable = (property(itemgetter(name)) for name in ("options", "immutable"))

    def __init__(
        self, task: Any, args: Any = (), kwargs: Any = None, options: Any = None, immutable: bool = False, **more: Any
    ) -> None:
        more.pop("app", None)
        super().__init__(task=getattr(task, "name", task), args=list(args or ()), kwargs=dict(kwargs or {}))
        self.update(options={**(options or {}), **more}, immutable=immutable, subtask_type=self.kind)

    @property
    def type(self) -> Any:
        """The task. Raises ``NotRegistered`` for a name that this process does not know."""
        if self.task not in tasks and not (registry.import_function(self.task) and self.task in tasks):
            raise NotRegistered(f"No task is called {self.task!r}. Its module is not imported, or it was removed.")
        return tasks[self.task]

    def clone(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Return a copy with more arguments in front, and other options."""
        copy = deepcopy(self)
        if not self.immutable:
            copy.update(args=[*(args or ()), *self.args], kwargs={**self.kwargs, **(kwargs or {})})
        return copy.set(**options)

    def set(self, immutable: bool | None = None, **options: Any) -> Any:
        """Set options of ``apply_async()``, and return this call."""
        self["immutable"] = self.immutable if immutable is None else immutable
        self.options.update(options)
        return self

    def link(self, callback: Any) -> Any:
        """Call ``callback`` with the result after a success. Return it."""
        self.set(link=[*listed(self.options.get("link")), callback])
        return callback

    def link_error(self, errback: Any) -> Any:
        """Call ``errback`` after the last failure. Return it."""
        self.set(link_error=[*listed(self.options.get("link_error")), errback])
        return errback

    def on_error(self, errback: Any) -> Any:
        """Call ``errback`` after the last failure. Return this call."""
        self.link_error(errback)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function here, now."""
        call = self.clone(args, kwargs)
        return self.type(*call.args, **call.kwargs)

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Enqueue it, with more arguments in front."""
        return self.apply_async(args, kwargs)

    def apply_async(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Enqueue it, with more arguments in front, and other options. Returns its result."""
        with together():
            return self.clone(args, kwargs).start(options)

    def apply(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Run it here, now. Returns its result."""
        return self.clone(args, kwargs).start({**options, EAGER: True})

    def start(self, options: Mapping[str, Any] | None = None, after: Any = None) -> Any:
        """Enqueue it, to run after the result, or the results, of other calls. Returns its result."""
        return self.type.start(self.args, self.kwargs, self.own(options), after=after, takes_result=not self.immutable)

    def own(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the options of this call with others over them, and the links of both."""
        both = (self.options, options or {})
        links = {name: [link for each in both for link in listed(each.get(name))] for name in LINKS}
        return {**both[0], **both[1], **{name: each for name, each in links.items() if each}}

    def __or__(self, other: Any) -> Any:
        """Return the chain of this call and another one."""
        return chain(*_parts(self), *_parts(other))


class chain(Signature):  # noqa: N801 - Celery's name
    """Calls one after the other. Each gets the result of the one before."""

    kind = "chain"
    #: How many of the calls get the arguments of the whole; None: all.
    takers: int | None = 1

    def __init__(self, *calls: Any, **options: Any) -> None:
        several = calls[0] if len(calls) == 1 and not isinstance(calls[0], Mapping) else calls
        super().__init__(
            f"celery.{self.kind}", kwargs={"tasks": [signature(each) for each in several]}, options=options
        )

    @property
    def tasks(self) -> list[Any]:
        """The calls."""
        return [signature(each) for each in self.kwargs["tasks"]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply_async(args, kwargs)

    def clone(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        copy = deepcopy(self)
        copy.kwargs["tasks"] = calls = copy.tasks
        for number, call in enumerate(calls[: self.takers]):
            calls[number] = call.clone(args, kwargs)
        return copy.set(**options)

    def start(self, options: Mapping[str, Any] | None = None, after: Any = None) -> Any:
        first = self.own(options)
        last = {name: first.pop(name) for name in ("link", NEEDED) if name in first}
        # Every call has the errbacks: only one fails, and those behind it never run.
        own = {name: first[name] for name in ("link_error", EAGER) if name in first}
        for number, call in enumerate(self.tasks, 1):
            more = last if number == len(self.tasks) else {NEEDED: True}
            after = call.start({**(first if number == 1 else own), **more}, after)
        return after


class group(chain):  # noqa: N801
    """Calls beside each other. What follows gets the list of their results."""

    kind = "group"
    takers = None

    def start(self, options: Mapping[str, Any] | None = None, after: Any = None) -> Any:
        own = self.own(options)
        return GroupResult([each.start(own, after) for each in self.tasks], after)


class chord(chain):  # noqa: N801
    """A group, and the ``body`` that gets the list of its results: ``chord([add.s(1, 1), add.s(2, 2)])(total.s())``."""

    kind = "chord"

    def __init__(self, header: Any, body: Any = None, **options: Any) -> None:
        header = header if isinstance(header, group) else group(*listed(header))
        super().__init__(header, *([] if body is None else [body]), **options)

    def __call__(self, body: Any = None, **options: Any) -> Any:
        return chord(self.tasks[0], body or self.tasks[1], **self.options).apply_async(**options)

    def start(self, options: Mapping[str, Any] | None = None, after: Any = None) -> Any:
        first = self.own(options)
        # Its errbacks are those of the body, and are called if the header fails as well.
        last = {name: first.pop(name) for name in (*LINKS, NEEDED) if name in first}
        header, body = self.tasks
        after = header.start({**first, NEEDED: True}, after)
        return body.start({**last, EAGER: first.get(EAGER, False)}, after)


def signature(task: Any, *args: Any, **options: Any) -> Any:
    """Return the call of a task, by the task or its name, or of a dict that was a call and came as JSON."""
    if isinstance(task, Signature) or not isinstance(task, Mapping):
        return task if isinstance(task, Signature) else Signature(task, *args, **options)
    if task["subtask_type"] is None:
        return Signature(task["task"], task["args"], task["kwargs"], task["options"], task["immutable"])
    kind = {"chain": chain, "group": group, "chord": chord}[task["subtask_type"]]
    return kind(*map(signature, task["kwargs"]["tasks"])).set(**task["options"])


subtask = signature


def listed(value: Any) -> list[Any]:
    """Return one value or several as a list."""
    return [] if value is None else [value] if isinstance(value, Mapping) else list(value)


def together() -> AbstractContextManager[Any]:
    """Return the transaction in which all rows of a canvas are written."""
    if conf.task_always_eager:
        return nullcontext()
    return transaction.atomic(using=database_of_tasks(BACKEND, option="TASKS"))


def _parts(call: Any) -> list[Any]:
    is_plain = isinstance(call, Signature) and call.kind == "chain" and not call.options
    return call.tasks if is_plain else [signature(call)]
