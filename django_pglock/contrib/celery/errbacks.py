"""What ``link_error=`` is here: a task that the end of the failed one enqueues, and that calls the errbacks."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from django_pglock.contrib.celery import canvas
from django_pglock.contrib.celery.request import Request
from django_pglock.contrib.celery.result import AsyncResult, number_of, rows
from django_pglock.tasks.definition import task
from django_pglock.tasks.queues import OWN_QUEUE

#: The name of what a row's ``meta`` has of the bridge.
META = "celery"


# In the queue that each worker serves, whatever its own queues are.
@task(queue_name=OWN_QUEUE)
def call_errbacks(number: int, *, if_cancelled: bool = False) -> None:
    """Call the errbacks of a task that has failed. ``if_cancelled``: that never ran, because of others."""
    row = rows(number).first()
    if row is None or (if_cancelled and row.status != "CANCELLED"):
        return
    result = AsyncResult(number)
    request = Request(id=result.id, args=row.args, kwargs=row.kwargs, task=row.task_path, called_directly=False)
    for errback in row.meta[META]["errbacks"]:
        call_errback(canvas.signature(errback), request, result.result, result.traceback)


def watch(result: Any) -> None:
    """Call the errbacks of a chord's body also if it never runs, because a call of its header has failed."""
    number = number_of(result.id)
    call_errbacks.using(after_ended=number).enqueue(number, if_cancelled=True)


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
