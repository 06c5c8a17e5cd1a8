"""Checks whether a function accepts the arguments of a call, when the call is enqueued instead of when it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django_pglock.errors import TaskArgumentsError

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields


def check_call(task: TaskFields, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ``TaskArgumentsError``, a ``TypeError``, for a call that Python would refuse.

    The calls of a function with ``group=`` are dicts in a list, so their names are not those of its parameters.
    """
    if task.group is None and (why := misfit(task.func, task.takes_context, len(args), *kwargs)):
        raise TaskArgumentsError(f"{task.module_path}() {why}")


# Cached, because the answer depends only on names and numbers, and to bind a call takes ten times as long.
@lru_cache(maxsize=4096)
def misfit(function: Callable[..., Any], takes_context: bool, count: int, *names: str) -> str | None:
    """Return why a function does not accept ``count`` positional arguments and these names; None: it does."""
    try:
        # Not the function that a decorator has wrapped: the decorator may add arguments of its own.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # some functions written in C have none
        return None
    try:
        signature.bind(*[None] * (takes_context + count), **dict.fromkeys(names))
    except TypeError as error:
        return f"{_as_python_says(str(error))}. It takes {_shown(signature, takes_context)}."
    return None


def _as_python_says(text: str) -> str:
    """Return the words of ``Signature.bind()`` as the end of a sentence that begins with the function."""
    return f"got {text}" if text.startswith(("too many", "multiple")) else text


def _shown(signature: inspect.Signature, takes_context: bool) -> str:
    """Return the parameters of a call, without annotations and without the context, which the worker adds."""
    parameters = list(signature.parameters.values())[takes_context:]
    plain = [each.replace(annotation=each.empty) for each in parameters]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
